"""R07: CPU bfloat16 autocast in and around a block; backward inside and outside autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import torch_remat as remat


def step(wrap: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]], where: str) -> list:
    """Output, gradients and the dtypes seen, with backward (1) outside autocast or (2) inside float16 autocast."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    dtypes: dict[str, list[tuple[torch.dtype, ...]]] = {"forward": [], "replay": []}

    def full_precision(t: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return linear(t.float())

    def block(t: Tensor) -> Tensor:
        with torch.no_grad():
            quiet = linear(t)
        loud = linear(t)
        full = remat.region(full_precision, "full", recompute=False)(loud)
        dtypes["replay" if remat.is_recomputing() else "forward"].append((quiet.dtype, loud.dtype, full.dtype))
        return torch.tanh(loud + quiet).float() * torch.sin(full)

    with torch.autocast("cpu", torch.bfloat16):
        before = linear(x)
        output = wrap(block)(before)
    context = torch.autocast("cpu", torch.float16) if where == "float16" else nullcontext()
    with context:
        state = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        output.sum().backward()
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == state
    assert dtypes["forward"] == [(torch.bfloat16, torch.bfloat16, torch.float32)]
    assert all(seen in dtypes["forward"] for seen in dtypes["replay"])
    return [output.detach(), x.grad, linear.weight.grad, linear.bias.grad]


@pytest.mark.parametrize("where", ["outside", "float16"])
def test_r07_grads_are_eagers(where: str) -> None:
    expected = step(lambda body: body, where)
    for _ in range(3):
        got = step(remat.checkpoint(region_name="block"), where)
        assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
