"""Backward split into input and weight halves, as pipeline schedules do it, broken off half-way: the other microbatches
end as if nothing had happened, and what was rebuilt goes with the microbatch that is given up."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat
from torch_remat.testing import CountRuns, assert_same_bits

DIM, MICROBATCHES = 6, 3


class Stage:
    """Two blocks with a SAVE region each. The replay of the first block raises in the microbatches of ``broken``."""

    def __init__(self, checkpointed: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = [
            torch.randn(DIM, DIM, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(4)
        ]
        self.checkpointed = checkpointed
        self.runs = CountRuns()
        self.broken: set[int] = set()
        self.rebuilt: dict[int, list[StorageWeakRef]] = {}
        self.inputs: list[Tensor] = []
        self.losses: list[Tensor | None] = []

    def block(self, index: int, microbatch: int, x: Tensor) -> Tensor:
        first, second = self.weights[2 * index : 2 * index + 2]

        def body(t: Tensor) -> Tensor:
            h = torch.tanh(F.linear(t.sin(), first))
            if remat.is_recomputing():
                self.rebuilt.setdefault(microbatch, []).append(StorageWeakRef(h.untyped_storage()))
                if index == 0 and microbatch in self.broken:
                    raise ValueError("bad tokens")
            return t + F.gelu(remat.region(F.linear, "second", recompute=False)(h, second).exp())

        body = self.runs.watch(body, f"layers.{index}")
        return remat.checkpoint(region_name=f"layers.{index}")(body)(x) if self.checkpointed else body(x)

    def forward(self) -> None:
        generator = torch.Generator().manual_seed(4)
        for microbatch in range(MICROBATCHES):
            x = torch.randn(2, DIM, generator=generator, dtype=torch.float64).requires_grad_()
            self.inputs.append(x)
            self.losses.append(self.block(1, microbatch, self.block(0, microbatch, x)).square().mean())

    def input_half(self, microbatch: int) -> Any:
        return stage_backward_input([self.losses[microbatch]], None, [self.inputs[microbatch]], iter(self.weights))[1]

    def weight_half(self, groups: Any) -> None:
        stage_backward_weight(iter(self.weights), groups)

    def give_up(self, microbatch: int) -> None:
        """What a trainer does that catches the error: it lets go of the microbatch."""
        self.losses[microbatch] = None

    def alive(self, microbatch: int) -> bool:
        return any(not storage.expired() for storage in self.rebuilt.get(microbatch, ()))

    def gradients(self) -> list[Tensor | None]:
        return [weight.grad for weight in self.weights]


def failure_of(stage: Stage, microbatch: int) -> str:
    """What the input half of a broken microbatch raises: torch's own report, caused by the body's error."""
    with pytest.raises(RuntimeError, match="Failed to run stage backward input") as caught:
        stage.input_half(microbatch)
    cause = caught.value.__cause__
    assert type(cause) is ValueError
    said = " ".join([str(cause), *cause.__notes__])
    del caught, cause
    gc.collect()  # a traceback and the frames that have caught it hold each other
    return said


def expected(*microbatches: int) -> list[Tensor | None]:
    plain = Stage(checkpointed=False)
    plain.forward()
    for groups in [plain.input_half(microbatch) for microbatch in microbatches]:
        plain.weight_half(groups)
    return plain.gradients()


@pytest.fixture
def stage():
    gc.collect()
    gc.disable()
    try:
        made = Stage(checkpointed=True)
        made.forward()
        yield made
    finally:
        gc.enable()


def test_p7_a_replay_that_fails_in_one_microbatch_leaves_the_others_alone(stage):
    stage.broken = {1}
    pending = [stage.input_half(0)]
    assert failure_of(stage, 1) == "bad tokens torch_remat: raised while replaying checkpoint layers.0, at its start."
    stage.give_up(1)
    assert not stage.alive(1), "what the microbatch had rebuilt went with it"
    pending.append(stage.input_half(2))
    for groups in pending:
        stage.weight_half(groups)
    del pending, groups
    assert_same_bits(expected(0, 2), stage.gradients())
    assert stage.runs.count("layers.0", "replay") == 3
    assert not any(map(stage.alive, range(MICROBATCHES)))


def test_p7_the_input_half_that_failed_can_be_run_again(stage):
    """As without checkpointing: the half keeps its graph."""
    stage.broken = {1}
    failure_of(stage, 1)
    stage.broken = set()
    for groups in [stage.input_half(microbatch) for microbatch in range(MICROBATCHES)]:
        stage.weight_half(groups)
    assert_same_bits(expected(0, 1, 2), stage.gradients())
    del groups
    assert not any(map(stage.alive, range(MICROBATCHES)))


def test_p7_a_weight_half_that_never_runs_frees_what_was_kept_for_it(stage):
    pending = {microbatch: stage.input_half(microbatch) for microbatch in range(MICROBATCHES)}
    assert all(map(stage.alive, range(MICROBATCHES)))
    del pending[1]
    stage.give_up(1)
    assert [stage.alive(microbatch) for microbatch in range(MICROBATCHES)] == [True, False, True]
    for microbatch in (0, 2):
        stage.weight_half(pending.pop(microbatch))
        assert not stage.alive(microbatch)
    assert_same_bits(expected(0, 2), stage.gradients())
    assert stage.runs.count("layers.0") == stage.runs.count("layers.1") == 2 * MICROBATCHES
