"""P1 when one body takes another way in a later call: what was learned of it must not be trusted blindly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import assert_same_run, compare, run_once
from helpers.engine import EagerEngine
from helpers.events import Hidden, under
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ModifiedError, RematError

COUNTER = torch.zeros(())
GLOBAL = torch.ones(())


def odd(t: Tensor, depth: int) -> Tensor:
    return t * GLOBAL if depth == 0 else even(t.tanh(), depth - 1)


def even(t: Tensor, depth: int) -> Tensor:
    return t * GLOBAL if depth == 0 else odd(t * t, depth - 1)


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


class TestP1Ways:
    """Policies, operations and in-place code that change from call to call."""

    def test_p1_policy_changes_between_calls(self, engine: EagerEngine, x: Tensor) -> None:
        policy = Hidden({"a": "S", "b": "S", "c": "S"})

        def body(t: Tensor) -> Tensor:
            t = under(policy["a"], lambda u: u * 3, "a")(t)
            t = under(policy["b"], lambda u: torch.where(u > 0, u, u * 0.1).sin(), "b")(t)
            return under(policy["c"], lambda u: torch.exp(u) * u, "c")(t)

        for ways in ("SSS", "SRS", "SSR", "S-S", "SS-", "RSS", "-SR", "SRR", "SSS", "S-R", "RRR", "SRS"):
            policy.update(zip("abc", ways, strict=True))
            compare(body, [x], engine=engine, calls=1)

    def test_p1_replay_never_writes_into_what_the_user_holds(self, engine: EagerEngine, x: Tensor) -> None:
        """A SAVE output is returned, and a region changes it in place under a policy that changes between calls."""
        policy = Hidden({"b": "S"})

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            hidden = save(lambda u: u * 1.25, "a")(t)
            under(policy["b"], lambda u: u.add_(1), "b")(hidden)
            return hidden, hidden.tanh()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            engine.backward([outputs[1].sum()])

        call = engine.checkpoint(body)
        for letter in "SSRRS-R-S":
            policy["b"] = letter
            expected = run_once(body, [x], backward=backward)
            actual = run_once(call, [x], backward=backward, catch=(RematError,))
            if actual.error is None:
                assert_same_run(expected, actual, f"policy {letter}")

    @pytest.mark.parametrize(
        "tail",
        [
            pytest.param(lambda h: h.detach().mul_(2), id="detached"),
            pytest.param(lambda h: h.mul_(2), id="bare"),
            pytest.param(lambda h: save(lambda u: u.mul_(2), "late")(h), id="save"),
            pytest.param(lambda h: save(lambda u: u.detach().mul_(2), "late")(h), id="save detached"),
            pytest.param(lambda h: h[0].zero_(), id="row"),
        ],
    )
    @pytest.mark.parametrize("head", [torch.relu, torch.sigmoid, lambda t: t * t.detach()])
    def test_p1_late_change_that_starts_in_a_later_call(
        self, engine: EagerEngine, x: Tensor, head: Callable[[Tensor], Tensor], tail: Callable[[Tensor], Any]
    ) -> None:
        """After the last thing that backward needs, a saved tensor is changed: eager refuses, in whatever call."""
        state = Hidden({"changes": False})

        def body(t: Tensor) -> Tensor:
            hidden = head(t * 1)
            output = (hidden * hidden).clone()
            if state["changes"]:
                tail(hidden)
            return output

        call = engine.checkpoint(body)
        for changes in (False, False, True, True, True, False):
            state["changes"] = changes
            expected = run_once(body, [x], catch=(RuntimeError,))
            actual = run_once(call, [x], catch=(RuntimeError,))
            assert (expected.error is None) == (actual.error is None)
            if expected.error is None:
                assert_same_run(expected, actual, f"changes {changes}")

    @pytest.mark.parametrize("saver", [lambda h: h * h, torch.sin, lambda h: save(torch.sin, "sin")(h)])
    def test_p1_save_region_changes_what_was_saved_before(
        self, engine: EagerEngine, x: Tensor, saver: Callable[[Tensor], Tensor]
    ) -> None:
        """A tensor is saved, then a SAVE region changes it: refused in the first call and in every later one."""

        def of_save_output(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 1.25, "made")(t)
            output = saver(hidden)
            save(lambda u: u.mul_(0.5), "late")(hidden)
            return output

        def of_recomputed(t: Tensor) -> Tensor:
            hidden = torch.sin(t) * 2
            output = saver(hidden)
            save(lambda u: u.mul_(0.5), "late")(hidden)
            return output

        for body in (of_save_output, of_recomputed):
            with pytest.raises(RuntimeError, match="modified"):
                engine.backward([body(x).sum()])
            call = engine.checkpoint(body)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="modified"):
                    engine.backward([call(x).sum()])

    @pytest.mark.parametrize(
        "write", [lambda h: h.mul_(1.5), lambda h: h.detach().mul_(1.5)], ids=["plain", "detached"]
    )
    @pytest.mark.parametrize("hooks", [(), (remat.GeneratorHook(),)], ids=["", "state hook"])
    @pytest.mark.parametrize("head", [torch.tanh, lambda t: t * t], ids=["tanh", "product"])
    def test_p1_region_changes_a_closed_over_save_on_a_new_path(
        self, engine: EagerEngine, x: Tensor, head: Any, hooks: Any, write: Callable[[Tensor], Tensor]
    ) -> None:
        """Recomputed code saved it; a region whose policy changes between calls writes into it: eager refuses."""
        policy = Hidden({"late": "R"})

        def body(t: Tensor) -> Tensor:
            hidden = head(t)
            t = t * hidden.detach()
            return under(policy["late"], lambda u: write(hidden) * u, "late")(t)

        call = engine.checkpoint(body, recompute_state_hooks=hooks)
        for letter in "RRSSR-S":
            policy["late"] = letter
            with pytest.raises(RuntimeError, match=r"modif(ied|ies)"):
                engine.backward([call(x).sum()])

    @pytest.mark.parametrize("tracked", [True, False])
    def test_p1_region_changes_what_it_captured_on_a_new_path(
        self, engine: EagerEngine, x: Tensor, tracked: bool
    ) -> None:
        """Nobody saved it, but a later copy of it: replay, which skips the region, would copy the old value."""
        policy = Hidden({"r": "R"})

        def body(t: Tensor) -> Tensor:
            hidden = t * 1.25 if tracked else t.detach() * 1.25
            result = under(policy["r"], lambda u: (hidden.mul_(3), u * 2)[1], "r")(t)
            return torch.sin(hidden.clone()) * result

        call = engine.checkpoint(body)
        refused = 0
        for letter in "RRSSR":
            policy["r"] = letter
            expected = torch.autograd.grad(body(x).sum(), x)[0]
            try:
                found = torch.autograd.grad(call(x).sum(), x)[0]
            except ModifiedError:
                refused += 1
            else:
                assert torch.equal(found, expected)
        assert refused == 2

    @pytest.mark.parametrize("place", ["buffer", "captured", "global"])
    def test_p1_region_updates_what_is_outside_on_a_new_path(self, engine: EagerEngine, x: Tensor, place: str) -> None:
        """Counters and running statistics that a SAVE region updates are updated once, on any path."""
        policy = Hidden({"r": "R"})
        module = torch.nn.BatchNorm1d(x.shape[1], dtype=x.dtype)
        captured = torch.zeros(())

        def update(u: Tensor) -> Tensor:
            if place == "buffer":
                return module(u)
            (captured if place == "captured" else COUNTER).add_(1)
            return u * 2

        def body(t: Tensor) -> Tensor:
            return under(policy["r"], lambda u: remat.region(update, "inner", recompute=False)(u), "r")(t).sin()

        call = engine.checkpoint(body)
        COUNTER.zero_()
        for letter in "RRSSR":
            policy["r"] = letter
            call(x).sum().backward()
        counted = {"buffer": module.num_batches_tracked, "captured": captured, "global": COUNTER}[place]
        assert float(counted) == 5

    def test_p1_body_reaches_functions_that_call_each_other(self, engine: EagerEngine, x: Tensor) -> None:
        call = engine.checkpoint(lambda t: odd(t.sin(), 3).exp())
        for _ in range(2):
            call(x).sum().backward()
        GLOBAL.add_(1)
        output = call(x)
        GLOBAL.add_(1)
        with pytest.raises(RuntimeError, match="GLOBAL"):
            output.sum().backward()

    @pytest.mark.parametrize("returns", ["argument", "view", "other", "nothing"])
    @pytest.mark.parametrize("change", [lambda a, b: b.copy_(a * 0.5), lambda a, b: b[:2].add_(a[:2]), torch.add])
    def test_p1_region_changes_and_returns_its_argument_on_a_new_path(
        self, engine: EagerEngine, x: Tensor, change: Callable[[Tensor, Tensor], Any], returns: str
    ) -> None:
        policy = Hidden({"last": "S"})

        def fill(a: Tensor, b: Tensor) -> Tensor | None:
            change(a, b)
            return {"argument": b, "view": b[1:], "other": a * 2, "nothing": None}[returns]

        def body(t: Tensor) -> Tensor:
            hidden = t * 1.25
            result = save(fill, "fill")(hidden.clone(), hidden)
            source = hidden if result is None else result
            return under(policy["last"], lambda u: u.cumsum(-1).tanh(), "last")(source)

        call = engine.checkpoint(body)
        for letter in "SSRR-SR-":
            policy["last"] = letter
            expected = run_once(body, [x])
            actual = run_once(call, [x], catch=(RematError,))
            if actual.error is None:
                assert_same_run(expected, actual, f"policy {letter}")
            else:
                assert actual.failed_in == "forward"

    def test_p1_own_generator_that_draws_from_the_third_call_on(self, engine: EagerEngine, x: Tensor) -> None:
        generator = torch.Generator()
        state = Hidden({"draws": False})

        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            factor = torch.rand(6, generator=generator, dtype=torch.float64) if state["draws"] else 2.0
            return torch.exp(hidden * factor)

        for hooks, covered in (
            ((), False),
            ((remat.GeneratorHook(),), False),
            ((remat.GeneratorHook(generator),), True),
        ):
            call = engine.checkpoint(body, recompute_state_hooks=hooks)
            for draws in (False, False, True, True, False, True):
                state["draws"] = draws
                generator.manual_seed(5)
                expected = run_once(body, [x])
                generator.manual_seed(5)
                actual = run_once(call, [x], catch=() if covered or not draws else (RematError,))
                if actual.error is None:
                    assert_same_run(expected, actual, f"draws {draws}")

    def test_p1_many_variants_of_one_generic_body(self, engine: EagerEngine, x: Tensor) -> None:
        """One wrapper around many different layers and policies: none is taken for another, from its first call on."""
        layers: list[Callable[[Tensor], Tensor]] = []
        for number in range(7):  # layers that save nothing, their input, or their output: replay reads other things
            layers.append(eval(f"lambda t: t * {number + 2} * 0.1"))
            layers.append(eval(f"lambda t: torch.sin(t) + {number}", {"torch": torch}))
            layers.append(eval(f"lambda t: torch.sigmoid(t + {number}) * t", {"torch": torch}))
        for number in range(7):  # layers with as many saves, but another relation between argument and output
            layers.append(eval(f"lambda t: t if {number} >= 0 else None"))
            layers.append(eval(f"lambda t: t.clone() if {number} >= 0 else None"))
            layers.append(eval(f"lambda t: t.flip(0) + {number}"))
            layers.append(eval(f"lambda t: t[:4] if {number} >= 0 else None"))
        for layer in layers:
            for letters in itertools.product("SR-", repeat=2):

                def body(t: Tensor, letters: tuple[str, ...] = letters) -> Tensor:
                    t = torch.sin(t) if letters[0] != "-" else t
                    for index, letter in enumerate(letters):
                        t = under(letter, layer, f"r{index}")(t)
                    return torch.tanh(t).exp()

                compare(body, [x], engine=engine, calls=2)

    def test_p1_training_switch_on_an_object_the_runtime_knows_nothing_of(self, engine: EagerEngine, x: Tensor) -> None:
        """A flag on a plain object changes which SAVE output is read: right numbers, or an error; then right again."""

        class Config:
            which = 0

        config = Config()

        def body(t: Tensor) -> Tensor:
            a = save(lambda u: u * 2, "a")(torch.sin(t))
            b = save(lambda u: u * 3, "b")(a)
            return torch.exp((a, b, a + b)[config.which] * 0.5)

        call = engine.checkpoint(body)
        refused = 0
        for which in (0, 0, 1, 1, 2, 2, 0, 1, 2):
            config.which = which
            expected = run_once(body, [x])
            actual = run_once(call, [x], catch=(RematError,))
            refused += actual.error is not None
            if actual.error is None:
                assert_same_run(expected, actual, f"which {which}")
        assert refused <= 2
