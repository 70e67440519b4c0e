"""R24: nothing left behind, with the garbage collector off."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import gc_off, live_tensors
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.runtime.plan import registry


class Payload:
    """Something that the block closes over."""


class ModelHook:
    """A state hook that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def snapshot(self) -> bool:
        """The training flag."""
        return self.model.training

    def restore(self, state: bool) -> None:
        """Set it."""
        self.model.train(state)


def scenario(case: str) -> dict[str, weakref.ref[Any]]:
    """Run one case and return weak references to everything that must be dead afterwards."""
    refs: dict[str, weakref.ref[Any]] = {}
    payload, model = Payload(), nn.Linear(6, 6).double()
    leaf = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    given = leaf * 1

    def block(t: Tensor) -> Tensor:
        assert payload is not None
        save = remat.region(F.gelu, "save", recompute=False)(torch.sin(model(t)))
        if case == "returns its own input":
            save = remat.region(lambda u: u, "same", recompute=False)(save)
        rec = remat.region(torch.exp, "rec", recompute=True)(save)
        if not remat.is_recomputing():
            refs.update(save=weakref.ref(save), rec=weakref.ref(rec))
        if case == "exception":
            raise ValueError("planted")
        return torch.tanh(rec) * save

    hooks = (ModelHook(model),) if case == "hook" else ()
    call = remat.checkpoint(region_name="block", recompute_state_hooks=hooks)(block)
    refs.update(
        payload=weakref.ref(payload), given=weakref.ref(given), block=weakref.ref(block), model=weakref.ref(model)
    )
    if case == "exception":
        try:
            call(given)
        except ValueError as error:
            error.__traceback__ = None
    elif case == "forward only":
        call(given)
    elif case == "forward twice":
        first, second = call(given), call(given)
        second.sum().backward()
        del first
    else:
        call(given).sum().backward()
    return refs


CASES = ["backward", "forward only", "forward twice", "exception", "returns its own input", "hook"]


@pytest.mark.parametrize("case", CASES)
def test_r24_everything_dies_without_the_collector(case: str) -> None:
    with gc_off():
        for _ in range(3):
            refs = scenario(case)
            assert len(refs) == 6
            assert [name for name, ref in refs.items() if ref() is not None] == []


@pytest.mark.parametrize("case", CASES)
def test_r24_counts_stay_constant(case: str) -> None:
    counts = []
    with gc_off():
        for iteration in range(300):
            scenario(case)
            if iteration >= 3 and iteration % 27 == 3:
                counts.append(live_tensors())
    assert len(set(counts)) == 1


@pytest.mark.parametrize("case", ["backward", "hook"])
def test_r24_registry_does_not_grow(case: str) -> None:
    """Bodies that close over a fresh object each time are one body, or are forgotten with it."""
    for _ in range(3):
        scenario(case)
    length = len(registry)
    for _ in range(20):
        scenario(case)
    assert len(registry) == length


def test_r24_the_same_call_again_and_again_keeps_nothing() -> None:
    """One wrapper, many steps: the interpreter holds no more objects per call than it does for plain code."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def body(t: Tensor) -> Tensor:
        return torch.exp(remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t)))

    growths = []
    with gc_off():
        for call in (body, remat.checkpoint(region_name="block")(body)):
            blocks = []
            for iteration in range(301):
                call(x).sum().backward()
                if iteration in (50, 300):
                    blocks.append(sys.getallocatedblocks())
            growths.append(blocks[1] - blocks[0])
    assert growths[1] - growths[0] < 125  # less than one object for every two calls
