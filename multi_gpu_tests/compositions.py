"""What the test files share: one model with and without checkpointing, and one measured step of it.

A **run** is how a model is checkpointed: ``"none"``, ``"torch"`` (``torch.utils.checkpoint``, whole blocks),
``"full"`` (ours, nothing saved) or ``"regions"`` (ours, with SAVE regions). `scripts/bench_distributed.py`
makes the table of `docs/distributed.md` from the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from torch_remat.testing import CountCollectives, CountRuns

RUNS = ("none", "torch", "full", "regions")
OURS = ("full", "regions")


class Annotated:
    """Checkpoints and regions of one run; counts the runs of bodies and of region functions."""

    def __init__(self, run: str, **options: Any) -> None:
        self.run = run
        self.options = options
        self.runs = CountRuns()

    def checkpoint(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """``body`` as a block called ``name``, counted as ``"body <name>"``."""
        body = self.runs.watch(body, f"body {name}")
        if self.run == "none":
            return body
        if self.run == "torch":
            return lambda *args, **kwargs: torch_checkpoint(body, *args, use_reentrant=False, **kwargs)
        return remat.checkpoint(region_name=name, **self.options)(body)

    def region(self, function: Callable[..., Any], name: str, save: bool = True) -> Callable[..., Any]:
        """``function`` as a region, SAVE in the run ``"regions"`` if ``save``; counted as ``"region <name>"``."""
        function = self.runs.watch(function, f"region {name}")
        if self.run not in OURS:
            return function
        return remat.region(function, name, recompute=not (save and self.run == "regions"))


@dataclass
class Measured:
    """What one step did."""

    numbers: Any = None
    """Loss, outputs and gradients: whatever must be equal between runs."""
    collectives: CountCollectives = field(default_factory=CountCollectives)
    bodies: Counter[str] = field(default_factory=Counter)
    """Runs of each body in the step."""
    regions: Counter[str] = field(default_factory=Counter)
    microbatches: int = 1
    """How many forwards the step has."""
    kept: bool | None = None
    """Whether the tensor that a test looks at was alive after forward."""

    def counts(self) -> dict[str, int]:
        """Collectives by kind; without broadcasts of scalars and barriers, which belong to no block."""
        return self.collectives.counts()


def measured(annotated: Annotated, step: Callable[[], Any], warm_up: int = 1) -> Measured:
    """The second step by default: the first one sets wrappers up, and is observed by the library."""
    for _ in range(warm_up):
        step()
    annotated.runs.calls.clear()
    result = Measured()
    with result.collectives:
        result.numbers = step()
    for name, _ in annotated.runs.calls:
        kind, _, name = name.partition(" ")
        (result.bodies if kind == "body" else result.regions)[name] += 1
    return result


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's part of each gradient, copied."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            grad = getattr(grad, "to_local", lambda grad=grad: grad)().detach().clone()
        found[name] = grad
    return found
