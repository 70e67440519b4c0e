"""P1: several tensors in one memory, one of which is modified in place: eager's numbers, or an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import compare, compare_or_refused, run_once
from helpers.engine import EagerEngine
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ModifiedError

WEIGHT = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` as a SAVE region."""
    return remat.region(function, name, recompute=False)


@pytest.fixture
def x() -> Tensor:
    """The input of every body."""
    torch.manual_seed(0)
    return torch.randn(6, 6, dtype=torch.float64, requires_grad=True)


class TestP1OutputsInOneMemory:
    """A SAVE region returns tensors that share memory, and one is modified afterwards."""

    RETURNS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
        "itself and transposed": lambda z: (z, z.t()),
        "halves": lambda z: (z[:3], z[3:]),
        "fused projections": lambda z: (z[:, :2], z[:, 2:4], z[:, 4:]),
        "overlapping": lambda z: (z[:4], z[2:], z),
        "diagonal": lambda z: (z, z.diagonal()),
        "detached": lambda z: (z, z.detach()),
        "beside one of its own": lambda z: (z[:3], z * 2, z[3:]),
    }
    WRITES: dict[str, Callable[[Tensor], Any]] = {
        "bare": lambda t: t.mul_(2),
        "twice": lambda t: t.mul_(2).add_(1),
        "view": lambda t: t[..., 1:].mul_(2),
        "recomputed region": lambda t: remat.region(Tensor.mul_, "write", recompute=True)(t, 2),
        "SAVE region": lambda t: save(Tensor.mul_, "write")(t, 2),
    }

    def _body(self, returns: str, write: str, which: int) -> Callable[[Tensor], Tensor]:
        def body(x: Tensor) -> Tensor:
            tensors = save(lambda x: self.RETURNS[returns](x @ WEIGHT), "make")(torch.sin(x))
            self.WRITES[write](tensors[which % len(tensors)])
            return torch.stack([torch.exp(torch.cos(one)).sum() for one in tensors]).sum() * x

        return body

    @pytest.mark.parametrize("which", [0, 1, 2])
    @pytest.mark.parametrize("write", WRITES)
    @pytest.mark.parametrize("returns", RETURNS)
    def test_p1_one_of_them_is_modified(
        self, engine: EagerEngine, x: Tensor, returns: str, write: str, which: int
    ) -> None:
        """The others show the change in replay, too."""
        compare(self._body(returns, write, which), (x,), engine=engine)

    @pytest.mark.parametrize("returns", RETURNS)
    def test_p1_with_a_hook_pair(self, engine: EagerEngine, x: Tensor, returns: str) -> None:
        """Packed one by one they cannot share memory again: right, or refused."""
        options = {"saved_tensors_hooks": (torch.clone, lambda tensor: tensor)}
        compare_or_refused(self._body(returns, "bare", 0), (x,), options=options, engine=engine)

    @pytest.mark.parametrize(
        ("returns", "shapes"),
        [
            (lambda z: (z, z.t()), [(6, 6)]),
            (lambda z: (z.t(), z), [(6, 6)]),
            (lambda z: (z[1:], z), [(6, 6)]),
            (lambda z: (z, z.view_as(z)), [(6, 6)]),
            (lambda z: (z[:3], z[3:]), [(3, 6), (3, 6)]),
            (lambda z: (z[1:], z[2:4], z), [(6, 6)]),
        ],
    )
    def test_p3_packed_once(
        self, engine: EagerEngine, x: Tensor, returns: Callable[[Tensor], tuple[Tensor, ...]], shapes: list[Any]
    ) -> None:
        """A hook pair gets the tensor that contains the others."""
        packed: list[Any] = []

        def pack(tensor: Tensor) -> Tensor:
            if remat.current_saved_tensor_info().kind is remat.SavedTensorKind.SAVE_OUTPUT:
                packed.append(tuple(tensor.shape))
            return tensor.clone()

        def body(x: Tensor) -> Tensor:
            tensors = save(lambda x: returns(x @ WEIGHT), "make")(torch.sin(x))
            return torch.stack([torch.exp(torch.cos(one)).sum() for one in tensors]).sum() * x

        options = {"saved_tensors_hooks": (pack, lambda tensor: tensor)}
        compare(body, (x,), options=options, engine=engine, calls=3)
        assert packed == shapes * 3

    def test_p1_different_dtypes_are_refused(self, engine: EagerEngine, x: Tensor) -> None:
        """No copy could give back both."""

        def body(x: Tensor) -> Tensor:
            z, real = save(lambda x: (z := torch.complex(x, x * 2), torch.view_as_real(z)), "make")(x)
            real.mul_(2)
            return torch.exp(z.abs()) * x

        with pytest.raises(ModifiedError, match="of different kinds"):
            engine.checkpoint(body)(x)


class TestP1ViewOfACapturedTensor:
    """A SAVE region returns a view of a tensor that it did not get as an argument."""

    ORIGINS: dict[str, Callable[[Tensor], Tensor]] = {
        "recomputed": lambda x: torch.sin(x @ WEIGHT),
        "SAVE output": lambda x: save(torch.matmul, "make")(x, WEIGHT),
        "input": lambda x: x,
    }
    VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": Tensor.t,
        "slice": lambda h: h[1:],
        "detached": Tensor.detach,
        "alias": lambda h: h.view_as(h),
    }

    def _body(self, origin: str, view: str, modified: str, read: str) -> Callable[[Tensor], Tensor]:
        def body(x: Tensor) -> Tensor:
            h = self.ORIGINS[origin](x * 1)
            v = save(lambda: self.VIEWS[view](h), "view")()
            before = torch.exp(torch.sin(v)).sum() if read == "before" else 0
            if modified:
                {"view": v, "captured": h}[modified].detach().mul_(2)
            total = torch.exp(torch.cos({"view": v, "captured": h}[read])).sum() if read in ("view", "captured") else 0
            return torch.exp(x).sum() + before + total

        return body

    @pytest.mark.parametrize("read", ["view", "captured", "before"])
    @pytest.mark.parametrize("modified", ["", "view", "captured"])
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("origin", ORIGINS)
    def test_p1_right_or_refused(
        self, engine: EagerEngine, x: Tensor, origin: str, view: str, modified: str, read: str
    ) -> None:
        """Unmodified it works; a change must not get lost."""
        body = self._body(origin, view, modified, read)
        if modified:
            compare_or_refused(body, (x,), engine=engine)
        else:
            compare(body, (x,), engine=engine)

    def test_p1_the_refusal_comes_in_forward_and_names_the_region(self, engine: EagerEngine, x: Tensor) -> None:
        """In each call, not only in the first."""
        body = self._body("recomputed", "transposed", "view", "captured")
        for _ in range(3):
            with pytest.raises(ModifiedError, match=r"block::view .*view of a tensor that it captured"):
                engine.checkpoint(body, region_name="block")(x)

    @pytest.mark.parametrize(("read", "kept"), [("-", 0), ("view", 36 * 8), ("captured", 36 * 8)])
    @pytest.mark.parametrize("view", ["transposed", "detached", "alias"])
    def test_p3_kept_where_it_may_be_read(self, x: Tensor, view: str, read: str, kept: int) -> None:
        """A reader of the memory may be one of the view; without one nothing is kept."""

        def body(x: Tensor) -> Tensor:
            h = torch.sin(x @ WEIGHT)
            other = torch.exp(x)
            v = save(lambda: self.VIEWS[view](h), "view")()
            return other + torch.exp(torch.sin(x) * {"view": v, "captured": h}[read]) if read != "-" else other + v

        (explained,) = remat.explain(remat.checkpoint()(body), x).checkpoints
        assert sum(region.kept_bytes for region in explained.regions) == kept


def _through_a_view(x: Tensor, state: Tensor, read: Tensor | None) -> Tensor:
    view = save(lambda: state[1:], "view")()
    total = torch.sin(x + state) if read is None else torch.zeros_like(x)
    view.mul_(2)
    return (total + torch.sin(x[1:] + view).sum() + (torch.cos(x) if read is None else torch.sin(x * read))) * x


class TestP1TensorFromOutside:
    """Recomputed code reads and modifies a tensor that was there before the body."""

    BODIES: dict[str, tuple[bool | None, Callable[[Tensor, Tensor], Tensor]]] = {
        "read, then modified": (False, lambda x, state: (torch.sin(x + state), state.add_(1))[0] * x),
        "modified, then read": (False, lambda x, state: torch.sin(x + state.add_(1)) * x),
        "read on both sides": (False, lambda x, state: torch.sin(x + state) * torch.cos(x + state.mul_(2))),
        "read through a view": (False, lambda x, state: (torch.sin(x + state[0]), state.add_(1))[0] * x),
        "read for a branch": (
            False,
            lambda x, state: (torch.sin(x) if state.sum().item() > 0 else torch.cos(x), state.add_(1))[0] * x,
        ),
        "counted only": (True, lambda x, state: (torch.sin(x) * x, state.add_(1))[0]),
        "averaged only": (True, lambda x, state: (torch.sin(x) * x, state.copy_(state * 0.9 + x.detach()))[0]),
        "read and modified through a region's view": (None, lambda x, state: _through_a_view(x, state, state)),
        "read, and modified through a region's view": (None, lambda x, state: _through_a_view(x, state, None)),
        "read for itself only": (True, lambda x, state: (torch.sin(x) * x, state.add_(state.mean()))[0]),
    }

    @pytest.mark.parametrize("way", ["learned", "new path"])
    @pytest.mark.parametrize("name", BODIES)
    def test_p1_read_and_modified(self, engine: EagerEngine, x: Tensor, name: str, way: str) -> None:
        """Where replay would compute with another value it is refused, on any path through the body."""
        accepted, function = self.BODIES[name]
        state = torch.full((6, 6), 0.5, dtype=torch.float64)
        taken = [way == "learned"]

        def body(x: Tensor) -> Tensor:
            return function(x, state) if taken[0] else save(torch.exp, "other path")(x) * x

        wrapped = engine.checkpoint(body)
        for call in range(3):
            state.fill_(0.5)
            expected = run_once(body, (x,)).input_grads[0]
            state.fill_(0.5)
            run = run_once(wrapped, (x,), catch=(ModifiedError,))
            if taken[0]:
                assert accepted is not True or run.error is None, f"call {call}: {run.error}"
                assert accepted is not False or run.error is not None, f"call {call} accepted it"
            assert run.error is not None or torch.equal(expected, run.input_grads[0]), f"call {call}"
            taken[0] = True

    @pytest.mark.parametrize("way", ["learned", "new path"])
    def test_p1_changed_by_somebody_else(self, engine: EagerEngine, x: Tensor, way: str) -> None:
        """Between forward and backward."""
        state = torch.full((6, 6), 0.5, dtype=torch.float64)
        taken = [way == "learned"]

        def body(x: Tensor) -> Tensor:
            return torch.sin(x + state) * x if taken[0] else save(torch.exp, "other path")(x) * x

        wrapped = engine.checkpoint(body)
        torch.autograd.grad(wrapped(x).sum(), x)
        taken[0] = True
        for _ in range(2):
            output = wrapped(x)
            state.add_(1)
            with pytest.raises(ModifiedError, match=r"state.* was modified or replaced between forward and backward"):
                torch.autograd.grad(output.sum(), x)


class TestP1RegionThatRaises:
    """A SAVE region has effects and then raises, and the body catches it: replay repeats the effects."""

    @pytest.mark.parametrize("way", ["learned", "new path"])
    @pytest.mark.parametrize("origin", ["recomputed", "SAVE output", "view"])
    @pytest.mark.parametrize("hooks", [False, True])
    def test_p1_after_it_modified_an_argument(
        self, engine: EagerEngine, x: Tensor, origin: str, way: str, hooks: bool
    ) -> None:
        """Recomputed code reads what the region left; a new path may refuse a change of a SAVE output."""
        taken = [way == "learned"]

        def fails(t: Tensor) -> None:
            t.mul_(2)
            raise ValueError

        def body(x: Tensor) -> Tensor:
            if not taken[0]:
                return save(torch.exp, "other path")(x) * x
            h = save(torch.matmul, "make")(x, WEIGHT) if origin == "SAVE output" else x @ WEIGHT
            with contextlib.suppress(ValueError):
                save(fails, "fails")(h[1:] if origin == "view" else h)
            return torch.exp(torch.cos(h * 1)) * x

        options: dict[str, Any] = {"saved_tensors_hooks": (torch.clone, lambda tensor: tensor)} if hooks else {}
        wrapped = engine.checkpoint(body, **options)
        for call in range(4):
            may_refuse = way == "new path" and call == 1 and origin == "SAVE output"
            run = run_once(wrapped, (x,), catch=(ModifiedError,) if may_refuse else ())
            if run.error is None:
                assert torch.equal(run_once(body, (x,)).input_grads[0], run.input_grads[0]), f"call {call}"
            taken[0] = True

    def test_p1_after_it_drew_random_numbers(self, engine: EagerEngine, x: Tensor) -> None:
        """The numbers that recomputed code draws afterwards are those of forward."""

        def fails(t: Tensor) -> None:
            torch.rand_like(t)
            raise ValueError

        def body(x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                save(fails, "fails")(x)
            return torch.exp(torch.sin(x) * torch.rand_like(x)) * x

        compare(body, (x,), options={"recompute_state_hooks": (remat.GeneratorHook(),)}, engine=engine)
