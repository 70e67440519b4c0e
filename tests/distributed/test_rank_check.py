"""Ranks with different policies all raise, in the first step and soon; ranks with different blocks do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import Outcome, run_ranks, values
from torch import Tensor

import torch_remat as remat
from torch_remat.diagnostics import rank_check
from torch_remat.errors import RankPolicyError
from torch_remat.runtime import events
from torch_remat.testing import CountCollectives

PROJECT = Path(__file__).resolve().parents[2]


class AllReduce(torch.autograd.Function):
    """A collective in forward and one in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def block(save: bool, name: str = "reduce", collective: bool = True):
    def body(x: Tensor) -> Tensor:
        h = remat.region(AllReduce.apply if collective else torch.sin, name, recompute=not save)(torch.tanh(x))
        return torch.exp(h.sin() * 0.1)

    return body


def step(names_and_policies, collective: bool = True) -> Tensor:
    """Forward through the blocks, then backward; the gradient."""
    leaf = torch.linspace(-1, 1, 8).requires_grad_()
    h = leaf
    for name, save in names_and_policies:
        h = remat.checkpoint(region_name=name)(block(save, collective=collective))(h)
    h.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def mismatch_everywhere(outcomes: list[Outcome], *patterns: str, within: float = 30.0) -> None:
    """Every rank has raised our error, in time, and the text says what is in ``patterns``."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == "RankPolicyError", f"rank {rank}: {outcome}"
        assert outcome.seconds < within
        for pattern in patterns:
            assert re.search(pattern, outcome.message), f"rank {rank}: {outcome.message}"


# --- A mismatch


def differ(rank: int, late: float, late_rank: int) -> Tensor:
    if rank == late_rank:
        time.sleep(late)
    return step([("layers.0", True), ("layers.1", rank != 1)])


@pytest.mark.parametrize(("late", "late_rank"), [(0.0, 0), (3.0, 0), (3.0, 1)])
def test_p6_every_rank_raises_and_names_region_and_ranks(late, late_rank):
    outcomes = run_ranks(differ, 2, late, late_rank)
    mismatch_everywhere(
        outcomes, r"region layers\.1::reduce: SAVE on rank 0, RECOMPUTE on rank 1 ", "To fix: ", within=15 + late
    )


def differ_of_four(rank: int) -> Tensor:
    time.sleep(0.3 * rank)
    return step([("layers.0", rank != 2)])


def test_p6_the_error_names_all_ranks_of_both_sides():
    outcomes = run_ranks(differ_of_four, 4)
    mismatch_everywhere(outcomes, r"layers\.0::reduce: SAVE on ranks 0-1, 3, RECOMPUTE on rank 2 \(this is rank \d\)")


def differ_in_the_third(rank: int, blocks_of_rank_one: int) -> Tensor:
    own = blocks_of_rank_one if rank else 4
    return step([(f"layers.{index}", index != 2 or rank == 0) for index in range(own)], blocks_of_rank_one == 4)


@pytest.mark.parametrize("blocks_of_rank_one", [4, 3])
def test_p6_one_block_of_several_differs(blocks_of_rank_one):
    """Also where the ranks have different numbers of blocks: what both have is compared."""
    outcomes = run_ranks(differ_in_the_third, 2, blocks_of_rank_one)
    mismatch_everywhere(outcomes, "region layers.2::reduce: SAVE on rank 0, RECOMPUTE on rank 1 ", within=15)


def after_an_evaluation(rank: int) -> Tensor:
    """Rank 1 evaluates first, without a graph: no block of that counts."""
    policies = [("layers.0", True), ("layers.1", rank == 0)]
    if rank:
        with torch.no_grad():
            remat.checkpoint(region_name="layers.1")(block(True, collective=False))(torch.ones(3))
    return step(policies)


def test_p6_a_rank_that_evaluates_first():
    mismatch_everywhere(run_ranks(after_an_evaluation, 2), "layers.1::reduce: SAVE on rank 0, RECOMPUTE on rank 1")


def a_block_that_comes_later(rank: int) -> Tensor:
    for _ in range(2):
        step([("layers.0", True)])
    return step([("layers.0", True), ("extra", rank == 0)])


def test_p6_a_block_that_first_runs_in_a_later_step():
    mismatch_everywhere(run_ranks(a_block_that_comes_later, 2), "extra::reduce: SAVE on rank 0, RECOMPUTE on rank 1")


def backward_elsewhere(rank: int, way: str) -> None:
    x = torch.ones(4, requires_grad=True)
    y = remat.checkpoint(region_name="layers.0")(block(rank == 0))(x).sum()
    if way == "without multithreading":
        with torch.autograd.set_multithreading_enabled(False):
            y.backward()
        return
    failed: list[BaseException] = []

    def backward() -> None:
        try:
            y.backward()
        except RankPolicyError as error:
            failed.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    raise failed[0]


@pytest.mark.parametrize("way", ["in a thread", "without multithreading"])
def test_p6_backward_in_other_threads(way):
    outcomes = run_ranks(backward_elsewhere, 2, way)
    mismatch_everywhere(outcomes, "layers.0::reduce: SAVE on rank 0, RECOMPUTE on rank 1")


def without_collectives(rank: int) -> Tensor:
    """Nothing ties the ranks together in forward: rank 1 comes when rank 0 is in backward."""
    time.sleep(2.0 * rank)
    x = torch.ones(4, requires_grad=True)
    body = remat.region(torch.sin, "act", recompute=rank == 1)
    remat.checkpoint(region_name="layers.0")(lambda t: torch.exp(body(t.tanh())))(x).sum().backward()
    return x.grad


def test_p6_a_rank_waits_in_backward_for_one_that_is_still_in_forward():
    mismatch_everywhere(run_ranks(without_collectives, 2), "layers.0::act: SAVE on rank 0, RECOMPUTE on rank 1")


def behind(rank: int) -> Tensor:
    """Rank 1 is longer than the grace in its second block, which rank 0 has left."""
    x = torch.ones(4, requires_grad=True)
    h = remat.checkpoint(region_name="layers.0")(lambda t: torch.exp(t.sin()))(x)

    def second(t: Tensor) -> Tensor:
        time.sleep(7.0 * rank)
        return remat.region(torch.tanh, "act", recompute=rank == 1)(t.exp()).cos().exp()

    remat.checkpoint(region_name="layers.1")(second)(h).sum().backward()
    return x.grad


@pytest.mark.slow
def test_p6_a_rank_on_the_same_track_is_waited_for():
    mismatch_everywhere(run_ranks(behind, 2), "layers.1::act: SAVE on rank 0, RECOMPUTE on rank 1")


def nothing_to_replay(rank: int) -> Tensor:
    x = torch.ones(4, requires_grad=True)
    body = remat.region(lambda t: AllReduce.apply(t.exp()), "all", recompute=rank == 1)
    remat.checkpoint(region_name="layers.0")(lambda t: body(t))(x).sum().backward()
    return x.grad


def test_p6_a_rank_with_nothing_to_replay_raises_too():
    mismatch_everywhere(run_ranks(nothing_to_replay, 2), "layers.0::all: SAVE on rank 0, RECOMPUTE on rank 1")


def again_and_anew(rank: int) -> list[str]:
    """The failed backward fails again; with equal policies the next step works; then another mismatch is found."""
    said = []
    x = torch.ones(4, requires_grad=True)
    y = remat.checkpoint(region_name="layers.0")(block(rank == 0))(x).sum()
    for _ in range(2):
        try:
            y.backward()
        except RankPolicyError as error:
            said.append(str(error))
    step([("layers.0", True)])
    step([("layers.0", True)])
    said.append("no error")
    try:
        step([("layers.7", rank == 1)])
    except RankPolicyError as error:
        said.append(str(error))
    return said


def test_p7_after_a_mismatch_the_check_begins_anew():
    for said in values(run_ranks(again_and_anew, 2)):
        assert len(said) == 4
        assert said[0] == said[1]
        assert "layers.0::reduce: SAVE on rank 0, RECOMPUTE on rank 1" in said[0]
        assert said[2] == "no error"
        assert "layers.7::reduce: SAVE on rank 1, RECOMPUTE on rank 0" in said[3]


# --- No mismatch


def listening() -> str:
    """Which events have listeners, besides the observing of bodies."""
    names = ("forward_ended", "backward_reached", "replay_started")
    return " ".join(name for name in names if getattr(events, name).listeners)


def same(rank: int) -> tuple[list[int], list[str], float]:
    rank_check.IDLE_FORWARDS = 8
    counts, listens = [], []
    began = time.monotonic()
    for _ in range(4):
        with CountCollectives() as collectives:
            step([(f"layers.{index}", index % 2 == 0) for index in range(4)])
        counts.append(collectives.count())
        listens.append(listening())
    return counts, listens, time.monotonic() - began


@pytest.mark.parametrize("switch", ["1", "0"])
def test_p6_equal_policies_cost_no_collective_and_nothing_after_the_first_step(switch):
    for counts, listens, seconds in values(run_ranks(same, 2, environment={"TORCH_REMAT_RANK_CHECK": switch})):
        assert counts == [4 + 4 + 2] * 4, "four in forward, four in backward, two recomputed: none of the check"
        assert listens == (["forward_ended"] * 3 + [""] if switch == "1" else [""] * 4)
        assert seconds < 4.0


def pipeline(rank: int, case: str) -> float:
    """Stages that own different blocks, sent by hand; the last stage is the first to reach backward."""
    x = torch.linspace(-1, 1, 8).requires_grad_()
    if rank == 1:
        received = torch.empty(8)
        dist.recv(received, 0)
        x = received.requires_grad_()
    began = time.monotonic()
    names = {"unique": f"layers.{rank}", "shared": "block", "empty": "" if rank else "layers.0"}
    h = x * 1
    if names[case]:
        function = torch.sin if rank else torch.tanh
        region = remat.region(function, f"act{rank}", recompute=rank == 1)
        h = remat.checkpoint(region_name=names[case])(lambda t: torch.exp(region(t.cos())))(h)
    if rank == 0:
        dist.send(h.detach(), 1)
        grad = torch.empty(8)
        dist.recv(grad, 1)
        h.backward(grad)
    else:
        h.sum().backward()
        assert x.grad is not None
        dist.send(x.grad, 0)
    return time.monotonic() - began


@pytest.mark.parametrize("case", ["unique", "shared"])
def test_p6_pipeline_ranks_with_other_blocks_neither_raise_nor_wait(case):
    assert max(values(run_ranks(pipeline, 2, case))) < 4.0


def test_p6_a_rank_without_any_block_is_waited_for_a_short_while_only():
    assert max(values(run_ranks(pipeline, 2, "empty"))) < rank_check.GRACE_SECONDS + 1.5


def experts(rank: int) -> float:
    """Expert parallel: each rank has regions of its own; what both have is equal."""
    x = torch.ones(4, requires_grad=True)

    def body(t: Tensor) -> Tensor:
        t = remat.region(AllReduce.apply, "dispatch", recompute=False)(t.sin())
        for index in range(2 * rank, 2 * rank + 2):
            t = remat.region(torch.tanh, f"experts.{index}", recompute=index == 2)(t)
        return torch.exp(t)

    began = time.monotonic()
    remat.checkpoint(region_name="moe")(body)(x).sum().backward()
    return time.monotonic() - began


def test_p6_regions_that_one_rank_has_are_no_mismatch():
    assert max(values(run_ranks(experts, 2))) < 4.0


def shared_expert_differs(rank: int) -> float:
    """Rank 0 has neither of the regions that ranks 1 and 2 disagree about."""
    x = torch.ones(4, requires_grad=True)

    def body(t: Tensor) -> Tensor:
        t = remat.region(AllReduce.apply, "dispatch", recompute=False)(t.sin())
        if rank:
            t = remat.region(torch.tanh, "experts.9", recompute=rank == 2)(t)
        return torch.exp(t)

    remat.checkpoint(region_name="moe")(body)(x).sum().backward()
    return 0.0


def test_p6_regions_that_the_first_rank_lacks_are_compared_between_the_others():
    mismatch_everywhere(run_ranks(shared_expert_differs, 3), "moe::experts.9: SAVE on rank 1, RECOMPUTE on rank 2")


def names_that_never_repeat(rank: int) -> list[str]:
    rank_check.MOST_NAMES, rank_check.IDLE_FORWARDS = 3, 4
    for index in range(12):
        step([(f"step{index}", True)])
    assert rank_check._window is not None
    return [*rank_check._window.decided, listening()]


def test_p10_names_that_never_repeat_do_not_fill_the_store():
    for names in values(run_ranks(names_that_never_repeat, 2)):
        assert names == ["step0", "step1", "step2", ""]


def switched_off(rank: int) -> float:
    body = remat.region(torch.sin, "act", recompute=rank == 1)
    x = torch.ones(4, requires_grad=True)
    remat.checkpoint(region_name="layers.0")(lambda t: torch.exp(body(t.tanh())))(x).sum().backward()
    return 0.0


def test_the_environment_switches_it_off():
    values(run_ranks(switched_off, 2, environment={"TORCH_REMAT_RANK_CHECK": "0"}))


def broken_store(rank: int) -> str:
    """A store that fails is reported once, and training goes on."""
    import logging

    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("torch_remat").addHandler(Handler())

    def fail() -> None:
        raise RuntimeError("connection lost")

    rank_check._store = fail
    step([("layers.0", True), ("layers.1", True)])
    step([("layers.0", True), ("layers.1", True)])
    assert not listening()
    return "\n".join(lines)


def test_p7_a_store_that_fails_does_not_stop_training():
    for text in values(run_ranks(broken_store, 2)):
        assert text.count("connection lost") == 1
        assert "stops comparing" in text


def test_a_process_without_process_group_pays_nothing():
    code = (
        "import torch, torch_remat as remat\n"
        "from torch_remat.runtime import events\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "remat.checkpoint(region_name='block')(lambda t: t.sin().exp())(x).sum().backward()\n"
        "print(len(events.body_learned.listeners), events.forward_ended.listeners, events.backward_reached.listeners)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout == "1 () ()\n", done.stderr
