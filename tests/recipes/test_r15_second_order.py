"""R15: second order, and gradients of chosen inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_remat as remat


class Sine(torch.autograd.Function):
    """A custom function whose backward can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sine."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Cosine times the gradient, out of differentiable operations."""
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def block(x: Tensor) -> Tensor:
    """``exp(x * sin(x))`` with SAVE around the sine."""
    return torch.exp(x * remat.region(torch.sin, "sin", recompute=False)(x))


def custom_block(x: Tensor) -> Tensor:
    """The same with the custom function."""
    return torch.exp(x * remat.region(Sine.apply, "sin", recompute=False)(x * 1))


def test_r15_gradient_of_a_squared_gradient() -> None:
    for body in (block, custom_block):
        results = []
        for call in (body, *(remat.checkpoint(region_name="block")(body) for _ in range(3))):
            x = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
            (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), x)
            results.append((first.detach(), second))
        for got in results[1:]:
            assert torch.allclose(results[0][0], got[0], rtol=0, atol=1e-12)
            assert torch.allclose(results[0][1], got[1], rtol=0, atol=1e-12)


def test_r15_gradgradcheck() -> None:
    for body in (block, custom_block):
        call = remat.checkpoint(region_name="block")(body)
        for point in (-0.9, -0.3, 0.1, 0.4, 0.8):
            x = torch.full((2,), point, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(call, (x,))
            assert torch.autograd.gradgradcheck(call, (x,))


def test_r15_chosen_inputs_alone() -> None:
    x, w1, w2 = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def body(t: Tensor) -> Tensor:
        hidden = remat.region(torch.matmul, "first", recompute=False)(torch.sin(t), w1)
        return torch.exp(torch.tanh(hidden) @ w2)

    expected = torch.autograd.grad(body(x).sum(), [w1])
    for _ in range(3):
        got = torch.autograd.grad(remat.checkpoint(region_name="block")(body)(x).sum(), [w1])
        assert torch.equal(expected[0], got[0])
        assert x.grad is None
        assert w1.grad is None
        assert w2.grad is None
