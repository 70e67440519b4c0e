"""Programs that take the checkpoint, or nothing in its place, as an argument: run both and compare the bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import torch_remat as remat

__all__ = ["DifferentiableOnce", "Wrap", "check", "grads", "leaf", "plain", "saved"]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class DifferentiableOnce(torch.autograd.Function):
    """Its gradients have a node that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


def saved(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return remat.region(function, name, recompute=False)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def check(program: Callable[[Wrap], list[Tensor]], **options: Any) -> None:
    """Three runs as checkpoint give the bits of three runs without."""
    expected = [program(plain) for _ in range(3)]
    found = [program(lambda function: remat.checkpoint(region_name="c", **options)(function)) for _ in range(3)]
    for ours, eager in zip(found, expected, strict=True):
        for one, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def leaf(*shape: int) -> Tensor:
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).requires_grad_()


def grads(output: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output.sum(), leaves)]
