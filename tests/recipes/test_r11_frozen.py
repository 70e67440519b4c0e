"""R11: frozen weights, a low-rank adapter, nothing to train, and no_grad."""

from __future__ import annotations

import gc
import warnings

import torch
from helpers.alive import StorageTracker, live_tensors
from torch import Tensor, nn

import torch_remat as remat


class Adapted(nn.Module):
    """A frozen linear with a trainable rank-2 adapter in a SAVE region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 4, bias=False).double().requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
        self.runs = 0

    def adapter(self, x: Tensor) -> Tensor:
        """The rank-2 path."""
        return x @ self.down.t() @ self.up.t()

    def forward(self, x: Tensor) -> Tensor:
        """Frozen path plus adapter."""
        self.runs += 1
        hidden = torch.sin(self.frozen(x))
        return torch.tanh(hidden + remat.region(self.adapter, "adapter", recompute=False)(hidden)).exp()


def test_r11_adapter_grads_are_eagers_and_nothing_warns() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    model = Adapted()
    model(x).sum().backward()
    expected = [model.down.grad, model.up.grad]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.down.grad = model.up.grad = None
            remat.checkpoint(region_name="block")(model)(x).sum().backward()
            assert torch.equal(model.down.grad, expected[0])
            assert torch.equal(model.up.grad, expected[1])
            assert model.frozen.weight.grad is None


def test_r11_all_frozen_runs_once_and_keeps_nothing() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    model = Adapted().requires_grad_(False)
    call = remat.checkpoint(region_name="block")(model)
    for count in range(1, 4):
        tracker = StorageTracker()
        tracker.ignore(x, *model.parameters())
        with tracker:
            output = call(x)
        assert output.grad_fn is None
        assert model.runs == count
        assert tracker.alive_bytes(without=output) == 0


def test_r11_no_grad_and_inference_mode_leave_nothing() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    model = Adapted()
    call = remat.checkpoint(region_name="block")(model)
    gc.collect()
    counts = []
    for index in range(200):
        with torch.no_grad():
            call(x)
        if index % 50 == 49:
            counts.append(live_tensors())
    for _ in range(50):
        with torch.inference_mode():
            call(x)
    counts.append(live_tensors())
    assert model.runs == 250
    assert len(set(counts)) == 1
