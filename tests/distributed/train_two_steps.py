"""A small FSDP2 training with checkpointed blocks, for the launcher's test: prints one line per rank."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torch_remat as remat


class Block(nn.Module):
    """A residual MLP; its first projection is a SAVE region."""

    def __init__(self, name: str, checkpointed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.name, self.checkpointed = name, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return remat.checkpoint(region_name=self.name)(self.body)(x) if self.checkpointed else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(remat.region(self.up, "up", recompute=False)(x)))


def train(checkpointed: bool) -> list[float]:
    """The global losses of three steps."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Block(f"layers.{index}", checkpointed) for index in range(2)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def main() -> int:
    """Train with and without checkpointing; the losses must be the same digits."""
    dist.init_process_group("gloo")
    plain, ours = train(False), train(True)
    node, rank = os.environ["GROUP_RANK"], dist.get_rank()
    print(f"node {node} rank {rank} of {dist.get_world_size()} equal {plain == ours} losses {ours}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if plain == ours else 1


if __name__ == "__main__":
    sys.exit(main())
