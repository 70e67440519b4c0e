"""R17: real pipeline schedules on two ranks: two runs of a body per microbatch, one of a SAVE body, eager's numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks, values

from torch_remat.testing import assert_same_bits

sys.path.append(str(Path(__file__).resolve().parents[2] / "multi_gpu_tests"))


def schedules(rank: int, names: tuple[str, ...]) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Runs of bodies and of SAVE bodies in the second step; the numbers are compared here."""
    from test_pipeline import eager, pipeline

    found = {}
    for name in names:
        got, made = pipeline("regions", torch.device("cpu"), name)
        losses, gradients = got.numbers
        expected_losses, expected = eager(torch.device("cpu"), made.stages_in_all)
        assert_same_bits({key: expected[key] for key in gradients}, gradients, atol=1e-12)
        if losses is not None:
            assert_same_bits(expected_losses, losses, atol=1e-12)
        found[name] = (dict(got.bodies), dict(got.regions))
    return found


@pytest.mark.parametrize("names", [("1F1B", "interleaved 1F1B"), ("interleaved zero-bubble", "ZBV")])
def test_r17_bodies_run_twice_and_save_bodies_once_per_microbatch(names):
    microbatches = 4
    for rank, found in enumerate(values(run_ranks(schedules, 2, names))):
        for name in names:
            bodies, regions = found[name]
            stages = {"1F1B": [rank], "ZBV": [rank, 3 - rank]}.get(name, [rank, rank + 2])
            assert bodies == {f"layers.{stage}": 2 * microbatches for stage in stages}, name
            assert regions == {"up": microbatches * len(stages)}, name
