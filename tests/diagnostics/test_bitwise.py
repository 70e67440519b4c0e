"""The bitwise check: what differs between forward and replay is found and named, and nothing else is."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import gc_off, live_tensors
from helpers.events import Hidden
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ValuesDriftError
from torch_remat.runtime.bitwise import fingerprint

STATE = Hidden(runs=0)


def drifting(x: Tensor) -> Tensor:
    """Another factor in each run."""
    STATE["runs"] += 1
    return torch.sin(x * (1 + 0.25 * STATE["runs"]))


def scaled(tensor: Tensor) -> Tensor:
    """Another tensor in each run."""
    STATE["runs"] += 1
    return tensor + STATE["runs"] % 2


def body(x: Tensor) -> Tensor:
    h = remat.region(torch.nn.functional.gelu, "keep", recompute=False)(torch.tanh(x))
    return remat.region(drifting, "scale", recompute=True)(h).exp()


def bitwise(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return remat.checkpoint(region_name="layers.0", determinism_check="bitwise", **options)(function)


class TestInBackward:
    def test_values_that_differ_are_named(self, x: Tensor):
        for _ in range(3):
            with pytest.raises(ValuesDriftError) as caught:
                bitwise(body)(x).sum().backward()
            lines = str(caught.value).splitlines()
            assert len(lines) <= 15
            assert lines[0].startswith("Replay computed other values than forward for 2 of ")
            assert lines[1] == "  checkpoint layers.0, region scale: saved tensor 1, float64 (4, 6)"
            assert lines[2] == "  saved by SinBackward0 as self, made by MulBackward0"
            assert lines[3].startswith("  in replay saved at ")
            assert lines[3].endswith(" in drifting")
            assert "test_bitwise.py" in lines[3]
            assert lines[-1].startswith("To fix: ")

    def test_the_failed_backward_can_be_retried_and_default_does_not_look(self, x: Tensor):
        remat.checkpoint()(body)(x).sum().backward()
        y = bitwise(body)(x)
        with pytest.raises(ValuesDriftError):
            y.sum().backward()
        STATE["runs"] -= 2
        y.sum().backward()

    @pytest.mark.parametrize("hooks", [None, (lambda t: t.clone(), lambda t: t)])
    def test_equal_values_pass_and_gradients_are_eagers(self, x: Tensor, hooks: Any):
        linear = torch.nn.Linear(6, 6, dtype=torch.float64)

        def plain(x: Tensor) -> Tensor:
            h = remat.region(linear, "l", recompute=False)(torch.sin(x))
            h = remat.region(F.dropout, "drop", recompute=True)(h)
            return remat.region(lambda t: t.cumsum(-1), "c", recompute=False)(h) * h

        for _ in range(3):
            torch.manual_seed(3)
            expected = torch.autograd.grad(plain(x).sum(), x)[0]
            torch.manual_seed(3)
            call = bitwise(plain, saved_tensors_hooks=hooks, recompute_state_hooks=(remat.GeneratorHook(),))
            assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)

    def test_a_lossy_hook_pair_is_found(self, x: Tensor):
        call = bitwise(body, saved_tensors_hooks=(lambda t: t.float(), lambda t: t.double()))
        with pytest.raises(ValuesDriftError, match="hook pair does not give back what it packed"):
            call(x * 1).sum().backward()

    def test_a_rebuilt_save_of_a_region_is_compared(self, x: Tensor):
        def rebuilt(x: Tensor) -> Tensor:
            return remat.region(torch.cos, "cos", recompute=False)(drifting(x).detach() + x)

        for _ in range(2):
            with pytest.raises(ValuesDriftError, match=r"region cos: an argument that it saves"):
                bitwise(rebuilt)(x).sum().backward()

    def test_integers_that_differ_are_called_a_choice(self, x: Tensor):
        def routed(x: Tensor) -> Tensor:
            STATE["runs"] += 1
            index = (torch.arange(4) + STATE["runs"]) % 4
            return torch.index_select(x, 0, index).sin()

        with pytest.raises(ValuesDriftError, match="a choice that drifts"):
            bitwise(routed)(x).sum().backward()

    def test_nan_and_signed_zero_are_told_apart_by_their_bits(self):
        def signed(x: Tensor) -> Tensor:
            STATE["runs"] += 1
            return x * (torch.zeros(2) * (1 if STATE["runs"] % 2 else -1))

        x = torch.ones(2, requires_grad=True)
        bitwise(lambda t: torch.sin(t * float("nan")))(x).sum().backward()  # equal bits, although NaN != NaN
        with pytest.raises(ValuesDriftError):
            bitwise(signed)(x).sum().backward()

    def test_a_plain_subclass_is_compared(self, x: Tensor):
        class Sub(Tensor):
            pass

        def body(x: Tensor) -> Tensor:
            return drifting(x).as_subclass(Sub).sin().as_subclass(Tensor)

        for tool in (lambda: bitwise(body)(x).sum().backward(), lambda: remat.verify_replay(bitwise(body), x)):
            with pytest.raises(ValuesDriftError, match="for 2 of 3 tensors"):
                tool()

    @pytest.mark.parametrize(
        ("body", "index"),
        [
            (lambda x: x * scaled(torch.ones(6, dtype=torch.float64)), "MulBackward0 as other"),
            (lambda x: torch.tanh(x) * scaled(torch.ones(6, dtype=torch.float64)), "MulBackward0 as other"),
            (lambda x: x.index_select(0, scaled(torch.zeros(2)).long()), "IndexSelectBackward0 as index"),
        ],
    )
    def test_what_no_node_made_is_not_said_to_be_made_by_one(self, x: Tensor, body: Any, index: str):
        with pytest.raises(ValuesDriftError) as caught:
            bitwise(body)(x).sum().backward()
        assert f"  saved by {index}" in str(caught.value).splitlines()

    def test_an_unknown_check_is_refused(self):
        with pytest.raises(ValueError, match="bitwise"):
            remat.checkpoint(determinism_check="values")

    def test_nothing_is_left_behind(self, x: Tensor):
        def once() -> None:
            bitwise(lambda t: torch.exp(remat.region(torch.sin, "s", recompute=False)(t * 2)))(x).sum().backward()

        once()
        once()
        x.grad = None
        with gc_off():
            before = live_tensors()
            for _ in range(3):
                once()
            x.grad = None
            assert live_tensors() == before


class TestFingerprint:
    @pytest.mark.parametrize(
        "dtype",
        [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex128],
    )
    def test_one_changed_element_and_swapped_elements_show(self, dtype: torch.dtype):
        a = torch.arange(12).reshape(3, 4).remainder(5).to(dtype)
        assert torch.equal(fingerprint(a), fingerprint(a.clone()))
        assert torch.equal(fingerprint(a.t()), fingerprint(a.t().contiguous()))
        raw = a.view(torch.uint8).clone()
        raw[1, 0] ^= 1
        assert not torch.equal(fingerprint(a), fingerprint(raw.view(dtype)))
        assert not torch.equal(fingerprint(a), fingerprint(a[[1, 0, 2]]))

    def test_long_tensors_are_taken_in_chunks(self, monkeypatch: pytest.MonkeyPatch):
        a = torch.randn(1000)
        monkeypatch.setattr("torch_remat.runtime.bitwise._CHUNK", 64)
        assert torch.equal(fingerprint(a), fingerprint(a.clone()))
        swapped = torch.cat([a[128:256], a[:128], a[256:]])  # whole chunks
        assert not torch.equal(fingerprint(a), fingerprint(swapped))

    def test_the_place_in_memory_makes_no_difference(self):
        memory = torch.randn(33)
        for size in (8, 9):
            assert torch.equal(fingerprint(memory[1 : 1 + size]), fingerprint(memory[1 : 1 + size].clone()))

    def test_no_elements(self):
        assert fingerprint(torch.empty(0)).tolist() == [0, 0]


class TestVerifyReplay:
    def test_a_model_that_replays_right(self, x: Tensor):
        layers = [remat.checkpoint(region_name=f"layers.{i}")(lambda t: torch.exp(torch.sin(t))) for i in range(3)]

        def model(x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x)
            return x

        for _ in range(2):
            report = remat.verify_replay(model, x)
            assert [one.name for one in report.checkpoints] == ["layers.0", "layers.1", "layers.2"]
            assert report.compared == 3 * 3  # the input, what sin saves, what exp saves
            assert report.format().splitlines()[0] == "9 tensors of 3 checkpoints compared, all bits equal"
        assert x.grad is None

    def test_all_differences_with_their_sizes(self, x: Tensor):
        for _ in range(2):
            with pytest.raises(ValuesDriftError, match="largest difference") as caught:
                remat.verify_replay(remat.checkpoint(region_name="layers.0")(body), x)
            report = caught.value.report
            assert len(report.differences) == 2
            first = report.differences[0]
            assert (first.checkpoint, first.region, first.operation) == ("layers.0", "scale", "SinBackward0 as self")
            assert first.max_difference is not None
            assert 0 < first.max_difference < 1
            assert first.elements == 24
            assert first.differing == 24
            assert "2 differ" in report.format()
            assert len(str(caught.value).splitlines()) <= 15

    @pytest.mark.parametrize(
        ("dtype", "forward", "replay", "largest", "differing"),
        [
            (torch.float32, [1.0, 2.0], [1.0, float("nan")], "nan", 1),
            (torch.float32, [0.0, 1.0], [-0.0, 1.0], "0", 1),
            (torch.float32, [float("nan"), 1.0], [float("nan"), 1.5], "0.5", 1),
            (torch.bfloat16, [1.0, 2.0], [3.0, 4.0], "2", 2),
            (torch.float8_e4m3fn, [1.0, 2.0], [3.0, 2.0], "2", 1),
            (torch.complex64, [1.0, 3j], [1.0, 4.0], "5", 1),
            (torch.bool, [True, False], [True, True], "1", 1),
            (torch.int64, [1, 2], [-1, 2], "2", 1),
        ],
    )
    def test_the_size_of_a_difference_is_that_of_its_bits(
        self, dtype: torch.dtype, forward: Any, replay: Any, largest: str, differing: int
    ):
        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                STATE["runs"] += 1
                ctx.save_for_backward(torch.tensor(forward if STATE["runs"] % 2 else replay).to(dtype))
                return x * 1

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad

        STATE["runs"] = 0
        with pytest.raises(ValuesDriftError) as caught:
            remat.verify_replay(
                remat.checkpoint()(lambda t: Saves.apply(torch.sin(t))), torch.zeros(2, requires_grad=True)
            )
        (difference,) = caught.value.report.differences
        assert f"largest difference {largest}, in {differing} of 2 elements" in difference.lines()

    def test_json_of_a_difference_without_bound(self, x: Tensor):
        def overflows(x: Tensor) -> Tensor:
            STATE["runs"] += 1
            return torch.sin(x.detach().abs().add(1) * (1e308 if STATE["runs"] % 2 else float("inf")) + x)

        STATE["runs"] = 0
        with pytest.raises(ValuesDriftError, match="largest difference inf") as caught:
            remat.verify_replay(remat.checkpoint()(overflows), x)

        def refuse(constant: str) -> Any:
            raise AssertionError(f"{constant} is no JSON")

        data = json.loads(caught.value.report.to_json(), parse_constant=refuse)
        assert data["checkpoints"][0]["differences"][0]["max_difference"] == "inf"

    def test_a_function_without_checkpoints_is_a_body(self, x: Tensor):
        report = remat.verify_replay(lambda t: torch.exp(torch.sin(t)), x)
        assert len(report.checkpoints) == 1
        assert report.compared == 3

    def test_a_replay_that_fails_raises_what_backward_would(self, x: Tensor):
        def changes(x: Tensor) -> Tensor:
            STATE["runs"] += 1
            return torch.exp(torch.sin(x)) if STATE["runs"] % 2 else torch.exp(x)

        STATE["runs"] = 0
        with pytest.raises(remat.errors.SavesDriftError):
            remat.verify_replay(remat.checkpoint()(changes), x)

    def test_misuse(self):
        with pytest.raises(TypeError, match="expects a function"):
            remat.verify_replay(3)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="inside a checkpoint"):
            remat.checkpoint()(lambda t: remat.verify_replay(torch.sin, t))(torch.ones(2, requires_grad=True))

    def test_nothing_is_left_behind(self, x: Tensor):
        def once() -> None:
            remat.verify_replay(lambda t: torch.exp(torch.sin(t)), x)

        once()
        with gc_off():
            before = live_tensors()
            once()
            assert live_tensors() == before

    def test_a_backward_after_it_is_right(self, x: Tensor):
        call = remat.checkpoint()(lambda t: torch.exp(torch.sin(t)))
        remat.verify_replay(call, x)
        expected = torch.autograd.grad(torch.exp(torch.sin(x)).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_one_replay_waits_once():
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    bitwise(lambda t: torch.exp(torch.sin(t)))(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = bitwise(lambda t: torch.exp(torch.sin(t)))(x)  # forward waits for nothing
    finally:
        torch.cuda.set_sync_debug_mode("default")
    y.sum().backward()
