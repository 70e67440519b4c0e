"""Custom autograd Functions that several tests keep tensors with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_remat as remat


class SavesInternal(torch.autograd.Function):
    """``sin`` that saves a tensor of its own, the cosine."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """Sine."""
        ctx.save_for_backward(t.cos())
        return t.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Cosine times the gradient."""
        return grad * ctx.saved_tensors[0]


class Keeps(torch.autograd.Function):
    """Saves the tensors it is given, under names ``t0``, ``t1``..."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensors: list[Tensor]) -> Tensor:
        """``x`` itself, in effect."""
        remat.save_for_backward(ctx, {f"t{index}": tensor for index, tensor in enumerate(tensors)})
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient itself; reads what was saved."""
        _ = ctx.saved_tensors
        return grad, None
