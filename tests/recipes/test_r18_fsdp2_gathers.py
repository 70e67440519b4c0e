"""R18: all-gathers and reduce-scatters of FSDP2 on two ranks are those without checkpointing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks, values
from torch.distributed.device_mesh import init_device_mesh

from torch_remat.testing import assert_same_bits

sys.path.append(str(Path(__file__).resolve().parents[2] / "multi_gpu_tests"))


def gathers(rank: int, nested: bool) -> dict[str, dict[str, int]]:
    """Counts for each setting; the numbers are compared here, and every unit is sharded after each backward."""
    from test_fsdp2_units import fsdp2

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for reshard in (True, False):
        plain = fsdp2("none", torch.device("cpu"), mesh, nested=nested, reshard=reshard)
        for inside in (True, False):
            got = fsdp2("regions", torch.device("cpu"), mesh, nested=nested, reshard=reshard, inside=inside)
            assert_same_bits(plain.numbers, got.numbers)
            assert got.counts() == plain.counts()
            found[f"reshard {reshard} inside {inside}"] = got.counts()
    return found


@pytest.mark.parametrize(("nested", "gathered"), [(False, (6, 3)), (True, (12, 6))])
def test_r18_gathers_are_those_without_checkpointing(nested, gathered):
    for found in values(run_ranks(gathers, 2, nested)):
        for setting, counts in found.items():
            expected = gathered[0] if setting.startswith("reshard True") else gathered[1]
            assert counts == {"all_gather": expected, "reduce_scatter": gathered[1]}, setting
