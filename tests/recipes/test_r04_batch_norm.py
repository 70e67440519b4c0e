"""R04: BatchNorm between two linears: buffers are updated once per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_remat as remat


class BufferHook:
    """State hook over the three buffers of a BatchNorm."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        self.norm = norm

    def snapshot(self) -> list[Tensor]:
        """Copies of the buffers."""
        return [buffer.clone() for buffer in self.norm.buffers()]

    def restore(self, state: list[Tensor]) -> None:
        """Write the copies back."""
        with torch.no_grad():
            for buffer, value in zip(self.norm.buffers(), state, strict=True):
                buffer.copy_(value)


def train(variant: str) -> list[Any]:
    """Three steps with batch 7, then eval: buffers, parameters and eval output."""
    torch.manual_seed(0)
    first, norm, second = nn.Linear(5, 5).double(), nn.BatchNorm1d(5, momentum=0.3).double(), nn.Linear(5, 5).double()
    modules = nn.ModuleList([first, norm, second])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1)

    def block(x: Tensor) -> Tensor:
        hidden = torch.sin(first(x))
        if variant == "eager":
            hidden = norm(hidden)
        else:
            hidden = remat.region(norm, "norm", recompute=variant == "rec with hook")(hidden)
        return second(torch.tanh(hidden))

    hooks = (BufferHook(norm),) if variant == "rec with hook" else ()
    call = block if variant == "eager" else remat.checkpoint(region_name="block", recompute_state_hooks=hooks)(block)
    for _ in range(3):
        optimizer.zero_grad()
        (call(torch.randn(7, 5, dtype=torch.float64)) ** 2).sum().backward()
        optimizer.step()
    modules.eval()
    with torch.no_grad():
        output = call(torch.linspace(-1, 1, 35, dtype=torch.float64).reshape(7, 5))
    assert int(norm.num_batches_tracked) == 3
    return [output, *norm.buffers(), *(parameter.detach() for parameter in modules.parameters())]


@pytest.mark.parametrize("variant", ["save", "rec with hook"])
def test_r04_batch_norm_is_eagers(variant: str) -> None:
    for _ in range(2):
        assert all(torch.equal(left, right) for left, right in zip(train("eager"), train(variant), strict=True))


def test_r04_unhooked_recomputed_batch_norm_still_has_eagers_grads() -> None:
    """Without a hook the running statistics advance twice (documented), or it is refused; gradients never drift."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5).double()
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)

    def block(t: Tensor) -> Tensor:
        return torch.exp(norm(torch.sin(t)))

    expected = torch.autograd.grad(block(x).sum(), x)[0]
    for _ in range(2):
        try:
            got = torch.autograd.grad(remat.checkpoint(region_name="block")(block)(x).sum(), x)[0]
        except remat.errors.RematError:
            continue
        assert torch.equal(expected, got)
