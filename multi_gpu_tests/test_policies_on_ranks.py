"""Ranks with different policies under torchrun: every rank raises in the first step, and nothing hangs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from test_context_expert_parallel import AllGather
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import RankPolicyError
from torch_remat.testing import CountCollectives

ROWS, DIM = 4, 8


def blocks(save: list[bool], prefix: str, x: Tensor) -> Tensor:
    """Blocks with a collective in a region; ``save`` has the policy of each."""
    for index, one in enumerate(save):

        def body(t: Tensor, one: bool = one) -> Tensor:
            gathered = remat.region(AllGather.apply, "gather", recompute=not one)(torch.tanh(t))
            return torch.sin(gathered)[:ROWS] + t

        x = remat.checkpoint(region_name=f"{prefix}.{index}")(body)(x)
    return x


def raised_by(loss: Tensor) -> RankPolicyError:
    with pytest.raises(RankPolicyError) as caught:
        loss.backward()
    return caught.value


def start(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, ROWS * DIM, device=device).reshape(ROWS, DIM).requires_grad_()


def test_p6_a_mismatch_raises_everywhere_and_the_next_step_works(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = ranks - 1
    began = time.monotonic()
    with CountCollectives() as collectives:
        loss = blocks([True, rank != last], "mismatch", start(device)).sum()
        error = raised_by(loss)
    assert time.monotonic() - began < 30
    others = "rank 0" if ranks == 2 else f"ranks 0-{last - 1}"
    assert f"region mismatch.1::gather: SAVE on {others}, RECOMPUTE on rank {last} " in str(error)
    assert collectives.counts() == {"all_gather": 2}, "those of forward: none of the check, and no replay was begun"
    x = start(device)
    blocks([True, True], "mismatch", x).sum().backward()
    assert x.grad is not None
    assert x.grad.count_nonzero()


def test_p6_equal_policies_add_no_collective(device):
    with CountCollectives() as collectives:
        blocks([True, False], "equal", start(device)).sum().backward()
    assert collectives.counts() == {"all_gather": 3, "reduce_scatter": 2}
