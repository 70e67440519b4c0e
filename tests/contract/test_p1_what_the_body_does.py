"""P1: what recomputed code does beside computing: gradients inside it, hooks, things stored; right or refused."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.alive import StorageTracker
from helpers.programs import DifferentiableOnce, Wrap, check, grads, leaf, plain, saved
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.errors import ModifiedError, UnsupportedError


class TestGradientsInsideABody:
    """A backward inside recomputed code: right, or refused where replay has no graph for it."""

    def energy(self, t: Tensor, recompute: bool) -> Tensor:
        e = remat.region(lambda t: t * 2, "double", recompute=recompute)(t).pow(2).sum() + torch.exp(t).sum()
        (force,) = torch.autograd.grad(e, t)
        return torch.exp(t * force)

    def test_through_a_save_region_it_is_refused(self) -> None:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="gradient through region c::double"):
                remat.checkpoint(region_name="c")(lambda t: self.energy(t, False))(leaf(3))

    def test_through_recomputed_code_it_is_right(self) -> None:
        x = leaf(3)
        check(lambda wrap: grads(wrap(lambda t: self.energy(t, True))(x * 1), x))

    def test_for_something_above_the_input_it_is_refused(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            (force,) = torch.autograd.grad((t * t).sum() + (x * 3).sum(), x, retain_graph=True)
            return torch.exp(t * force)

        with pytest.raises(UnsupportedError, match="above the checkpoint's input"):
            remat.checkpoint(region_name="c")(body)(x * 2)

    def test_beside_a_save_region_it_is_right(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            h = saved(torch.sin, "sin")(t)
            (force,) = torch.autograd.grad(torch.exp(t).sum(), t)
            return torch.exp(h * force)

        check(lambda wrap: grads(wrap(body)(x * 1), x))

    def test_inside_a_save_region_it_is_right(self) -> None:
        x = leaf(3)
        check(lambda wrap: grads(wrap(lambda t: torch.exp(saved(lambda t: self.energy(t, True), "all")(t)))(x * 1), x))

    @pytest.mark.parametrize("kind", ["parameter", "captured leaf", "argument"])
    def test_backward_that_adds_to_a_grad_from_outside_is_refused(self, kind: str) -> None:
        w = nn.Parameter(leaf(3).detach()) if kind == "parameter" else leaf(3)

        def body(t: Tensor, v: Tensor) -> Tensor:
            (torch.sin(v if kind == "argument" else w) * t.detach()).sum().backward()
            return torch.exp(t)

        with pytest.raises(UnsupportedError, match=r"add to it a second time"):
            remat.checkpoint(region_name="c")(body)(leaf(3), w)

    def test_what_eager_cannot_differentiate_again_is_eagers_error(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            mine = t.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(DifferentiableOnce.apply(mine), mine, mine * 1, create_graph=True)
            gradient.sum().backward()
            return torch.exp(t)

        for wrap in (plain, remat.checkpoint()):
            with pytest.raises(RuntimeError, match="twice"):
                wrap(body)(x * 1)

    def test_backward_to_a_leaf_of_its_own_is_right(self) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            own = t.detach().requires_grad_()
            torch.sin(own).sum().backward()
            return torch.exp(t * own.grad)

        check(lambda wrap: grads(wrap(body)(x), x))


class TestTorchsCheckpointInBetween:
    """A checkpoint in a torch.utils.checkpoint in a checkpoint: torch would run the innermost without the outermost."""

    @pytest.mark.parametrize("where", ["recomputed code", "SAVE region"])
    def test_it_is_refused(self, where: str) -> None:
        def between(t: Tensor) -> Tensor:
            inner = remat.checkpoint(region_name="inner")(lambda t: torch.exp(torch.sin(t)))
            return torch.utils.checkpoint.checkpoint(inner, t, use_reentrant=False)

        body = between if where == "recomputed code" else lambda t: saved(between, "between")(t)
        with pytest.raises(UnsupportedError, match=r"inner .* torch.utils.checkpoint .* outer"):
            remat.checkpoint(region_name="outer")(body)(leaf(3))


class TestNothingIsLeft:
    def test_a_stored_auxiliary_loss_holds_nothing_of_replay(self) -> None:
        class Layer(nn.Module):
            def forward(self, t: Tensor) -> Tensor:
                h = torch.exp(t.sin() * 2)
                self.aux = h.mean()
                return torch.tanh(torch.sin(h))

        layers, x = [Layer() for _ in range(3)], leaf(64)
        x.grad = torch.zeros_like(x)

        def run(wrap: Wrap) -> int:
            with StorageTracker() as tracker:
                tracker.ignore(x)
                h = x
                for layer in layers:
                    h = wrap(layer)(h)
                (h.sum() + sum(layer.aux for layer in layers)).backward()
                del h
            return tracker.alive_bytes()

        assert run(lambda layer: remat.checkpoint()(layer)) == run(plain)

    def test_an_exception_that_the_body_caught_holds_no_frame_of_replay(self) -> None:
        def bad(t: Tensor) -> Tensor:
            raise ValueError

        alive = []

        class Big:
            pass

        def body(t: Tensor) -> Tensor:
            big = Big()
            alive.append(weakref.ref(big))
            with contextlib.suppress(ValueError):
                saved(bad, "bad")(t)
            return torch.exp(t.sin() * 2)

        y = remat.checkpoint()(body)(leaf(3))
        gc.disable()
        try:
            y.sum().backward(retain_graph=True)
            assert [one() for one in alive] == [None, None]
        finally:
            gc.enable()


class TestRequiresGrad:
    @pytest.mark.parametrize("change", [Tensor.detach_, Tensor.requires_grad_])
    def test_a_save_region_that_changes_it_on_its_argument_is_refused(self, change: Callable[[Tensor], Any]) -> None:
        def body(t: Tensor) -> Tensor:
            h = t * 2 if change is Tensor.detach_ else t.detach() * 2
            saved(lambda one: [change(one), None][1], "change")(h)
            return torch.exp(h * t)

        with pytest.raises(ModifiedError, match="c::change"):
            remat.checkpoint(region_name="c")(body)(leaf(3))

    def test_a_save_region_that_writes_what_requires_a_gradient_is_not(self) -> None:
        x = leaf(3)

        def fill(buffer: Tensor, value: Tensor) -> None:
            buffer.copy_(value)

        def body(t: Tensor) -> Tensor:
            buffer = torch.zeros_like(t)
            saved(fill, "fill")(buffer, torch.sin(t))
            return torch.exp(buffer * 2)

        check(lambda wrap: grads(wrap(body)(x), x))


class TestGradientHooks:
    """A hook that the body registers on a tensor from outside would be registered by replay as well."""

    @pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
    @pytest.mark.parametrize("kind", ["parameter", "captured"])
    def test_on_a_tensor_from_outside_it_is_refused(self, kind: str, method: str) -> None:
        w = nn.Parameter(leaf(3).detach()) if kind == "parameter" else leaf(3)

        def body(t: Tensor) -> Tensor:
            getattr(w, method)(lambda gradient: None)
            return torch.exp(torch.sin(t) * w)

        with pytest.raises(UnsupportedError, match="gradient hook"):
            remat.checkpoint(region_name="c")(body)(leaf(3))

    def test_on_a_parameter_it_works_once_where_the_body_sees_to_that(self) -> None:
        x, w = leaf(3), nn.Parameter(leaf(3).detach())
        handles: list[Any] = []

        def body(t: Tensor) -> Tensor:
            if not remat.is_recomputing():
                handles.append(w.register_hook(lambda gradient: gradient * 2))
            return torch.exp(torch.sin(t) * w)

        def program(wrap: Wrap) -> list[Tensor]:
            found = grads(wrap(body)(x), x, w)
            handles.pop().remove()
            return found

        check(program)

    @pytest.mark.parametrize("on", ["input", "result", "save output"])
    def test_on_others_it_works_once(self, on: str) -> None:
        x = leaf(3)

        def body(t: Tensor) -> Tensor:
            h = {"input": lambda: t, "result": lambda: t * 1, "save output": lambda: saved(torch.sin, "sin")(t)}[on]()
            h.register_hook(lambda gradient: gradient * 2)
            return torch.exp(h * 2)

        check(lambda wrap: grads(wrap(body)(x * 1), x))


class TestStoredByTheBody:
    """What the body stores outside is the real thing after backward, too."""

    STORES: dict[str, Callable[[Tensor], Any]] = {
        "itself": lambda h: h,
        "detached": lambda h: h.detach(),
        "view": lambda h: h[1:],
        "computed": lambda h: h.detach().norm(),
        "in a list": lambda h: [h.detach() * 2],
    }

    @pytest.mark.parametrize("calls", [1, 3])
    @pytest.mark.parametrize("kind", STORES)
    def test_a_saved_output_that_backward_does_not_need(self, kind: str, calls: int) -> None:
        class Layer(nn.Module):
            def forward(self, t: Tensor) -> Tensor:
                h = saved(lambda t: t.sin() * 2, "sin")(t)
                self.seen = TestStoredByTheBody.STORES[kind](h)
                return torch.exp(t.cos()) + h

        x = leaf(3)

        def program(wrap: Wrap) -> list[Tensor]:
            layer = Layer()
            for _ in range(calls):
                found = grads(wrap(layer)(x), x)
            seen = layer.seen[0] if isinstance(layer.seen, list) else layer.seen
            return [*found, seen.detach().clone()]

        check(program)

    def test_what_is_not_stored_is_not_kept_for_it(self) -> None:
        def body(t: Tensor) -> Tensor:
            def again(count: int) -> Tensor:  # knows itself: a cycle, in which the variables of the body live on
                return h if count == 0 else again(count - 1)

            h = saved(lambda t: t.sin() * 2, "sin")(t)
            return torch.exp(t.cos()) + again(2)

        call, x = remat.checkpoint()(body), leaf(64)
        for _ in range(2):
            with StorageTracker() as tracker:
                tracker.ignore(x)
                output = call(x)
            gc.collect()
            assert tracker.alive_bytes(without=output) == 0
            del output


class TestDataSwappedForAWhile:
    """A parameter gets other data, is used, and gets its own back, with nothing to see to that when replay stops."""

    @pytest.mark.parametrize("where", ["recomputed code", "a SAVE region"])
    def test_p1_the_parameter_is_as_it_was(self, where: str) -> None:
        class Rounded(nn.Linear):
            def forward(self, t: Tensor) -> Tensor:
                kept = self.weight.data
                self.weight.data = torch.round(kept * 8) / 8
                y = nn.functional.linear(t, self.weight, self.bias)  # the last save
                self.weight.data = kept
                return y

        layer, x = Rounded(3, 3, dtype=torch.float64), leaf(2, 3)
        before, inner = layer.weight.detach().clone(), saved(layer, "layer") if where == "a SAVE region" else layer
        check(lambda wrap: grads(wrap(lambda t: inner(torch.tanh(t)))(x), x))
        assert torch.equal(layer.weight, before)
