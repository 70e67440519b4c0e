"""P1: tensors changed in place: eager's numbers or one clear error, and what eager refuses is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import assert_same_run, compare, compare_or_refused, grad_weight, plain_backward, raised, run_once
from helpers.engine import EagerEngine
from helpers.events import under
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import RematError


class TestP1ChangedBetweenForwardAndBackward:
    """Inputs and parameters that change after the forward: replay would read the new value."""

    PLACES = ("positional", "keyword", "list", "dict", "nested", "closure", "parameter", "region argument")

    def _changed(self, engine: EagerEngine, place: str, policy: str, change: Callable[[Tensor], Any]) -> Any:
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        other = torch.randn(4, 6, dtype=torch.float64, requires_grad=place in ("parameter", "region argument"))

        def work(t: Tensor, u: Tensor) -> Tensor:
            t = torch.exp(torch.sin(t))
            if policy == "-":
                return torch.exp(t * u)
            product = remat.region(torch.mul, "mul", recompute=policy == "R")
            return torch.exp(product(t, u if place == "region argument" else u * 1))

        bodies: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]] = {
            "positional": (work, (x, other), {}),
            "keyword": (work, (x,), {"u": other}),
            "list": (lambda t, us: work(t, us[0]), (x, [other]), {}),
            "dict": (lambda t, us: work(t, us["u"]), (x, {"u": other}), {}),
            "nested": (lambda t, us: work(t, us["a"][0][1]), (x, {"a": [(None, other)]}), {}),
            "closure": (lambda t: work(t, other), (x,), {}),
            "parameter": (lambda t: work(t, other), (x,), {}),
            "region argument": (lambda t: work(t, other), (x,), {}),
        }
        body, args, kwargs = bodies[place]
        outcomes = []
        for wrap in (lambda function: function, engine.checkpoint, engine.checkpoint):
            with torch.no_grad():
                other.copy_(torch.linspace(0.1, 1, 24, dtype=torch.float64).reshape(4, 6))
            x.grad = other.grad = None
            output = wrap(body)(*args, **kwargs)
            with torch.no_grad():
                change(other)
            try:
                engine.backward([output], [grad_weight(output)])
            except RuntimeError as error:
                outcomes.append(error)
            else:
                outcomes.append((x.grad, other.grad))
        return outcomes

    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    @pytest.mark.parametrize("place", PLACES)
    def test_p1_changed_input_is_noticed(self, engine: EagerEngine, place: str, policy: str) -> None:
        eager, *ours = self._changed(engine, place, policy, lambda t: t.mul_(2))
        for got in ours:
            if isinstance(got, RuntimeError):
                continue
            assert not isinstance(eager, RuntimeError), f"eager refuses: {eager}"
            assert torch.equal(eager[0], got[0])

    @pytest.mark.parametrize("place", ["parameter", "region argument", "closure"])
    @pytest.mark.parametrize("policy", ["-", "R"])
    def test_p1_optimizer_step_before_backward(self, engine: EagerEngine, place: str, policy: str) -> None:
        """The step of an optimizer between forward and backward is never taken for the forward's weights."""
        eager, *ours = self._changed(engine, place, policy, lambda t: t.sub_(0.5))
        for got in ours:
            if not isinstance(got, RuntimeError):
                assert not isinstance(eager, RuntimeError)
                assert torch.equal(eager[0], got[0])

    @pytest.mark.parametrize("place", ["positional", "keyword", "nested", "parameter"])
    def test_p1_message_names_the_checkpoint(self, engine: EagerEngine, place: str) -> None:
        _, *ours = self._changed(engine, place, "-", lambda t: t.mul_(2))
        for got in ours:
            assert isinstance(got, RuntimeError)
            assert "modified" in str(got)
            if isinstance(got, RematError):
                assert "block" in str(got)

    def test_p1_unchanged_input_is_accepted_after_other_changes(self, engine: EagerEngine) -> None:
        """A change of the storage that the input does not see: another view was made before, nothing was written."""
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        buffer = torch.zeros(2, 6, dtype=torch.float64)

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t) * buffer[0])

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            buffer.reshape(-1)
            plain_backward(outputs, inputs)

        compare(body, [x], backward=backward, engine=engine)

    def test_p1_input_changed_and_not_read_again(self, engine: EagerEngine) -> None:
        """Eager does not care when the changed tensor is not saved; equal numbers or an error are both right."""
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        offset = torch.ones(4, 6, dtype=torch.float64)

        def body(t: Tensor, u: Tensor) -> Tensor:
            return torch.exp(torch.sin(t)) + u

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            inputs[1].zero_()
            plain_backward(outputs, inputs)

        compare_or_refused(body, [x, offset], backward=backward, engine=engine, refused_with=(RematError, RuntimeError))


class TestP1ChangedInTheBody:
    """In-place operations inside bodies and regions."""

    @staticmethod
    def changes(t: Tensor) -> dict[str, Callable[[], Any]]:
        """Bodies by name, closed over their input; each is plain code that eager accepts or refuses."""

        def save(function: Callable[..., Any], name: str = "save") -> Callable[..., Any]:
            return remat.region(function, name, recompute=False)

        def rec(function: Callable[..., Any], name: str = "rec") -> Callable[..., Any]:
            return remat.region(function, name, recompute=True)

        hidden = torch.sin(t)

        def bare_on_save_output() -> Tensor:
            h = save(lambda u: u * 3)(hidden)
            h.mul_(2)
            return torch.exp(rec(torch.sin)(h))

        def bare_on_save_output_the_region_saved() -> Tensor:
            h = save(torch.exp)(hidden)
            h.mul_(2)
            return torch.exp(h)

        def bare_on_view_of_save_output() -> Tensor:
            h = save(F.gelu)(hidden)
            h[1:].mul_(2)
            return torch.exp(h)

        def bare_on_region_argument_after_the_region() -> Tensor:
            a = save(torch.sin)(hidden)
            hidden.mul_(2)
            return torch.exp(a) * hidden

        def bare_on_region_argument_not_saved() -> Tensor:
            a = save(lambda u: u * 3)(hidden)
            hidden.mul_(2)
            return torch.exp(a) * torch.sin(hidden)

        def rec_changes_save_output() -> Tensor:
            h = save(F.gelu)(hidden)
            rec(lambda u: u.mul_(2))(h)
            return torch.exp(h)

        def save_changes_its_argument_and_returns_it() -> Tensor:
            h = hidden * 1
            h = save(lambda u: u.mul_(2))(h)
            return torch.exp(h)

        def save_changes_its_argument_and_returns_another() -> Tensor:
            h = hidden * 1
            a = save(lambda u: u.mul_(2).sum())(h)
            return torch.exp(h) * a

        def save_changes_argument_of_save_output() -> Tensor:
            h = save(lambda u: u * 3, "first")(hidden)
            save(lambda u: u.add_(1), "second")(h)
            return torch.exp(h)

        def save_changes_buffer() -> Tensor:
            buffer = torch.zeros(6, dtype=t.dtype)

            def update(u: Tensor) -> Tensor:
                buffer.add_(u.detach().sum(0))
                return u * 3

            h = save(update)(hidden)
            return torch.exp(h * buffer)

        def kept_output_changed_after_its_reader() -> Tensor:
            h = save(lambda u: u * 3)(hidden)
            a = torch.sin(h)
            h.mul_(2)
            return a * h

        def saved_twice_and_changed_between() -> Tensor:
            h = hidden * 1
            a = save(lambda u: u * 2, "first")(h)
            h.add_(1)
            b = save(torch.sin, "second")(h)
            return torch.exp(a) * b

        def region_saves_then_bare_changes_then_region_saves() -> Tensor:
            h = save(lambda u: u + 1, "first")(hidden)
            b = save(lambda u: u * 2, "second")(h)
            h.mul_(3)
            c = save(torch.sin, "third")(h)
            return torch.exp(b) * c

        def rec_in_place_chain() -> Tensor:
            return rec(lambda u: u.clone().mul_(2).add_(1).sin_())(hidden).exp()

        def save_in_place_chain() -> Tensor:
            return save(lambda u: u.clone().mul_(2).add_(1).sin_())(hidden).exp()

        def in_place_relu_after_linear() -> Tensor:
            weight = torch.eye(6, dtype=t.dtype)
            return F.relu(save(F.linear)(hidden, weight), inplace=True).exp()

        def residual_in_place() -> Tensor:
            a = save(F.gelu)(hidden)
            a += hidden
            b = save(F.silu, "again")(a)
            b += a
            return torch.exp(b)

        def slice_assignment() -> Tensor:
            buffer = torch.zeros(8, 6, dtype=t.dtype)
            buffer[:4] = save(F.gelu)(hidden)
            buffer[4:] = rec(torch.sin)(hidden)
            return torch.exp(buffer)

        def slice_assignment_in_region() -> Tensor:
            def fill(u: Tensor) -> Tensor:
                buffer = torch.zeros(8, 6, dtype=t.dtype)
                buffer[:4] = u
                buffer[4:] = torch.sin(u)
                return buffer

            return torch.exp(save(fill)(hidden))

        def write_into_argument() -> Tensor:
            buffer = torch.zeros(4, 6, dtype=t.dtype)
            save(lambda out, u: out.copy_(u * 2))(buffer, hidden)
            return torch.exp(buffer)

        def write_view_of_argument() -> Tensor:
            buffer = torch.zeros(8, 6, dtype=t.dtype)
            save(lambda out, u: out.copy_(u * 2))(buffer[:4], hidden)
            return torch.exp(buffer * 2)

        def no_grad_write_to_save_output() -> Tensor:
            h = save(lambda u: u * 3)(hidden)
            with torch.no_grad():
                h.clamp_(min=0)
            return torch.exp(h)

        def detached_write() -> Tensor:
            h = save(lambda u: u * 3)(hidden)
            h.detach().clamp_(min=0)
            return torch.exp(h)

        def data_write() -> Tensor:
            h = save(lambda u: u * 3)(hidden)
            h.data.mul_(2)
            return torch.exp(h)

        def resized_by_set() -> Tensor:
            h = save(lambda u: u * 3)(hidden)
            view = h.view(-1)
            view.mul_(2)
            return torch.exp(view) * view.sum()

        return {name: case for name, case in locals().items() if callable(case) and name not in ("save", "rec")}

    # Every name of ``changes``; kept as a list so that each is a test of its own.
    NAMES = (
        "bare_on_save_output", "bare_on_save_output_the_region_saved", "bare_on_view_of_save_output",
        "bare_on_region_argument_after_the_region", "bare_on_region_argument_not_saved", "rec_changes_save_output",
        "save_changes_its_argument_and_returns_it", "save_changes_its_argument_and_returns_another",
        "save_changes_argument_of_save_output", "save_changes_buffer", "kept_output_changed_after_its_reader",
        "saved_twice_and_changed_between", "region_saves_then_bare_changes_then_region_saves", "rec_in_place_chain",
        "save_in_place_chain", "in_place_relu_after_linear", "residual_in_place", "slice_assignment",
        "slice_assignment_in_region", "write_into_argument", "write_view_of_argument", "no_grad_write_to_save_output",
        "detached_write", "data_write", "resized_by_set",
    )  # fmt: skip

    # Code that eager accepts and that must work, not only be refused.
    MUST_WORK = (
        "bare_on_save_output", "bare_on_view_of_save_output", "bare_on_region_argument_not_saved",
        "rec_changes_save_output", "rec_in_place_chain", "save_in_place_chain", "in_place_relu_after_linear",
        "residual_in_place", "slice_assignment", "slice_assignment_in_region", "saved_twice_and_changed_between",
        "region_saves_then_bare_changes_then_region_saves",
        "no_grad_write_to_save_output", "save_changes_its_argument_and_returns_it",
        "save_changes_its_argument_and_returns_another", "save_changes_argument_of_save_output",
        "write_into_argument", "write_view_of_argument",
    )  # fmt: skip

    def test_p1_every_case_is_named(self) -> None:
        assert set(self.NAMES) == set(self.changes(torch.ones(4, 6, dtype=torch.float64)))

    @pytest.mark.parametrize("name", NAMES)
    def test_p1_change_in_the_body(self, engine: EagerEngine, x: Tensor, name: str) -> None:
        def body(t: Tensor) -> Any:
            return self.changes(t)[name]()

        eager, ours = compare_or_refused(body, [x], engine=engine)
        for run in ours:
            if eager.error is None and run.error is not None:
                assert name not in self.MUST_WORK, run.error
                assert isinstance(run.error, RematError)
                assert run.failed_in == "forward", "what eager accepts must be refused in forward, if at all"

    @pytest.mark.parametrize("recompute", [True, False, None])
    def test_p1_body_changes_its_input(self, engine: EagerEngine, x: Tensor, recompute: bool | None) -> None:
        """The checkpoint's own input is changed in place by the body: replay would start from another value."""

        def change(t: Tensor) -> Tensor:
            return t.mul_(2)

        def body(t: Tensor) -> Tensor:
            if recompute is None:
                change(t)
            else:
                remat.region(change, "change", recompute=recompute)(t)
            return torch.exp(torch.sin(t))

        def model(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda t: call(t * 1)

        expected = run_once(model(body), [x])
        call = engine.checkpoint(body)
        for index in range(3):
            actual = run_once(model(call), [x], catch=(RuntimeError,))
            if actual.error is None:
                assert_same_run(expected, actual, f"call {index}")
            else:
                assert "block" in str(actual.error)

    def test_p1_changed_input_that_only_a_save_region_reads(self, engine: EagerEngine, x: Tensor) -> None:
        """Nothing has to be replayed, so nothing is refused: in the first call as in later ones."""

        def body(t: Tensor) -> Tensor:
            t.mul_(2)
            return remat.region(torch.sin, "sine", recompute=False)(t)

        call = engine.checkpoint(body)
        expected = run_once(lambda t: body(t * 1), [x])
        for index in range(3):
            assert_same_run(expected, run_once(lambda t: call(t * 1), [x]), f"call {index}")

    def test_p1_error_for_a_changed_argument_comes_in_forward_and_names_the_region(
        self, engine: EagerEngine, x: Tensor
    ) -> None:
        """What replay cannot repeat is refused where the mistake is, with the region's name and a fix."""

        def body(t: Tensor) -> Tensor:
            h = torch.sin(t)
            total = remat.region(lambda u: u.mul_(2).sum(), "doubles", recompute=False)(h)
            return torch.exp(h) * total

        for _ in range(2):
            error = raised(lambda: engine.checkpoint(body)(x), RematError)
            if error is None:
                compare(body, [x], engine=engine)
            else:
                assert "doubles" in str(error)
                assert "To fix" in str(error)

    def test_p1_kept_save_changed_after_forward_is_refused(self, engine: EagerEngine, x: Tensor) -> None:
        """Outside the checkpoint: the kept save of a region is its output, and that output is changed."""

        def body(t: Tensor) -> Tensor:
            return remat.region(torch.exp, "exp", recompute=False)(torch.sin(t))

        for options in ({}, {"saved_tensors_hooks": (lambda t: t, lambda t: t)}):
            for _ in range(2):
                output = engine.checkpoint(body, **options)(x)
                output.mul_(2)
                with pytest.raises(RuntimeError, match="modified"):
                    engine.backward([output.sum()])

    def test_p1_persisted_output_changed_after_forward_is_refused(self, engine: EagerEngine, x: Tensor) -> None:
        """Eager's saved tensor is the changed one, so eager refuses; with and without hooks."""

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            hidden = remat.region(lambda u: u * 3, "triple", recompute=False)(torch.sin(t))
            return torch.sin(hidden), hidden

        for options in (None, {}, {"saved_tensors_hooks": (lambda t: t, lambda t: t)}):
            for _ in range(2):
                call = body if options is None else engine.checkpoint(body, **options)
                output, hidden = call(x)
                hidden.mul_(2)
                with pytest.raises(RuntimeError, match="modified"):
                    engine.backward([output.sum()])

    @pytest.mark.parametrize("calls", [3])
    @pytest.mark.parametrize("make", [lambda t: t * 2, lambda t: t + 0, lambda t: t.view(-1) * 1])
    @pytest.mark.parametrize("part", [lambda h: h, lambda h: h[0], lambda h: h.unsqueeze(0)])
    def test_p1_save_region_changes_what_nobody_else_needs(
        self, engine: EagerEngine, x: Tensor, make: Any, part: Any, calls: int
    ) -> None:
        """Replay needs the tensor's data for one thing only: to write the region's change into it."""

        def body(t: Tensor) -> Tensor:
            hidden = make(t)
            remat.region(lambda u: u.mul_(3), "changes", recompute=False)(part(hidden))
            return torch.exp(torch.sin(hidden))

        compare(body, [x * 1], engine=engine, calls=calls)

    @pytest.mark.parametrize("detached", [False, True])
    @pytest.mark.parametrize("bare", [False, True])
    @pytest.mark.parametrize("read", ["-", "0", "1", "01", "02", "12", "012"])
    @pytest.mark.parametrize("make", ["S", "-"])
    def test_p1_save_regions_change_one_tensor_in_turn(
        self, engine: EagerEngine, x: Tensor, make: str, read: str, bare: bool, detached: bool
    ) -> None:
        """Replay needs some of the versions, and must not write an earlier one where forward left a later one."""

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            h = under(make, lambda u: (u * 1.5).detach() if detached else u * 1.5, "make")(t)
            total = torch.zeros_like(t)
            for index in range(3):
                remat.region(lambda u: u.mul_(1.25), f"more{index}", recompute=False)(h)
                if str(index) in read:
                    total = total + torch.exp(h.detach() * 0.1) * t
            if bare:
                h.add_(1)
            return torch.exp(h * 0.2) * t + total, h

        compare(body, [x], engine=engine, calls=3)

    @pytest.mark.parametrize("policy", ["-", "S", "R"])
    def test_p1_save_of_an_op_changed_in_recomputed_code(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        """The rebuilt save aliases a tensor that later body code changes: eager refuses, so must replay."""

        def body(t: Tensor) -> Tensor:
            hidden = torch.exp(torch.sin(t)) * 1
            call = under(policy, torch.sin, "sin")
            result = call(hidden)
            hidden.mul_(2)
            return torch.exp(result) * hidden

        _, ours = compare_or_refused(body, [x], engine=engine)
        assert all(isinstance(run.error, RuntimeError) for run in ours)
