"""What trace entries know beyond name and policy: time, kept bytes, phase; and what mismatch errors say."""

import json
from typing import Any

import pytest
import torch
from helpers.events import Hidden
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import SavesDriftError


def body(x: Tensor) -> Tensor:
    h = remat.region(torch.exp, "keep", recompute=False)(torch.sin(x))
    inner = lambda t: remat.region(torch.tanh, "inner", recompute=True)(t) * 2
    return remat.region(inner, "again", recompute=True)(h).exp()


def shown(entries: list[Any]) -> list[tuple[Any, ...]]:
    return [(one.name, one.policy, one.phase, one.kept_bytes) for one in entries]


def test_entries_of_a_whole_step(x: Tensor):
    for _ in range(3):
        with remat.collect_trace() as trace:
            remat.checkpoint(region_name="layers.0")(body)(x).sum().backward()
        assert shown(trace.entries) == [
            ("keep", "save", "forward", 4 * 6 * 8),
            ("again", "recompute", "forward", None),
            ("inner", "recompute", "forward", None),
        ]
        assert shown(trace.replayed) == [
            ("again", "recompute", "replay", None),
            ("inner", "recompute", "replay", None),
        ]
        assert all(one.seconds is not None and one.seconds > 0 for one in (*trace.entries, *trace.replayed))
        assert trace.entries[1].seconds >= trace.entries[2].seconds
        assert trace.format() == "torch_remat trace\nkeep: save\nagain: recompute\ninner: recompute"


def test_kept_bytes_when_the_block_ends_before_backward(x: Tensor):
    with remat.collect_trace() as trace:
        y = remat.checkpoint(region_name="layers.0")(body)(x)
    assert trace.entries[0].kept_bytes == 192
    assert trace.replayed == []
    y.sum().backward()
    assert trace.replayed == []


def test_details_and_json(x: Tensor):
    with remat.collect_trace() as trace:
        y = remat.trace_scope(remat.checkpoint(region_name="layers.0")(body), "stack", metadata="first")(x)
        y.sum().backward()
    data = json.loads(trace.to_json())
    (scope,) = data["entries"]
    assert (scope["name"], scope["metadata"], len(scope["entries"])) == ("stack", "first", 3)
    assert scope["entries"][0]["kept_bytes"] == 192
    lines = trace.format(details=True).splitlines()
    assert lines[1] == "stack [first]"
    assert lines[2].startswith("  keep: save  (layers.0, ")
    assert lines[2].endswith(" ms, keeps 192 B)")
    assert lines[5] == "replayed"


def test_a_region_that_raises_has_its_time(x: Tensor):
    def fails(t: Tensor) -> Tensor:
        raise KeyError("mine")

    with remat.collect_trace() as trace, pytest.raises(KeyError):
        remat.checkpoint()(lambda t: remat.region(fails, "f", recompute=False)(t))(x)
    assert trace.entries[0].seconds is not None
    assert trace.entries[0].kept_bytes == 0


def test_a_trace_changes_nothing(x: Tensor):
    expected = torch.autograd.grad(body(x).sum(), x)[0]
    for _ in range(3):
        with remat.collect_trace():
            assert torch.equal(torch.autograd.grad(remat.checkpoint()(body)(x).sum(), x)[0], expected)


class TestMismatch:
    STATE = Hidden(rows=4)

    def test_it_names_tensor_region_operation_and_line_with_both_sides(self, x: Tensor):
        state = self.STATE

        def shrinks(t: Tensor) -> Tensor:
            return torch.sin(t[: state["rows"]] * 2)

        def drifting(t: Tensor) -> Tensor:
            h = remat.region(torch.nn.functional.gelu, "keep", recompute=False)(t)
            return remat.region(shrinks, "shrinks", recompute=True)(h).exp()

        for _ in range(2):
            state["rows"] = 4
            y = remat.checkpoint(region_name="layers.0")(drifting)(x)
            state["rows"] = 3
            with pytest.raises(SavesDriftError) as caught:
                y.sum().backward()
            lines = str(caught.value).splitlines()
            assert len(lines) <= 15
            assert "checkpoint layers.0" in lines[1]
            assert "in region shrinks" in lines[1]
            assert "by SinBackward0 as self, made by MulBackward0, at " in lines[1]
            assert "test_trace_details.py" in lines[1]
            assert lines[2] == "  forward: shape (4, 6), dtype float64, device cpu"
            assert lines[3] == "  replay:  shape (3, 6), dtype float64, device cpu (recomputed shapes differ)"
            assert lines[-1].startswith("To fix: ")

    def test_another_dtype_is_called_one_and_verify_names_the_operation(self, x: Tensor):
        state = self.STATE

        def cast(t: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=state["rows"] % 2 == 0):
                state["rows"] += 1
                return torch.sin(t.float() @ torch.ones(6, 6)).double()

        state["rows"] = 4
        with pytest.raises(SavesDriftError) as caught:
            remat.verify_replay(remat.checkpoint(region_name="layers.0")(cast), x)
        lines = str(caught.value).splitlines()
        assert "saved by MmBackward0 as mat2" in lines[1]
        assert lines[3].endswith("(recomputed dtypes differ)")
        assert "carry autocast" in lines[-1]
