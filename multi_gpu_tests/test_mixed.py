"""Two parallelisms at once, on four ranks: FSDP2 with tensor parallel, FSDP2 with pipelines, tensor parallel
with pipelines."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Annotated, Measured, gradients, measured
from test_ddp import hsdp
from test_pipeline import MICROBATCHES, SCHEDULES, Pipeline, Stage
from test_tensor_parallel import PARTS, TwoMlps
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_remat.testing import assert_same_bits

RANKS = 4  # read by run.py


@pytest.fixture(scope="module")
def grid(device) -> DeviceMesh:
    """Two ranks by two."""
    return init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("outer", "inner"))


def sharded(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(module, mesh=mesh)
    if isinstance(module, FSDPModule):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum


def sharded_mlps(run: str, device: torch.device, tensor: DeviceMesh, data: DeviceMesh, seed: int) -> Measured:
    """Two MLPs, tensor-parallel over one mesh and FSDP2 units over another, whose batch ``seed`` gives."""
    torch.manual_seed(0)
    annotated = Annotated(run)
    model = TwoMlps(annotated).to(device)
    plan = {f"{name}.{part}": kind() for name in ("first", "second") for part, kind in PARTS.items()}
    parallelize_module(model, tensor, plan)
    sharded(model, data)

    def step() -> tuple[Tensor, dict[str, Tensor | None]]:
        model.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        loss = model(torch.randn(2, 4, 8, generator=generator).to(device)).square().mean()
        loss.backward()
        return loss.detach(), gradients(model)

    return measured(annotated, step)


def assert_replay_leaves_out_one_reduction(none: Measured, full: Measured, regions: Measured) -> None:
    """Equal numbers; replayed whole, a block repeats all its reductions but the last, which only feeds its output."""
    for got in (full, regions):
        assert_same_bits(none.numbers, got.numbers)
        assert got.bodies == {"layers.0": 2}
    assert regions.counts() == none.counts()
    assert {**full.counts(), "all_reduce": full.counts()["all_reduce"] - 1} == none.counts()
    assert regions.collectives.counts("replay").get("all_reduce", 0) == 0


def fsdp_with_tensor_parallel(run: str, device: torch.device, grid: DeviceMesh) -> Measured:
    return sharded_mlps(run, device, grid["inner"], grid["outer"], grid["outer"].get_local_rank())


def test_p6_fsdp2_with_tensor_parallel(device, grid):
    assert_replay_leaves_out_one_reduction(*(fsdp_with_tensor_parallel(run, device, grid) for run in ("none", *OURS)))


@pytest.mark.parametrize("run", OURS)
def test_p6_hsdp_two_by_two(run, device):
    none, got = hsdp("none", device, (2, 2)), hsdp(run, device, (2, 2))
    assert_same_bits(none.numbers, got.numbers)
    assert got.counts() == none.counts() == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}


class ShardedPipeline(Pipeline):
    """Each stage is an FSDP2 unit over the inner dimension."""

    inner: DeviceMesh

    def prepare(self, module: Stage) -> Stage:
        sharded(module, self.inner)
        return module


class TensorParallelPipeline(Pipeline):
    """Each stage is tensor-parallel over the inner dimension."""

    inner: DeviceMesh

    def prepare(self, module: Stage) -> Stage:
        parallelize_module(module, self.inner, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return module


def with_pipeline(kind: type[Pipeline], run: str, device: torch.device, grid: DeviceMesh, name: str) -> Measured:
    kind.inner = grid["inner"]  # type: ignore[attr-defined]
    made = kind(run, name, device, grid["outer"].get_group())
    result = measured(made.annotated, made.step)
    result.microbatches = MICROBATCHES
    return result


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("GPipe", "looped BFS")])
@pytest.mark.parametrize("kind", [ShardedPipeline, TensorParallelPipeline])
def test_p4_p6_pipelines_with_fsdp2_and_with_tensor_parallel(kind, name, device, grid):
    none = with_pipeline(kind, "none", device, grid, name)
    for run in OURS:
        got = with_pipeline(kind, run, device, grid, name)
        assert_same_bits(none.numbers, got.numbers, what=run)
        assert got.counts() == none.counts(), "the block's last reduction only feeds its output: not replayed"
        assert set(got.bodies.values()) == {2 * MICROBATCHES}
        assert got.regions["up"] == (1 if run == "regions" else 2) * MICROBATCHES * len(got.bodies)


CASES = {
    "HSDP, two by two": lambda run, device, grid: hsdp(run, device, (2, 2)),
    "FSDP2 with tensor parallel": fsdp_with_tensor_parallel,
    "FSDP2 with 1F1B": lambda run, device, grid: with_pipeline(ShardedPipeline, run, device, grid, "1F1B"),
    "FSDP2 with ZBV": lambda run, device, grid: with_pipeline(ShardedPipeline, run, device, grid, "ZBV"),
    "tensor parallel with ZBV": lambda run, device, grid: with_pipeline(
        TensorParallelPipeline, run, device, grid, "ZBV"
    ),
}
