"""P7: after an exception anywhere, everything global is as before, and the next checkpoint works."""

from __future__ import annotations

import contextvars
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker, gc_off
from helpers.compare import assert_same_run, compare, run_once
from helpers.engine import EagerEngine
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torch_remat as remat
from torch_remat.errors import RandomStateError

VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)


class Boom(Exception):
    """The failure that the tests plant."""


# Those of the test and of the library: compilers have others, and change them.
_OWN = {VARIABLE} | {
    value
    for name, module in tuple(sys.modules.items())
    if name.partition(".")[0] == "torch_remat"
    for value in vars(module).values()
    if isinstance(value, contextvars.ContextVar)
}


@contextmanager
def no_trace() -> Iterator[None]:
    """Require every piece of global state to be the same after the block."""
    before = global_state()
    yield
    after = global_state()
    assert before == after


def global_state() -> dict[str, Any]:
    """What a failed checkpoint could leave changed."""
    return {
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "grad mode": torch.is_grad_enabled(),
        "random state": torch.get_rng_state().sum().item(),
        "python random state": random.getstate(),
        "context variables": {var.name: value for var, value in contextvars.copy_context().items() if var in _OWN},
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default device": torch.get_default_device(),
        "recomputing": remat.is_recomputing(),
    }


def working_body(t: Tensor) -> Tensor:
    """A body with both kinds of region that must work after each failure."""
    a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
    return remat.region(torch.exp, "b", recompute=True)(a).tanh()


class TestP7FailureLeavesNoTrace:
    """Plant a failure, look for traces, then use the library again."""

    @pytest.mark.parametrize("where", ["bare", "save", "rec", "nested", "in_scope", "under_no_grad"])
    @pytest.mark.parametrize("seen_before", [False, True])
    def test_p7_exception_in_forward(self, engine: EagerEngine, x: Tensor, where: str, seen_before: bool) -> None:
        state = {"fail": False}

        def fail(t: Tensor) -> Tensor:
            if state["fail"]:
                raise Boom(where)
            return torch.exp(t)

        def body(t: Tensor) -> Tensor:
            t = remat.region(F.gelu, "first", recompute=False)(torch.sin(t))
            if where == "bare":
                return fail(t)
            if where == "nested":
                return remat.checkpoint(region_name="inner")(fail)(t)
            if where == "in_scope":
                with remat.name_scope("scope"):
                    return remat.region(fail, "second", recompute=True)(t)
            if where == "under_no_grad":
                with torch.no_grad():
                    return remat.region(fail, "second", recompute=False)(t) + t
            return remat.region(fail, "second", recompute=where == "rec")(t)

        call = engine.checkpoint(body)
        if seen_before:
            call(x)
        state["fail"] = True
        with no_trace(), pytest.raises(Boom):
            call(x)
        state["fail"] = False
        compare(body, [x], engine=engine)
        compare(working_body, [x], engine=engine)

    def test_p7_exception_in_forward_frees_everything(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            a = remat.region(torch.exp, "a", recompute=False)(torch.sin(t))
            b = torch.tanh(a)
            raise Boom(str(b.shape))

        with gc_off():
            for _ in range(3):
                tracker = StorageTracker()
                with tracker:
                    try:
                        engine.checkpoint(body)(x)
                    except Boom as error:
                        error.__traceback__ = None
                assert tracker.alive_bytes() == 0

    @pytest.mark.parametrize("where", ["bare", "rec", "nested"])
    def test_p7_exception_in_replay(self, engine: EagerEngine, x: Tensor, where: str) -> None:
        state = {"fail": False}

        def fragile(t: Tensor) -> Tensor:
            if remat.is_recomputing() and state["fail"]:
                raise Boom(where)
            return torch.exp(t)

        def body(t: Tensor) -> Tensor:
            t = remat.region(F.gelu, "first", recompute=False)(torch.sin(t))
            if where == "bare":
                t = fragile(t)
            elif where == "rec":
                t = remat.region(fragile, "second", recompute=True)(t)
            else:
                t = remat.checkpoint(region_name="inner")(fragile)(t)
            return torch.tanh(t).exp()

        expected = run_once(body, [x])
        call = engine.checkpoint(body)
        for _ in range(2):
            state["fail"] = True

            def backward(outputs: Any, inputs: list[Tensor]) -> None:
                with no_trace(), pytest.raises(Boom):
                    engine.backward([outputs.sum()])
                assert inputs[0].grad is None
                compare(working_body, [x], engine=engine)
                state["fail"] = False
                torch.manual_seed(1234)
                engine.backward([outputs], [(torch.cos(torch.arange(24.0).double()) + 0.5).reshape(4, 6)])

            assert_same_run(expected, run_once(call, [x], backward=backward), "retried")

    @pytest.mark.parametrize("when", ["input", "save", "output", "unpack_input", "unpack_save", "unpack_output"])
    def test_p7_exception_in_saved_tensors_hooks(self, engine: EagerEngine, x: Tensor, when: str) -> None:
        kinds = {
            "input": remat.SavedTensorKind.CHECKPOINT_INPUT,
            "save": remat.SavedTensorKind.BACKWARD,
            "output": remat.SavedTensorKind.SAVE_OUTPUT,
        }
        state = {"fail": True}

        def pack(t: Tensor) -> tuple[Any, Tensor]:
            kind = remat.current_saved_tensor_info().kind
            if state["fail"] and kinds.get(when) == kind:
                raise Boom(when)
            return kind, t

        def unpack(packed: tuple[Any, Tensor]) -> Tensor:
            if state["fail"] and kinds.get(when.removeprefix("unpack_")) == packed[0]:
                raise Boom(when)
            return packed[1]

        def body(t: Tensor) -> Tensor:
            a = remat.region(torch.exp, "a", recompute=False)(torch.sin(t))
            b = remat.region(F.gelu, "b", recompute=False)(a)
            return remat.region(torch.sin, "c", recompute=True)(b).tanh()

        call = engine.checkpoint(body, saved_tensors_hooks=(pack, unpack))
        for _ in range(2):
            state["fail"] = True
            if when.startswith("unpack"):
                output = call(x)
                with no_trace(), pytest.raises(Boom):
                    engine.backward([output.sum()])
            else:
                with no_trace(), pytest.raises(Boom):
                    output = call(x)
            state["fail"] = False
            compare(body, [x], options={"saved_tensors_hooks": (pack, unpack)}, engine=engine)
            compare(working_body, [x], engine=engine)

    @pytest.mark.parametrize("method", ["snapshot", "restore"])
    @pytest.mark.parametrize("nth", [1, 2, 3, 4])
    def test_p7_exception_in_state_hook(self, engine: EagerEngine, x: Tensor, method: str, nth: int) -> None:
        """The n-th snapshot or restore of a step raises: forward entry, region exit, replay entry, replay exit."""
        hook = FailingHook(method, nth)
        call = engine.checkpoint(working_body, recompute_state_hooks=(hook,))
        for _ in range(2):
            hook.calls.clear()
            with no_trace():
                try:
                    engine.backward([call(x).sum()])
                except Boom:
                    pass
                else:
                    assert hook.calls.count(method) < nth
            compare(working_body, [x], engine=engine)
            compare(working_body, [x], options={"recompute_state_hooks": (FailingHook("", 0),)}, engine=engine)

    def test_p7_first_hook_is_restored_when_the_second_fails(self, engine: EagerEngine, x: Tensor) -> None:
        class Variable:
            def snapshot(self) -> float:
                return VARIABLE.get()

            def restore(self, state: float) -> None:
                VARIABLE.set(state)

        failing = FailingHook("restore", 1)
        call = engine.checkpoint(working_body, recompute_state_hooks=(Variable(), failing))
        token = VARIABLE.set(3.0)
        output = call(x)
        VARIABLE.reset(token)
        with pytest.raises(Boom):
            engine.backward([output.sum()])
        assert VARIABLE.get() == 1.0

    def test_p7_bad_region_output_or_name_leaves_no_trace(self, engine: EagerEngine, x: Tensor) -> None:
        def duplicate(t: Tensor) -> Tensor:
            t = remat.region(torch.sin, "same", recompute=False)(t)
            return remat.region(torch.sin, "same", recompute=False)(t)

        for _ in range(2):
            with no_trace(), pytest.raises(RuntimeError, match="Duplicate torch_remat region name"):
                engine.checkpoint(duplicate)(x)
            compare(working_body, [x], engine=engine)

    def test_p7_keyboard_interrupt_is_cleaned_up_too(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            t = torch.exp(torch.sin(t))
            if remat.is_recomputing():
                raise KeyboardInterrupt
            return t

        def in_forward(t: Tensor) -> Tensor:
            remat.region(torch.exp, "a", recompute=False)(torch.sin(t))
            raise KeyboardInterrupt

        with no_trace(), pytest.raises(KeyboardInterrupt):
            engine.checkpoint(in_forward)(x)

        def late(t: Tensor) -> Tensor:
            t = torch.sin(t)
            if remat.is_recomputing():
                raise KeyboardInterrupt
            return torch.exp(t)

        output = engine.checkpoint(late)(x)
        with no_trace(), pytest.raises(KeyboardInterrupt):
            engine.backward([output.sum()])
        compare(working_body, [x], engine=engine)

    def test_p7_backward_that_fails_elsewhere_can_be_retried(self, engine: EagerEngine, x: Tensor) -> None:
        """A node of another part of the graph raises after our replay ran; where eager can retry, so can we."""
        state = {"fail": True}

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                return t.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                if state["fail"]:
                    state["fail"] = False
                    raise Boom
                return grad

        def model(call: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
            return call(Fails.apply(t))

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            state["fail"] = True
            with pytest.raises(Boom):
                engine.backward([outputs.sum()], retain_graph=True)
            assert not remat.is_recomputing()
            engine.backward([outputs.sum()])

        expected = run_once(lambda t: model(working_body, t), [x], backward=backward)
        call = engine.checkpoint(working_body)
        for _ in range(3):
            actual = run_once(lambda t: model(call, t), [x], backward=backward)
            assert_same_run(expected, actual, "retried")


class FailingHook:
    """A state hook whose ``nth`` call of ``method`` raises."""

    def __init__(self, method: str, nth: int) -> None:
        self.method, self.nth = method, nth
        self.calls: list[str] = []

    def _count(self, method: str) -> None:
        self.calls.append(method)
        if method == self.method and self.calls.count(method) == self.nth:
            raise Boom(f"{method} {self.nth}")

    def snapshot(self) -> int:
        self._count("snapshot")
        return 0

    def restore(self, state: int) -> None:
        self._count("restore")


class TestP7NothingOfAFailedReplayIsUsed:
    """What a failed replay has filled may be wrong: a retried backward makes it again."""

    def test_p7_values_of_a_replay_that_raised_halfway(self, engine: EagerEngine, x: Tensor) -> None:
        class Switch:
            drifts = False

        def body(t: Tensor) -> Tensor:
            h = torch.sin(t)
            if remat.is_recomputing() and Switch.drifts:
                h = h * 2
            h = torch.exp(h)
            if remat.is_recomputing() and Switch.drifts:
                raise ValueError("planted")
            return torch.tanh(h)

        expected = torch.autograd.grad(body(x).sum(), x)[0]
        for _ in range(3):
            output = engine.checkpoint(body)(x)
            Switch.drifts = True
            with pytest.raises(ValueError, match="planted"):
                torch.autograd.grad(output.sum(), x)
            Switch.drifts = False
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)

    def test_p7_random_numbers_refused_at_the_end_of_replay_are_refused_again(
        self, engine: EagerEngine, x: Tensor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Switch:
            draws = False

        def body(t: Tensor) -> Tensor:
            h = torch.sin(t)
            return torch.exp(h + torch.rand(h.shape, dtype=h.dtype) if Switch.draws else h + 1)

        monkeypatch.setattr("torch_remat.runtime.replay.shared_with_threads", lambda generator: False)
        call = engine.checkpoint(body)
        engine.backward([call(x).sum()])
        Switch.draws = True
        output = call(x)
        for _ in range(3):
            with pytest.raises(RandomStateError, match="GeneratorHook"):
                torch.autograd.grad(output.sum(), x)
