"""A region's policy changes between calls: the path is new, and what SAVE regions change in place counts there, too."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import compare
from helpers.engine import EagerEngine
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ModifiedError

Region = Callable[[Callable[..., Any], str, bool], Callable[..., Any]]


def _region(function: Callable[..., Any], name: str, saved: bool) -> Callable[..., Any]:
    return remat.region(function, name, recompute=not saved)


def _plain(function: Callable[..., Any], name: str, saved: bool) -> Callable[..., Any]:
    return function


def _captured(t: Tensor, region: Region, saved: bool) -> Tensor:
    h = t * 2

    def triple() -> None:
        with torch.no_grad():
            h.mul_(3)

    region(triple, "triple", True)()
    return region(lambda u: torch.exp(torch.sin(u)), "out", saved)(h)


def _one_after_the_other(t: Tensor, region: Region, saved: bool) -> Tensor:
    def more(u: Tensor) -> None:
        with torch.no_grad():
            u.add_(1)

    h = t * 2
    region(more, "one", True)(h)
    region(more, "two", saved)(h)
    return region(lambda u: (u + 1, u * 1.5), "three", saved)(h)[1] + torch.exp(h * 0.1)


def _two_in_one_memory(t: Tensor, region: Region, saved: bool) -> Tensor:
    h = t * 2
    region(torch.sin, "first", saved)(t)

    def made() -> tuple[Tensor, Tensor]:
        v = h.sum() * h
        return v, v.t()

    v, transposed = region(made, "made", True)()
    with torch.no_grad():
        transposed.add_(1)
    return torch.exp(v * 0.1) + torch.exp(h * 0.1)


def _read_between_two_changes(t: Tensor, region: Region, saved: bool) -> Tensor:
    def more(u: Tensor) -> None:
        with torch.no_grad():
            u.add_(1)

    h = region(lambda u: u * 2, "make", True)(t)
    region(more, "one", True)(h)
    between = h * 2
    region(more, "two", True)(h)
    return region(lambda u: torch.exp(u * 0.1), "out", saved)(between)


class TestP1PoliciesThatChange:
    """The numbers of plain code or our error, in every call."""

    @pytest.mark.parametrize("body", [_captured, _one_after_the_other, _two_in_one_memory, _read_between_two_changes])
    @pytest.mark.parametrize("policies", [(True, False, False, True), (False, True, False, True)], ids=str)
    def test_p1_right_or_refused(
        self, engine: EagerEngine, body: Callable[..., Tensor], policies: tuple[bool, ...]
    ) -> None:
        x = torch.linspace(0.1, 1.6, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
        (expected,) = torch.autograd.grad(body(x, _plain, True).sum(), x)
        call = engine.checkpoint(lambda t, saved: body(t, _region, saved))
        right = 0
        for saved in policies:
            try:
                (got,) = torch.autograd.grad(call(x, saved).sum(), x)
            except ModifiedError:
                continue
            assert torch.equal(got, expected)
            right += 1
        assert right >= 2 - (body is _captured)


class TestP1WritesBesideAnArgument:
    """What a SAVE region changes, and what of it is an argument."""

    def test_p1_captured_tensor_with_a_view_of_it_as_argument(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            h = t * 2

            def change(row: Tensor) -> Tensor:
                h.mul_(3)
                return row.sum()

            total = remat.region(change, "change", recompute=False)(h[0])
            return torch.exp(h * 0.3) + total

        for _ in range(2):
            with pytest.raises(ModifiedError, match="modifies in place a tensor that it captured"):
                engine.checkpoint(body)(x)

    @pytest.mark.parametrize("kind", ["function", "method", "under a profiler"])
    def test_p1_captured_tensor_that_a_later_call_begins_to_change(
        self, engine: EagerEngine, x: Tensor, kind: str
    ) -> None:
        counts = torch.zeros(())

        def body(t: Tensor) -> Tensor:
            h = t * 2

            def shift(*_: Any) -> Tensor:
                counts.add_(1)  # from outside: once, as without checkpoints
                if counts > 2:
                    h.add_(1)
                return t.sum()

            call = types.MethodType(shift, object()) if kind == "method" else shift
            total = remat.region(call, "shift", recompute=False)()
            return torch.exp(h) * total

        call = engine.checkpoint(body)
        for _ in range(2):
            call(x).sum().backward()
        profiled = torch.profiler.profile() if kind == "under a profiler" else contextlib.nullcontext()
        with profiled:
            for message in ("which it did not do before", "recomputed code reads that tensor afterwards"):
                with pytest.raises(ModifiedError, match=message):
                    call(x)
        assert counts == 4

    @pytest.mark.parametrize("second", [True, False])
    @pytest.mark.parametrize("detached", [True, False])
    def test_p1_a_region_that_no_longer_changes_its_argument(
        self, engine: EagerEngine, x: Tensor, detached: bool, second: bool
    ) -> None:
        """What was overwritten before anybody read it is read now."""
        calls = torch.zeros(())  # not known to what tells bodies apart

        def body(t: Tensor) -> Tensor:
            late = bool(remat.region(lambda: calls > 2, "late", recompute=False)())
            h = remat.region(lambda u: (u * 1.5).detach() if detached else u * 1.5, "make", recompute=False)(t)

            with torch.no_grad():
                remat.region((lambda u: None) if late else (lambda u: u.mul_(2)), "first", recompute=False)(h)
            read = torch.exp(h.detach() * 0.1) * t
            with torch.no_grad():
                if second or late:
                    remat.region(lambda u: u.mul_(3), "second", recompute=False)(h)
            return torch.exp(h * 0.2) * t + read

        call = engine.checkpoint(body)
        right = 0
        for _ in range(6):
            calls.add_(1)
            (expected,) = torch.autograd.grad(body(x).sum(), x)
            try:
                (found,) = torch.autograd.grad(call(x).sum(), x)
            except ModifiedError:
                continue
            assert torch.equal(found, expected)
            right += 1
        assert right >= 3

    @pytest.mark.parametrize("later", [False, True])
    def test_p1_changed_argument_whose_detached_self_comes_back(
        self, engine: EagerEngine, x: Tensor, later: bool
    ) -> None:
        """Right, unless the memory changes once more: it would change in one of the two only."""

        def body(t: Tensor) -> Tensor:
            h = t * 2

            def change(u: Tensor) -> Tensor:
                with torch.no_grad():
                    u.mul_(1.25)
                return u.detach()

            d = remat.region(change, "change", recompute=False)(h)
            if later:
                d.sin_()
            return torch.exp(h * 0.1) * torch.exp(d)

        if not later:
            compare(body, [x], engine=engine)
            return
        for _ in range(2):
            with pytest.raises(ModifiedError, match="modified in place afterwards"):
                engine.checkpoint(body)(x)

    def test_p1_lists_of_tensors_that_have_no_counter(self, engine: EagerEngine, x: Tensor) -> None:
        with torch.inference_mode():
            counts = torch.zeros(3)

        def body(t: Tensor) -> Tensor:
            with torch.inference_mode():
                remat.region(lambda: torch._foreach_add_([counts], 1.0), "count", recompute=False)()
            return torch.exp(torch.sin(t))

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("part", [lambda h: h, lambda h: h[1:], lambda h: h.t()])
    def test_p1_lists_of_tensors(self, engine: EagerEngine, x: Tensor, part: Callable[[Tensor], Tensor]) -> None:
        """Torch does not count their changes where the first call is looked at."""

        def body(t: Tensor) -> Tensor:
            h = t * 2
            remat.region(lambda u: torch._foreach_mul_([part(u)], 1.5), "change", recompute=False)(h)
            return torch.exp(h * 0.1)

        compare(body, [x], engine=engine)

    def test_p1_input_in_a_list(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor, other: Tensor) -> Tensor:
            torch._foreach_mul_([other], 1.5)
            return torch.exp(t * other)

        call = engine.checkpoint(body)
        for _ in range(2):
            with pytest.raises(ModifiedError, match="modifies its input 1 in place"):
                call(x, torch.ones_like(x))
