"""``checkpoint(on_missing=...)``: a replay that needs an output which was not kept, because the program changed."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any

import pytest
import torch
from helpers.engine import EagerEngine
from helpers.events import Hidden
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import InvalidValueError, ModifiedError, PlaceholderError, RandomStateError

NUMBERS = itertools.count()


def changing(state: Hidden, function: Any, name: str = "r") -> Any:
    """A body that reads the output of region ``r`` from the moment ``state["reads"]`` is set, with the same saves."""

    def made(t: Tensor) -> Tensor:
        state["times"].append("replay" if remat.is_recomputing() else "forward")
        return function(t)

    def body(t: Tensor) -> Tensor:
        hidden = torch.tanh(t)
        output = remat.region(made, name, recompute=False)(hidden)
        gate = output.detach() if state["reads"] else hidden.detach()
        return torch.sin(hidden * 2) * gate.sigmoid() + output

    body.__code__ = body.__code__.replace(co_name=f"body_{next(NUMBERS)}")  # never seen before: nothing is known of it
    return body


class TestP3OnMissing:
    """The same path, the same number of saves, another reader."""

    def test_p3_on_missing_rerun_gives_the_numbers_and_warns_once(self, engine: EagerEngine, x: Tensor) -> None:
        state = Hidden({"reads": False, "times": []})
        body = changing(state, lambda t: t.sin() * 3)
        call = engine.checkpoint(body, region_name="c", on_missing="rerun")
        for step in range(6):
            state["reads"] = step >= 3
            expected = torch.autograd.grad(body(x).sum(), x)[0]
            state["times"].clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = torch.autograd.grad(call(x).sum(), x)[0]
            assert torch.equal(found, expected)
            assert state["times"] == (["forward", "replay"] if step == 3 else ["forward"])
            assert [str(one.message)[:59] for one in caught] == (
                ["Replay of checkpoint c needs an output of region r that was"] if step == 3 else []
            )

    def test_p3_on_missing_error_is_the_default(self, engine: EagerEngine, x: Tensor) -> None:
        state = Hidden({"reads": False, "times": []})
        call = engine.checkpoint(changing(state, lambda t: t * 3), region_name="c")
        call(x).sum().backward()
        state["reads"] = True
        with pytest.raises(PlaceholderError) as caught:
            call(x).sum().backward()
        assert caught.value.region == "r"

    def test_p3_on_missing_two_regions_one_after_the_other(self, engine: EagerEngine, x: Tensor) -> None:
        state = Hidden({"reads": False, "times": []})

        def body(t: Tensor) -> Tensor:
            first = remat.region(lambda u: u * 3, "first", recompute=False)(t.sin())
            second = remat.region(lambda u: u * 2, "second", recompute=False)(first)
            return (t * t).cos() * (second if state["reads"] else t).detach().sigmoid() + second

        call = engine.checkpoint(body, on_missing="rerun")
        call(x).sum().backward()
        state["reads"] = True
        expected = torch.autograd.grad(body(x).sum(), x)[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)
        assert [str(one.message).split()[9] for one in caught] == ["second", "first"]

    @pytest.mark.parametrize("hooks", [(), (remat.GeneratorHook(),)], ids=["", "hook"])
    def test_p3_on_missing_random_numbers(self, engine: EagerEngine, x: Tensor, hooks: Any) -> None:
        """A region that draws is run again with the numbers of forward, or not at all."""
        state = Hidden({"reads": False, "times": []})
        body = changing(state, lambda t: torch.nn.functional.dropout(t, 0.5) * 3)
        call = engine.checkpoint(body, on_missing="rerun", recompute_state_hooks=hooks)
        call(x).sum().backward()
        state["reads"] = True
        torch.manual_seed(7)
        expected = torch.autograd.grad(body(x).sum(), x)[0]
        torch.manual_seed(7)
        output = call(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hooks:
                assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
            else:
                before = torch.get_rng_state()
                with pytest.raises(RandomStateError):
                    torch.autograd.grad(output.sum(), x)
                assert torch.equal(torch.get_rng_state(), before)

    def test_p3_on_missing_refused_draw_is_undone_beside_an_idle_thread(self, engine: EagerEngine, x: Tensor) -> None:
        """Where another thread may draw, too, the generator is not set back as a whole; the refused draw is undone."""
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        try:
            self.test_p3_on_missing_random_numbers(engine, x, ())
            before = torch.get_rng_state()
            with pytest.raises(RandomStateError):
                engine.checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5).exp())(x)
            assert torch.equal(torch.get_rng_state(), before)
        finally:
            done.set()
            thread.join()

    @pytest.mark.parametrize("what", ["buffer", "view of a buffer"])
    def test_p3_on_missing_modifying_regions_are_not_run_again(self, engine: EagerEngine, x: Tensor, what: str) -> None:
        state = Hidden({"reads": False, "times": []})
        counter = torch.zeros(())

        def made(t: Tensor) -> Tensor:
            {"buffer": counter, "view of a buffer": counter.view(1)}[what].add_(1)
            return t * 3

        call = engine.checkpoint(changing(state, made), on_missing="rerun")
        call(x).sum().backward()
        state["reads"] = True
        counter.zero_()
        output = call(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ModifiedError, match="recompute_needs_tensor"):
                output.sum().backward()
        assert float(counter) == 1

    @pytest.mark.parametrize("when", ["in the body", "after forward"])
    def test_p3_on_missing_regions_whose_surroundings_changed_are_not_run_again(
        self, engine: EagerEngine, x: Tensor, when: str
    ) -> None:
        """The region reads a buffer that something has changed meanwhile: its output would be another one."""
        state = Hidden({"reads": False})
        mean = torch.ones((), dtype=x.dtype)

        def body(t: Tensor) -> Tensor:
            output = remat.region(lambda u: u + mean, "reader", recompute=False)(torch.tanh(t))
            if when == "in the body" and not remat.is_recomputing():
                mean.add_(1)
            gate = output if state["reads"] else t
            return torch.sin(t * 2) * gate.detach().sigmoid() + output

        call = engine.checkpoint(body, on_missing="rerun")
        call(x).sum().backward()
        state["reads"] = True
        output = call(x)
        if when == "after forward":
            mean.add_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ModifiedError, match=r"mean, which it may read, was modified"):
                output.sum().backward()

    def test_p3_on_missing_is_validated(self) -> None:
        with pytest.raises(InvalidValueError, match="on_missing should be one of"):
            remat.checkpoint(on_missing="ignore")
