"""A replay that fails on one rank: that rank names block and region, the others say which block they were replaying."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from torch import Tensor

import torch_remat as remat


class AllReduce(torch.autograd.Function):
    """A sum over the ranks; none in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def fails_on_rank_one(rank: int) -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))

    def before(t: Tensor) -> Tensor:
        if rank == 1 and remat.is_recomputing():
            raise ValueError("bad tokens")
        return t.exp()

    def body(t: Tensor) -> Tensor:
        t = remat.region(before, "before", recompute=True)(t.tanh())
        t = remat.region(AllReduce.apply, "reduce", recompute=True)(t)
        return torch.sin(t).exp()

    x = torch.ones(3, requires_grad=True)
    for index in range(2):
        x = remat.checkpoint(region_name=f"layers.{index}")(body)(x)
    x.sum().backward()


def test_p6_a_failure_in_replay_is_named_on_every_rank():
    first, second = run_ranks(fails_on_rank_one, 2, timeout=50)
    assert second.error == "ValueError"
    assert "bad tokens" in second.message
    assert "while replaying checkpoint layers.1, after it entered region before" in second.message
    assert first.error is not None
    assert first.error != "ValueError"
    assert "while replaying checkpoint layers.1, after it entered region reduce" in first.message
    assert first.seconds < 40
