"""Checkpointed blocks under FSDP2 (`fully_shard`): the same bits and the same collectives as without checkpointing."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_remat as remat

DIM, HIDDEN, BLOCKS, BATCH = 16, 48, 3, 4


class Block(nn.Module):
    """Norm, projection up, activation, projection down, residual; the projection up may be a SAVE region."""

    def __init__(self, index: int, run: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)
        self.index, self.run = index, run
        self.calls: Counter[str] = Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.run == "plain":
            return self.body(x)
        return remat.checkpoint(region_name=f"layers.{self.index}")(self.body)(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["body"] += 1
        up = self.project_up
        if self.run == "regions":
            up = remat.region(up, "up", recompute=False)
        return x + self.down(torch.nn.functional.gelu(up(self.norm(x))))

    def project_up(self, x: torch.Tensor) -> torch.Tensor:
        self.calls["up"] += 1
        return self.up(x)


class CountCollectives(TorchDispatchMode):
    """Counts the collectives that reach the process group, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.counts[f"{func.namespace}.{func._opname}"] += 1
        return func(*args, **(kwargs or {}))


def build(run: str, device: torch.device, mesh: DeviceMesh) -> nn.Sequential:
    """The sharded model; the same weights for every `run` and rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(index, run) for index in range(BLOCKS)), nn.Linear(DIM, DIM)).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return model


def train(model: nn.Module, device: torch.device, steps: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Outputs and sharded gradients of each step; every rank has data of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    results = []
    for _ in range(steps):
        output = model(torch.randn(BATCH, DIM, generator=generator).to(device))
        output.square().mean().backward()
        shards = [parameter.grad for parameter in model.parameters()]
        assert all(isinstance(shard, DTensor) for shard in shards)
        gradients = [shard.to_local().clone() for shard in shards if isinstance(shard, DTensor)]
        results.append((output.detach().clone(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return results


def blocks_of(model: nn.Sequential) -> list[Block]:
    return [module for module in model if isinstance(module, Block)]


@pytest.mark.parametrize("run", ["full", "regions"])
def test_p1_outputs_and_sharded_gradients_are_those_without_checkpointing(run, device, mesh):
    expected = train(build("plain", device, mesh), device, steps=3)
    got = train(build(run, device, mesh), device, steps=3)
    for step, ((output, gradients), (output_got, gradients_got)) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(output, output_got), f"output of step {step}"
        for index, (one, other) in enumerate(zip(gradients, gradients_got, strict=True)):
            assert torch.equal(one, other), f"gradient {index} of step {step}"
    assert any(gradient.count_nonzero() for gradient in got[-1][1])


@pytest.mark.parametrize("run", ["full", "regions"])
def test_p2_p4_bodies_replay_once_and_save_bodies_never(run, device, mesh):
    model = build(run, device, mesh)
    train(model, device, steps=2)
    for block in blocks_of(model):
        assert block.calls["body"] == 2 * 2
        assert block.calls["up"] == (2 if run == "regions" else 4)


@pytest.mark.parametrize("run", ["full", "regions"])
def test_p6_collectives_are_those_without_checkpointing(run, device, mesh):
    """Parameters are gathered for a block's backward anyway; the replay inside it must not gather them again."""

    def collectives(model: nn.Module) -> Counter[str]:
        train(model, device, steps=1)  # FSDP's first step sets itself up
        with CountCollectives() as mode:
            train(model, device, steps=1)
        return mode.counts

    expected = collectives(build("plain", device, mesh))
    # Each block and the last layer: gathered for forward and, but for those still gathered, for backward; reduced once.
    gathered, reduced = expected["c10d._allgather_base_"], expected["c10d._reduce_scatter_base_"]
    assert gathered > BLOCKS + 1
    assert reduced == BLOCKS + 1
    assert collectives(build(run, device, mesh)) == expected
