"""R20: all-reduces of two column- and row-parallel MLPs on two ranks, and a recomputed gather that is not kept."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from helpers.ranks import run_ranks, values
from torch.distributed.device_mesh import init_device_mesh

from torch_remat.testing import assert_same_bits

sys.path.append(str(Path(__file__).resolve().parents[2] / "multi_gpu_tests"))


def all_reduces(rank: int) -> dict[str, dict[str, int]]:
    from test_tensor_parallel import tensor_parallel

    mesh = init_device_mesh("cpu", (2,))
    runs = {run: tensor_parallel(run, torch.device("cpu"), mesh) for run in ("none", "full", "regions")}
    for got in runs.values():
        assert_same_bits(runs["none"].numbers, got.numbers)
    return {run: got.counts() for run, got in runs.items()}


def test_r20_saved_row_projections_reduce_as_often_as_without_checkpointing():
    """With nothing saved one of two reductions is made again: the second feeds the block's output only."""
    for counts in values(run_ranks(all_reduces, 2)):
        assert counts == {"none": {"all_reduce": 4}, "full": {"all_reduce": 5}, "regions": {"all_reduce": 4}}


def gathers(rank: int) -> dict[str, tuple[dict[str, int], bool | None]]:
    from test_tensor_parallel import sequence_parallel

    mesh = init_device_mesh("cpu", (2,))
    runs = {run: sequence_parallel(run, torch.device("cpu"), mesh) for run in ("none", "regions")}
    assert_same_bits(runs["none"].numbers, runs["regions"].numbers)
    return {run: (got.counts(), got.kept) for run, got in runs.items()}


def test_r20_a_recomputed_gather_costs_one_gather_and_is_not_kept():
    for found in values(run_ranks(gathers, 2)):
        assert found["none"] == ({"all_gather": 2, "reduce_scatter": 2}, True)
        assert found["regions"] == ({"all_gather": 3, "reduce_scatter": 2}, False)
