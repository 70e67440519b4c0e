"""Every pipeline schedule: each body runs twice per microbatch, a SAVE body once, and nothing rebuilt outlives
its use."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Annotated, Measured, measured
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat
from torch_remat.testing import assert_same_bits

DIM, MICROBATCHES, BATCH = 6, 4, 8
SCHEDULES: dict[str, tuple[Any, str]] = {
    "GPipe": (ScheduleGPipe, "one"),
    "1F1B": (Schedule1F1B, "one"),
    "looped BFS": (ScheduleLoopedBFS, "loop"),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, "loop"),
    "interleaved zero-bubble": (ScheduleInterleavedZeroBubble, "loop"),
    "ZBV": (ScheduleZBVZeroBubble, "v"),
    "DualPipeV": (ScheduleDualPipeV, "v"),
}
SPLIT = ("interleaved zero-bubble", "ZBV", "DualPipeV")


class Stage(nn.Module):
    """One block; its first projection may be a SAVE region. Remembers what its replays made."""

    def __init__(self, annotated: Annotated, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM, dtype=torch.float64)
        self.up = nn.Linear(DIM, 2 * DIM, dtype=torch.float64)
        self.down = nn.Linear(2 * DIM, DIM, dtype=torch.float64)
        self.annotated, self.index = annotated, index
        self.rebuilt: list[StorageWeakRef] = []
        self.most_alive = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.annotated.checkpoint(f"layers.{self.index}", self.body)(x)

    def body(self, x: Tensor) -> Tensor:
        h = self.annotated.region(self.up, "up")(self.norm(x))
        h = torch.tanh(h)
        if remat.is_recomputing():
            self.rebuilt.append(StorageWeakRef(h.untyped_storage()))
            self.most_alive = max(self.most_alive, self.alive())
        return x + self.down(h)

    def alive(self) -> int:
        """How many replays of this block have a rebuilt tensor alive."""
        return sum(not storage.expired() for storage in self.rebuilt)


def stages_of(rank: int, ranks: int, layout: str) -> list[int]:
    """Which stages a rank owns."""
    if layout == "one":
        return [rank]
    return [rank, rank + ranks] if layout == "loop" else [rank, 2 * ranks - 1 - rank]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def make(annotated: Annotated, index: int, device: torch.device) -> Stage:
    torch.manual_seed(index)
    return Stage(annotated, index).to(device)


class Pipeline:
    """A schedule over the stages of this rank."""

    seed = 11
    """Of the batch; with data parallelism each rank has its own."""

    def __init__(self, run: str, name: str, device: torch.device, group: Any = None) -> None:
        kind, layout = SCHEDULES[name]
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.annotated = Annotated(run)
        self.device = device
        self.own = stages_of(rank, ranks, layout)
        self.stages_in_all = ranks if layout == "one" else 2 * ranks
        self.modules = {index: self.prepare(make(self.annotated, index, device)) for index in self.own}
        stages = [
            PipelineStage(module, index, self.stages_in_all, device, group=group)
            for index, module in self.modules.items()
        ]
        multi = issubclass(kind, PipelineScheduleMulti)
        self.schedule = kind(stages if multi else stages[0], MICROBATCHES, loss_fn=loss_of)

    def prepare(self, module: Stage) -> Stage:
        """What another parallelism does to a stage."""
        return module

    def step(self) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """One step; the losses on the rank of the last stage, and the gradients of this rank's stages."""
        x, target = (tensor.to(self.device) for tensor in data(self.seed))
        for module in self.modules.values():
            module.zero_grad()
            module.rebuilt.clear()
            module.most_alive = 0
        losses: list[Tensor] = []
        last = self.stages_in_all - 1 in self.own
        first = {"args": (x,)} if 0 in self.own else {"args": ()}
        self.schedule.step(*first["args"], **({"target": target, "losses": losses} if last else {}))
        grads = {
            f"{index}.{name}": self.local(parameter.grad)
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }
        return (torch.stack(losses).detach() if last else None), grads

    @staticmethod
    def local(grad: Tensor | None) -> Tensor | None:
        """This rank's part of a gradient, copied."""
        return None if grad is None else getattr(grad, "to_local", lambda: grad)().detach().clone()


def pipeline(run: str, device: torch.device, name: str) -> tuple[Measured, Pipeline]:
    made = Pipeline(run, name, device)
    result = measured(made.annotated, made.step)
    result.microbatches = MICROBATCHES
    return result, made


def eager(device: torch.device, stages: int, seed: int = Pipeline.seed) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The same model in one process, microbatch by microbatch."""
    annotated = Annotated("none")
    model = nn.ModuleList(make(annotated, index, device) for index in range(stages))
    x, target = (tensor.to(device) for tensor in data(seed))
    losses = []
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        for stage in model:
            part = stage(part)
        losses.append(loss_of(part, wanted))
    (torch.stack(losses).sum() / MICROBATCHES).backward()
    return torch.stack(losses).detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def most_pending(made: Pipeline) -> int:
    """How many microbatches of one stage may have their input half done and their weight half not, by the schedule."""
    order = getattr(made.schedule, "pipeline_order", None)
    if order is None:
        return 0
    most, pending = 0, dict.fromkeys(made.own, 0)
    for action in order[dist.get_rank()]:
        for part in () if action is None else (getattr(action, "sub_actions", None) or (action,)):
            kind = part.computation_type.name
            pending[part.stage_index] += {"BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": -1}.get(kind, 0)
            most = max(most, *pending.values())
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_p4_one_replay_per_microbatch_and_block(name, device):
    none, plain = pipeline("none", device, name)
    reference_losses, reference = eager(device, plain.stages_in_all)
    gc.disable()
    try:
        for run in OURS:
            got, made = pipeline(run, device, name)
            assert_same_bits(none.numbers, got.numbers, what=f"{name}, {run}")
            assert got.counts() == none.counts(), "the schedule's own sends and receives"
            for index, module in made.modules.items():
                assert got.bodies[f"layers.{index}"] == 2 * MICROBATCHES
                assert len(module.rebuilt) == MICROBATCHES, "one replay for each microbatch"
                assert module.alive() == 0, "nothing rebuilt is left after the step"
                assert module.most_alive <= 1 + most_pending(made)
            saves = 1 if run == "regions" else 2
            assert got.regions["up"] == saves * MICROBATCHES * len(made.own)
    finally:
        gc.enable()
    losses, grads = none.numbers
    expected = {key: reference[key] for key in grads}
    assert_same_bits(expected, grads, atol=1e-12, what="against one process")
    if losses is not None:
        assert_same_bits(reference_losses, losses, atol=1e-12)


def test_p4_the_bound_on_rebuilt_tensors_is_reached_by_split_backwards_only(device):
    """So that the bound above says something: schedules that split keep several, the others exactly one."""
    for name in ("1F1B", "GPipe", "interleaved 1F1B"):
        _, made = pipeline("full", device, name)
        assert most_pending(made) == 0
        assert [module.most_alive for module in made.modules.values()] == [1] * len(made.own)
    _, made = pipeline("full", device, "ZBV")
    assert most_pending(made) >= 1


class Empty(nn.Module):
    """A stage whose list of blocks is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * 1


@pytest.mark.parametrize("run", OURS)
def test_p4_a_stage_without_blocks(run, device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, target = (tensor.to(device) for tensor in data(Pipeline.seed))

    def step(run: str) -> list[Tensor | None]:
        annotated = Annotated(run)
        module = make(annotated, 0, device) if rank == 0 else Empty().to(device)
        schedule = Schedule1F1B(PipelineStage(module, rank, ranks, device), MICROBATCHES, loss_fn=loss_of)
        for _ in range(2):
            module.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target if rank == ranks - 1 else None)
        return [parameter.grad for parameter in module.parameters()]

    assert_same_bits(step("none"), step(run))


CASES = {name: lambda run, device, mesh, name=name: pipeline(run, device, name)[0] for name in SCHEDULES}
