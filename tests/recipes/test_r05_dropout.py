"""R05: dropout around a SAVE region, in two blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.hooks import generator_hooks
from torch import Tensor

import torch_remat as remat


class Dropping:
    """Two blocks of three dropouts each; every mask is recorded with its phase."""

    def __init__(self) -> None:
        self.masks: list[tuple[str, str, Tensor]] = []

    def drop(self, x: Tensor, p: float, label: str) -> Tensor:
        """Dropout by hand, so that the mask can be recorded."""
        mask = (torch.rand(x.shape, dtype=x.dtype) >= p).to(x.dtype) / (1 - p)
        self.masks.append((label, "replay" if remat.is_recomputing() else "forward", mask))
        return x * mask

    def block(self, x: Tensor, name: str) -> Tensor:
        """REC dropout, SAVE dropout, bare dropout."""
        a = remat.region(lambda t: self.drop(t * t, 0.3, f"{name}.a"), "a", recompute=True)(x)
        b = remat.region(lambda t: self.drop(t, 0.5, f"{name}.b"), "b", recompute=False)(a)
        return self.drop(a * b, 0.2, f"{name}.c")

    def step(self, wrap: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]) -> list[Tensor]:
        """Gradient, and three numbers drawn afterwards."""
        self.masks.clear()
        x = torch.linspace(-2, 2, 64, dtype=torch.float64).requires_grad_()
        torch.manual_seed(11)
        y = wrap(lambda t: self.block(t, "second"))(wrap(lambda t: self.block(t, "first"))(x))
        y.sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, torch.rand(3)]


def test_r05_masks_and_random_state_are_eagers() -> None:
    model = Dropping()
    expected = model.step(lambda body: body)
    for _ in range(3):
        got = model.step(remat.checkpoint(region_name="block", recompute_state_hooks=generator_hooks()))
        assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
        forward = {label: mask for label, phase, mask in model.masks if phase == "forward"}
        replayed = [(label, mask) for label, phase, mask in model.masks if phase == "replay"]
        assert len(forward) == 6
        assert {label for label, _ in replayed} == {"first.a", "first.c", "second.a", "second.c"}
        assert all(torch.equal(forward[label], mask) for label, mask in replayed)


def test_r05_without_a_hook_refused_at_first_use() -> None:
    model = Dropping()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="recompute_state_hooks"):
            model.step(remat.checkpoint(region_name="block"))
