"""``collect_trace`` and ``trace_scope``: which regions ran, in which order, under which policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.engine import EagerEngine
from torch import Tensor

import torch_remat as remat


def chained(t: Tensor) -> Tensor:
    """Two regions, one in a scope."""
    t = remat.region(torch.sin, "a", recompute=False)(t)
    with remat.name_scope("scope"):
        return remat.region(torch.exp, "b", recompute=True)(t)


class TestTraces:
    """Forward only, innermost collector only, inert regions left out."""

    def test_trace_lists_regions_of_forward(self, engine: EagerEngine, x: Tensor) -> None:
        with remat.collect_trace() as trace:
            engine.backward([engine.checkpoint(chained)(x).sum()])
        text = trace.format()
        assert text.splitlines()[0] == "torch_remat trace"
        assert "a: save" in text
        assert "scope/b: recompute" in text
        assert text.count("a: save") == 1
        assert trace.entries

    def test_trace_of_nothing(self) -> None:
        with remat.collect_trace() as trace:
            pass
        assert trace.format().strip() == "torch_remat trace"

    def test_trace_innermost_collector_records(self, engine: EagerEngine, x: Tensor) -> None:
        with remat.collect_trace() as outer:
            with remat.collect_trace() as inner:
                engine.checkpoint(chained)(x)
        assert "a: save" in inner.format()
        assert "a: save" not in outer.format()

    def test_trace_leaves_inert_regions_out(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(chained, "outer", recompute=False)(torch.sin(t)))

        with remat.collect_trace() as trace:
            engine.checkpoint(body)(x)
        assert "outer: save" in trace.format()
        assert "a: save" not in trace.format()

    def test_trace_scope_nests_and_shows_metadata(self, engine: EagerEngine, x: Tensor) -> None:
        layer = remat.trace_scope(engine.checkpoint(chained), "layer", metadata="first")
        with remat.collect_trace() as trace:
            layer(x)
        lines = trace.format().splitlines()
        index = next(i for i, line in enumerate(lines) if "layer" in line)
        assert lines[index].strip() == "layer [first]"
        indent = len(lines[index]) - len(lines[index].lstrip())
        assert all(len(line) - len(line.lstrip()) > indent for line in lines[index + 1 :])

    def test_trace_scope_is_transparent(self, engine: EagerEngine, x: Tensor) -> None:
        output = remat.trace_scope(engine.checkpoint(chained), "layer")(x)
        assert torch.equal(output, torch.exp(torch.sin(x)))

    @pytest.mark.parametrize(
        ("args", "kwargs", "error"),
        [
            ((5, "name"), {}, RuntimeError),
            ((torch.sin, 5), {}, RuntimeError),
            ((torch.sin, ""), {}, ValueError),
            ((torch.sin, "name"), {"metadata": 5}, RuntimeError),
            ((torch.sin, "name"), {"metadata": ""}, ValueError),
        ],
    )
    def test_trace_scope_bad_input(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Any, x: Tensor) -> None:
        with pytest.raises(error):
            remat.trace_scope(*args, **kwargs)(x)
