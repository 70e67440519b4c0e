"""Random programs of views, writes in place and reads over few memories: equal bits, or an error of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import compare_or_refused
from helpers.engine import EAGER
from helpers.events import under
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_remat.errors import ModifiedError

WEIGHT = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.t() if t.dim() == 2 else t,
    lambda t: t[1:],
    lambda t: t[:2],
    lambda t: t.detach(),
    lambda t: t[..., ::2],
    lambda t: t.view_as(t),
]
WRITES: list[Callable[[Tensor], Any]] = [
    lambda t: t.mul_(1.5),
    lambda t: t.detach().add_(0.5),
    lambda t: t.data.mul_(0.5),  # moves no version counter
    lambda t: t[:1].zero_(),
    lambda t: torch.mul(t.detach(), 2, out=t.detach()),
    lambda t: t.clamp_(-0.5, 0.5),
]
READS: list[Callable[[Tensor], Tensor]] = [
    lambda t: torch.exp(torch.cos(t * 1)).sum(),
    lambda t: torch.sigmoid(t).sum() * float(t.detach().sum()),
    lambda t: (t * float(t.detach().numpy().max())).sum(),
]
SEVERAL: list[Callable[[Tensor], tuple[Tensor, ...]]] = [
    lambda z: (z, z.t()),
    lambda z: (z[:3], z[2:]),
    lambda z: (z, z.detach(), z[1:]),
]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program: what it does, to which tensor, in which way, and the policy of the region around it."""

    kind: str
    which: int
    how: int
    policy: str


STEPS = st.builds(
    Step,
    st.sampled_from(["make", "several", "view", "view", "captured view", "write", "write", "write", "read", "read"]),
    st.integers(0, 7),
    st.integers(0, 5),
    st.sampled_from("-RS"),
)


def body_of(program: list[Step]) -> Callable[[Tensor], Tensor]:
    """The body that runs ``program`` and reads every tensor at its end."""

    def body(x: Tensor) -> Tensor:
        tensors: list[Tensor] = []
        total = torch.exp(x).sum()
        for number, step in enumerate(program):
            total = total + _run(step, number, x, tensors)
        for tensor in tensors:
            total = total + READS[0](tensor)
        return total

    return body


def _run(step: Step, number: int, x: Tensor, tensors: list[Tensor]) -> Any:
    def region(function: Callable[..., Any]) -> Callable[..., Any]:
        return under(step.policy, function, f"{step.kind} {number}")

    view = VIEWS[step.how]
    if step.kind == "several":
        tensors += region(lambda x: SEVERAL[step.how % len(SEVERAL)](torch.cos(x @ WEIGHT)))(x)
    elif step.kind == "make" or not tensors:
        tensors.append(region(lambda x: torch.sin(x @ WEIGHT))(x))
    else:
        tensor = tensors[step.which % len(tensors)]
        if step.kind == "view":
            tensors.append(region(view)(tensor))
        elif step.kind == "captured view":
            tensors.append(region(lambda: view(tensor))())
        elif step.kind == "write":
            region(WRITES[step.how])(tensor)
        else:
            return region(READS[step.how % len(READS)])(tensor)
    return 0


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("part", [0, 1])
def test_p1_programs_over_shared_memory(part: int, hooks: bool) -> None:
    """A change shows in every tensor that lies there, in replay as in forward, in the first call and in later ones.

    Eager accepts what moves no version counter, and so do we: to equal bits, or refused.
    """
    options = {"saved_tensors_hooks": (torch.clone, lambda tensor: tensor)} if hooks else {}

    @settings(
        max_examples=40 if hooks else 100,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(STEPS, min_size=3 + 3 * part, max_size=6 + 4 * part))
    def check(program: list[Step]) -> None:
        x = torch.linspace(-1, 1.5, 36, dtype=torch.float64).reshape(6, 6).requires_grad_()
        plain, runs = compare_or_refused(body_of(program), (x,), options=options, engine=EAGER)
        for run in runs:
            assert plain.error is not None or run.error is None or isinstance(run.error, ModifiedError)

    check()
