"""Tensor, sequence and loss parallel, by plan and by hand: a SAVE region takes its collective along; nothing drifts."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compositions import OURS, Annotated, Measured, gradients, measured
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat
from torch_remat.errors import RandomStateError, RematError
from torch_remat.testing import assert_same_bits

DIM, HIDDEN, BATCH, SEQ, VOCAB = 8, 16, 2, 4, 12


def data(device: torch.device) -> Tensor:
    return torch.randn(BATCH, SEQ, DIM, generator=torch.Generator().manual_seed(7)).to(device)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)


class TwoMlps(nn.Module):
    """One block of two residual MLPs: column-parallel, then row-parallel."""

    def __init__(self, annotated: Annotated) -> None:
        super().__init__()
        self.first, self.second = Mlp(), Mlp()
        self.annotated = annotated

    def forward(self, x: Tensor) -> Tensor:
        return self.annotated.checkpoint("layers.0", self.body)(x)

    def body(self, x: Tensor) -> Tensor:
        for name, mlp in (("first", self.first), ("second", self.second)):
            x = x + self.annotated.region(mlp.down, f"{name}.down")(torch.tanh(mlp.up(x)))
        return x


def tensor_parallel(run: str, device: torch.device, mesh: DeviceMesh) -> Measured:
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = TwoMlps(annotated).to(device)
    plan = {f"{name}.{part}": kind() for name in ("first", "second") for part, kind in PARTS.items()}
    parallelize_module(model, mesh, plan)

    def step() -> tuple[Tensor, dict[str, Tensor | None], Tensor | None]:
        model.zero_grad()
        x = data(device).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach(), gradients(model), x.grad

    return measured(annotated, step)


PARTS = {"up": ColwiseParallel, "down": RowwiseParallel}


def test_p2_a_saved_projection_does_not_reduce_again(device, mesh):
    runs = {run: tensor_parallel(run, device, mesh) for run in ("none", "torch", *OURS)}
    for run, got in runs.items():
        assert_same_bits(runs["none"].numbers, got.numbers, what=run)
    counts = {run: got.counts() for run, got in runs.items()}
    assert counts["none"] == {"all_reduce": 4}
    assert counts["regions"] == {"all_reduce": 4}
    # The first reduction is made again; the second only feeds the output, which nobody needs.
    assert counts["full"] == {"all_reduce": 5}
    assert runs["full"].collectives.count("all_reduce", "replay") == 1
    assert runs["regions"].collectives.counts("replay") == {}
    assert runs["regions"].regions == {"first.down": 1, "second.down": 1}


class SequenceParallelBlock(nn.Module):
    """Norm on a part of the sequence, gather, projections, scatter."""

    def __init__(self, annotated: Annotated) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = Mlp()
        self.annotated = annotated
        self.gathered: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.annotated.checkpoint("layers.0", self.body)(x)

    def body(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        full = self.annotated.region(self.gather, "tp_gather", save=False)(h)
        h = self.annotated.region(self.mlp.up, "up")(full)
        return x + self.annotated.region(self.mlp.down, "down")(torch.tanh(h))

    def gather(self, h: DTensor) -> DTensor:
        full = h.redistribute(placements=[Replicate()])
        local = full.to_local()
        self.gathered.append(StorageWeakRef(getattr(local, "elem", local).untyped_storage()))
        return full


def sequence_parallel(run: str, device: torch.device, mesh: DeviceMesh) -> Measured:
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = SequenceParallelBlock(annotated).to(device)
    plan = {
        "norm": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=Replicate()),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    part = data(device).chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    alive: list[bool] = []

    def step() -> tuple[Tensor, dict[str, Tensor | None], Tensor | None]:
        model.zero_grad()
        model.gathered.clear()
        x = part.clone().requires_grad_()
        y = model(x)
        alive.append(not model.gathered[0].expired())
        loss = y.square().mean()
        loss.backward()
        return loss.detach(), gradients(model), x.grad

    gc.disable()
    try:
        result = measured(annotated, step)
    finally:
        gc.enable()
    result.kept = alive[-1]
    return result


def test_p3_a_recomputed_gather_is_not_kept_and_costs_one_gather(device, mesh):
    none, full, regions = (sequence_parallel(run, device, mesh) for run in ("none", *OURS))
    assert_same_bits(none.numbers, full.numbers)
    assert_same_bits(none.numbers, regions.numbers)
    assert none.counts() == {"all_gather": 2, "reduce_scatter": 2}
    for got in (full, regions):
        assert got.counts() == {"all_gather": 3, "reduce_scatter": 2}
        assert got.collectives.counts("replay") == {"all_gather": 1}
        assert got.kept is False
    assert none.kept is True
    assert regions.regions == {"tp_gather": 2, "up": 1, "down": 1}


class Head(nn.Module):
    def __init__(self, annotated: Annotated) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.out = nn.Linear(DIM, VOCAB)
        self.annotated = annotated

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.annotated.checkpoint("head", self.body)(x, target)

    def body(self, x: Tensor, target: Tensor) -> Tensor:
        h = x + self.annotated.region(self.mlp.down, "down")(torch.tanh(self.mlp.up(x)))
        logits = self.annotated.region(self.out, "out")(h)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def loss_parallel_head(run: str, device: torch.device, mesh: DeviceMesh) -> Measured:
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = Head(annotated).to(device)
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    plan["out"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    target = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(3)).to(device)

    def step() -> tuple[Tensor, dict[str, Tensor | None]]:
        model.zero_grad()
        with loss_parallel():
            loss = model(data(device), target)
            loss.backward()
        local = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return local.detach(), gradients(model)

    return measured(annotated, step)


def test_p1_loss_parallel(device, mesh):
    none, full, regions = (loss_parallel_head(run, device, mesh) for run in ("none", *OURS))
    for got in (full, regions):
        assert_same_bits(none.numbers, got.numbers)
        assert got.bodies == {"head": 2}
    assert full.regions == {"down": 2, "out": 2}
    assert regions.regions == {"down": 1, "out": 1}
    again = full.collectives.count("all_reduce", "replay")
    assert regions.collectives.counts("replay") == {"all_reduce": again - 1}, "the loss's own, and not that of `down`"


def by_hand(run: str, device: torch.device, mesh: DeviceMesh) -> Measured:
    """DTensor code without parallelize_module: weights sharded by hand, the partial sum reduced in the region."""
    torch.manual_seed(0)
    annotated = Annotated(run)
    up = nn.Parameter(distribute_tensor(torch.randn(HIDDEN, DIM).to(device), mesh, [Shard(0)]))
    down = nn.Parameter(distribute_tensor(torch.randn(DIM, HIDDEN).to(device), mesh, [Shard(1)]))
    normed: list[StorageWeakRef] = []
    kept: list[bool] = []

    def project_down(h: DTensor) -> DTensor:
        partial = F.linear(h, down)
        assert isinstance(partial, DTensor)
        assert partial.placements == (Partial(),)
        return partial.redistribute(placements=[Replicate()])

    def body(x: DTensor) -> Tensor:
        h = torch.sin(x)
        assert isinstance(h, DTensor)
        normed.append(StorageWeakRef(h.to_local().untyped_storage()))
        h = torch.tanh(annotated.region(F.linear, "up")(h, up))
        return x + annotated.region(project_down, "down")(h)

    def step() -> tuple[Tensor | None, ...]:
        up.grad = down.grad = None
        normed.clear()
        x = DTensor.from_local(data(device), mesh, [Replicate()]).requires_grad_()
        y = annotated.checkpoint("layers.0", body)(x)
        kept.append(not normed[0].expired())
        y.square().mean().backward()
        parts = [up.grad, down.grad, x.grad, y.detach()]
        return tuple(part.to_local().clone() if isinstance(part, DTensor) else part for part in parts)

    gc.disable()
    try:
        result = measured(annotated, step, warm_up=2)
    finally:
        gc.enable()
    result.kept = kept[-1]
    return result


@pytest.mark.parametrize("run", OURS)
def test_p3_dtensor_code_by_hand(run, device, mesh):
    none, got = by_hand("none", device, mesh), by_hand(run, device, mesh)
    assert_same_bits(none.numbers, got.numbers)
    assert none.kept is True
    assert got.kept is False, "`up` saves it, and replay can make it"
    assert got.collectives.counts("replay") == {}, "the reduction only feeds the output"
    assert got.counts() == none.counts()


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_p1_random_numbers_on_dtensors_are_right_or_refused(device, mesh):
    weight = distribute_tensor(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)), mesh, [Shard(0)])

    def body(x: DTensor) -> Tensor:
        return torch.exp(F.dropout(F.linear(torch.sin(x), weight), 0.5))

    def gradient(call) -> Tensor:
        torch.manual_seed(5)
        x = DTensor.from_local(data(device), mesh, [Replicate()]).requires_grad_()
        y = call(x)
        F.dropout(x.detach(), 0.5)  # the generator moves on between forward and backward
        y.sum().backward()
        assert isinstance(x.grad, DTensor)
        return x.grad.full_tensor()

    expected = gradient(body)
    with pytest.raises(RandomStateError, match=r"remat\.GeneratorHook"):
        gradient(remat.checkpoint(region_name="layers.0")(body))
    hooks = (remat.GeneratorHook(),)
    for _ in range(2):
        try:
            got = gradient(remat.checkpoint(region_name="layers.0", recompute_state_hooks=hooks)(body))
        except RematError:
            continue
        assert_same_bits(expected, got)
    saved = remat.region(F.dropout, "dropout", recompute=False)

    def with_region(x: DTensor) -> Tensor:
        return torch.exp(saved(F.linear(torch.sin(x), weight), 0.5))

    assert_same_bits(expected, gradient(remat.checkpoint(region_name="layers.0")(with_region)))


CASES = {
    "tensor parallel, two MLPs": tensor_parallel,
    "tensor parallel, DTensor code by hand": by_hand,
    "sequence parallel, gather recomputed": sequence_parallel,
}
