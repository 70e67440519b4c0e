"""Three parallelisms at once, on eight ranks: a pipeline of stages that are sharded (FSDP2) and tensor-parallel; HSDP
with tensor parallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Measured, measured
from test_mixed import assert_replay_leaves_out_one_reduction, sharded, sharded_mlps
from test_pipeline import MICROBATCHES, Pipeline, Stage, eager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_remat.testing import assert_same_bits

RANKS = 8  # read by run.py
DIMENSIONS = ("outer", "data", "tensor")


@pytest.fixture(scope="module")
def cube(device) -> DeviceMesh:
    """Two ranks by two by two."""
    return init_device_mesh(device.type, (dist.get_world_size() // 4, 2, 2), mesh_dim_names=DIMENSIONS)


class ShardedTensorParallelPipeline(Pipeline):
    """Each stage is tensor-parallel over one dimension and an FSDP2 unit over another, which has batches of its own."""

    def __init__(self, run: str, name: str, device: torch.device, cube: DeviceMesh) -> None:
        self.cube = cube
        self.seed = Pipeline.seed + cube["data"].get_local_rank()
        super().__init__(run, name, device, cube["outer"].get_group())

    def prepare(self, module: Stage) -> Stage:
        parallelize_module(module, self.cube["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharded(module, self.cube["data"])
        return module


def three(run: str, device: torch.device, cube: DeviceMesh, name: str) -> tuple[Measured, Pipeline]:
    made = ShardedTensorParallelPipeline(run, name, device, cube)
    result = measured(made.annotated, made.step)
    result.microbatches = MICROBATCHES
    return result, made


@pytest.mark.parametrize("name", ["1F1B", "interleaved zero-bubble", "ZBV"])
def test_p4_p6_a_pipeline_of_sharded_tensor_parallel_stages(name, device, cube):
    none, plain = three("none", device, cube, name)
    for run in OURS:
        got, made = three(run, device, cube, name)
        assert_same_bits(none.numbers, got.numbers, what=f"{name}, {run}")
        assert got.counts() == none.counts(), "the block's last reduction only feeds its output: not replayed"
        assert set(got.bodies.values()) == {2 * MICROBATCHES}
        assert got.regions["up"] == (1 if run == "regions" else 2) * MICROBATCHES * len(made.own)
    assert {"all_gather", "reduce_scatter", "all_reduce", "send", "recv"} == set(none.counts())
    expected = [eager(device, plain.stages_in_all, Pipeline.seed + rank)[1] for rank in range(2)]
    for index, module in plain.modules.items():
        for path, parameter in module.named_parameters():
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            first, second = (one[f"{index}.{path}"] for one in expected)
            assert first is not None
            assert second is not None
            mean = (first + second) / 2
            assert_same_bits(mean, grad.full_tensor(), atol=1e-12, what=f"{index}.{path} against one process")


def hsdp_with_tensor_parallel(run: str, device: torch.device, cube: DeviceMesh) -> Measured:
    return sharded_mlps(run, device, cube["tensor"], cube["outer", "data"], dist.get_rank() // 2)


def test_p6_hsdp_with_tensor_parallel(device, cube):
    assert_replay_leaves_out_one_reduction(*(hsdp_with_tensor_parallel(run, device, cube) for run in ("none", *OURS)))


CASES = {
    "FSDP2 with tensor parallel and 1F1B": lambda run, device, cube: three(run, device, cube, "1F1B")[0],
    "FSDP2 with tensor parallel and ZBV": lambda run, device, cube: three(run, device, cube, "ZBV")[0],
    "HSDP with tensor parallel": hsdp_with_tensor_parallel,
}
