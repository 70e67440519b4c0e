"""R14: two losses over one block with a retained graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_remat as remat


def test_r14_two_losses_on_a_retained_graph() -> None:
    runs: list[bool] = []
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        runs.append(remat.is_recomputing())
        hidden = remat.region(F.linear, "linear", recompute=False)(torch.sin(x), weight)
        return torch.exp(torch.tanh(hidden))

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
        weight.grad = None
        y = call(x)
        y.sin().sum().backward(retain_graph=True)
        y.cos().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.exp().sum().backward()
        return [x.grad, weight.grad]

    expected = step(block)
    for _ in range(3):
        runs.clear()
        got = step(remat.checkpoint(region_name="block")(block))
        assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
        assert runs == [False, True, True]  # a full retained backward replays again, as documented
