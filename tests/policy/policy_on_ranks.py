"""Run by `test_policy_ranks.py` on each rank."""

import torch
from policy_models import RUNS, Model, gradients, model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_remat as remat
from torch_remat.testing import CountCollectives

SAVE = ["attention.wo", "feed_forward.*"]


def plain(tensors):
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]


def same(found, expected):
    return [torch.equal(one, other) for one, other in zip(plain(found), plain(expected), strict=True)]


def fsdp(rank, order):
    """FSDP2 and a policy, in this order; equal bits, what ran, and what was replayed of the collectives."""
    mesh = init_device_mesh("cpu", (2,))

    def shard(one: Model) -> None:
        for layer in one.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(one, mesh=mesh)

    reference, policed = model(), model()
    shard(reference)
    steps = {"policy": lambda: remat.apply_policy(policed, save=SAVE), "fsdp": lambda: shard(policed)}
    for step in order:
        steps[step]()
    results = [same(gradients(policed), gradients(reference))]
    with CountCollectives() as without:
        expected = gradients(reference)
    with CountCollectives() as collectives:
        found = gradients(policed)
    runs = dict(RUNS)
    results.append(same(found, expected))
    return {
        "same": results,
        "runs": runs,
        "replayed": collectives.count(phase="replay"),
        "as_without": collectives.counts() == without.counts(),
        "sharded": isinstance(policed.layers["0"], FSDPModule),
    }


def tensor_parallel(rank, order, save):
    """Sequence parallel blocks; the collectives that hooks of modules issue, by phase."""
    mesh = init_device_mesh("cpu", (2,))

    def parallelize(one: Model) -> None:
        for layer in one.layers.values():
            plan = {
                "norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "attention.wq": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            }
            parallelize_module(layer, mesh, plan)

    def step(one: Model) -> list[torch.Tensor]:
        RUNS.clear()
        one.zero_grad()
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(rank))
        for layer in one.layers.values():
            x = layer(x)
        loss = x.logsumexp(-1).sum()
        loss.backward()
        return [loss.detach(), *(weight.grad.clone() for weight in one.layers.parameters())]

    reference, policed = model(), model()
    parallelize(reference)
    steps = {"policy": lambda: remat.apply_policy(policed, save=save), "tp": lambda: parallelize(policed)}
    for one in order:
        steps[one]()
    step(policed)
    step(reference)
    expected = step(reference)
    with CountCollectives() as collectives:
        found = step(policed)
    return {"same": same(found, expected), "replayed": collectives.counts("replay"), "kinds": collectives.kinds()}
