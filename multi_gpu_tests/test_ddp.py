"""DDP with weights that two blocks share, and HSDP: every parameter's gradient is ready once, and the numbers
are equal."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Annotated, Measured, gradients, measured
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_remat.testing import assert_same_bits

DIM = 6


class Shared(nn.Module):
    """One linear, twice in block A (once in a SAVE region, once bare) and once in block B."""

    def __init__(self, annotated: Annotated) -> None:
        super().__init__()
        self.annotated = annotated
        self.shared = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.own = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.annotated.checkpoint("a", self.block_a)(x)
        return self.annotated.checkpoint("b", self.block_b)(x)

    def block_a(self, x: Tensor) -> Tensor:
        h = self.annotated.region(self.shared, "shared")(torch.sin(x))
        return x + torch.tanh(self.shared(torch.exp(h * 0.1)))

    def block_b(self, x: Tensor) -> Tensor:
        return torch.exp(0.1 * self.own(torch.tanh(self.shared(x))))


def data(rank: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(4, DIM, generator=generator, dtype=torch.float64).to(device)


def ddp(run: str, device: torch.device, ready: Counter[str] | None = None) -> tuple[Measured, Shared]:
    """One step under DDP; ``ready`` counts how often each parameter's gradient was accumulated, over all steps."""
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = Shared(annotated).to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    if ready is not None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: ready.update([name]))

    def step() -> tuple[Tensor, dict[str, Tensor | None]]:
        model.zero_grad()
        loss = wrapped(data(dist.get_rank(), device)).square().mean()
        loss.backward()
        return loss.detach(), gradients(model)

    return measured(annotated, step, warm_up=2), model


@pytest.mark.parametrize("run", OURS)
def test_p1_ddp_with_shared_weights(run, device):
    expected, _ = ddp("none", device)
    ready: Counter[str] = Counter()
    got, model = ddp(run, device, ready)
    assert_same_bits(expected.numbers, got.numbers)
    assert ready == dict.fromkeys(dict(model.named_parameters()), 3), "once per parameter and step"
    assert got.counts() == expected.counts()
    assert got.bodies == {"a": 2, "b": 2}
    assert got.regions == {"shared": 1 if run == "regions" else 2}


@pytest.mark.parametrize("run", OURS)
def test_p1_ddp_gradients_are_the_mean_of_the_ranks(run, device):
    got, model = ddp(run, device)
    alone = Shared(Annotated("none")).to(device)
    alone.load_state_dict(model.state_dict())
    total = {name: torch.zeros_like(parameter) for name, parameter in alone.named_parameters()}
    for rank in range(dist.get_world_size()):
        alone.zero_grad()
        alone(data(rank, device)).square().mean().backward()
        for name, grad in gradients(alone).items():
            assert grad is not None
            total[name] += grad / dist.get_world_size()
    assert_same_bits(total, got.numbers[1], atol=1e-12)


def hsdp(run: str, device: torch.device, shape: tuple[int, int], ready: Counter[str] | None = None) -> Measured:
    """One step of blocks that are replicated over the first dimension of ``shape`` and sharded over the second."""
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = Shared(annotated).to(device)
    fully_shard(model, mesh=mesh)
    if isinstance(model, FSDPModule):
        model.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    if ready is not None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: ready.update([name]))

    def step() -> tuple[Tensor, dict[str, Tensor | None]]:
        model.zero_grad()
        loss = model(data(dist.get_rank(), device)).square().mean()
        loss.backward()
        return loss.detach(), gradients(model)

    return measured(annotated, step)


@pytest.mark.parametrize("run", OURS)
@pytest.mark.parametrize("shards", [1, 2])
def test_p6_hsdp(run, shards, device):
    shape = (dist.get_world_size() // shards, shards)
    ready: Counter[str] = Counter()
    expected, got = hsdp("none", device, shape), hsdp(run, device, shape, ready)
    assert_same_bits(expected.numbers, got.numbers)
    assert set(ready.values()) == {2}, "once per parameter and step"
    assert len(ready) == len(expected.numbers[1])
    assert got.counts() == expected.counts()
    assert got.counts()["all_reduce"] == 1, "between the replicas, once for the unit"
    assert got.counts().get("reduce_scatter", 0) == (1 if shards > 1 else 0)
    assert got.bodies == {"a": 2, "b": 2}


CASES = {"DDP, shared weights": lambda run, device, mesh: ddp(run, device)[0]}
