"""R12: one linear used three times, twice in block A and once in block B; one process, and two under DDP."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_remat as remat
from torch_remat.testing import assert_same_bits, assert_same_gradients

DIM, STEPS = 6, 3


class Model(nn.Module):
    """Block A uses the linear in a SAVE region and bare, block B bare."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for name, block in (("a", self.block_a), ("b", self.block_b)):
            x = remat.checkpoint(region_name=name)(block)(x) if self.checkpointed else block(x)
        return x

    def block_a(self, x: Tensor) -> Tensor:
        h = remat.region(self.shared, "shared", recompute=False)(torch.sin(x))
        return torch.tanh(self.shared(torch.exp(0.1 * h)))

    def block_b(self, x: Tensor) -> Tensor:
        return torch.exp(0.1 * self.shared(torch.cos(x)))


def data(rank: int, step: int) -> Tensor:
    return torch.linspace(-1 - rank, 1 + step, 4 * DIM, dtype=torch.float64).reshape(4, DIM)


def test_r12_one_gradient_ready_event_in_one_process():
    plain, ours = Model(False), Model(True)
    ready: Counter[str] = Counter()
    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: ready.update([name]))
    for step in range(STEPS):
        for model in (plain, ours):
            model.zero_grad()
            model(data(0, step)).sum().backward()
        assert_same_gradients(plain, ours)
        assert ready == {"shared.weight": step + 1, "shared.bias": step + 1}


def under_ddp(rank: int) -> list[dict[str, Tensor]]:
    """Gradients of each step; "ready twice" would be an error of DDP's."""
    model = Model(True)
    wrapped = DistributedDataParallel(model)
    steps = []
    for step in range(STEPS):
        model.zero_grad()
        wrapped(data(rank, step)).sum().backward()
        steps.append({name: parameter.grad.clone().numpy() for name, parameter in model.named_parameters()})  # type: ignore[union-attr]
    dist.barrier()
    return steps


def test_r12_ddp_gradients_are_the_mean_of_the_ranks():
    for steps in values(run_ranks(under_ddp, 2)):
        for step, gradients in enumerate(steps):
            mean = {}
            for rank in range(2):
                model = Model(False)
                model(data(rank, step)).sum().backward()
                for name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    mean[name] = mean.get(name, 0) + parameter.grad / 2
            got = {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}
            assert_same_bits(mean, got, atol=1e-12)
