"""Short bodies that touch every mechanism of the runtime; run in processes where private bindings are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from helpers.compare import compare, compare_or_refused, grad_weight, raised
from helpers.hooks import generator_hooks
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import torch_remat as remat

WEIGHT = torch.nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def chained(t: Tensor) -> Tensor:
    """Every policy, a view, a bare consumer, a trailing residual."""
    a = save(F.linear, "a")(torch.sin(t), WEIGHT)
    b = remat.region(torch.exp, "b", recompute=True)(a.t()[1:] * 0.1)
    c = save(lambda u: u * u, "c")(b)
    return t + save(F.gelu, "d")(torch.tanh(c)).sum()


def unread(t: Tensor) -> Tensor:
    """A placeholder goes through views in replay."""
    made = save(lambda u: (u * 2, u.argmax(-1)), "made")(t)
    view = made[0].t()[1:].detach()
    return torch.exp(torch.sin(t)) + view.sum()


def conjugated(t: Tensor) -> Tensor:
    """Conjugate and negative views."""
    hidden = torch.sin(torch.complex(t, t * 2))
    return save(lambda u: u.conj() * u, "conj")(hidden).exp().imag


def in_place(t: Tensor) -> Tensor:
    """In place on a SAVE output."""
    hidden = save(lambda u: u * 3, "made")(torch.sin(t))
    hidden.mul_(2)
    return torch.exp(hidden)


def dropped(t: Tensor) -> Tensor:
    """Random numbers."""
    return torch.exp(F.dropout(save(lambda u: F.dropout(u, 0.5), "drop")(torch.sin(t)), 0.3))


def twice(outputs: Any, inputs: list[Tensor]) -> Any:
    """A retained graph, then gradients of chosen inputs."""
    outputs.sum().backward(retain_graph=True)
    return torch.autograd.grad(outputs.sum(), inputs)


def double(outputs: Any, inputs: list[Tensor]) -> Any:
    """Second order."""
    (first,) = torch.autograd.grad(outputs, inputs, grad_weight(outputs), create_graph=True)
    (first * first).sum().backward()


def split(outputs: Any, inputs: list[Tensor]) -> Any:
    """The halves of a zero-bubble schedule."""
    _, groups = stage_backward_input([outputs.sum()], None, inputs, iter([WEIGHT]))
    stage_backward_weight(iter([WEIGHT]), groups)


def refused(t: Tensor) -> Tensor:
    """Random numbers without a hook."""
    return torch.exp(F.dropout(torch.sin(t), 0.5))


def changed(t: Tensor) -> Tensor:
    """A save that is changed in place: eager refuses."""
    hidden = torch.sin(t) * 1
    result = save(torch.sin, "sin")(hidden)
    hidden.mul_(2)
    return torch.exp(result) * hidden


def run_all() -> None:
    """Compare every body with plain code."""
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
    for body in (chained, unread, conjugated, in_place):
        compare(body, [x], params=[WEIGHT])
    for backward in (twice, double, split):
        compare(chained, [x], params=[WEIGHT], backward=backward)
    compare(dropped, [x], options={"recompute_state_hooks": generator_hooks()})
    compare(chained, [x], options={"saved_tensors_hooks": (lambda t: t.clone(), lambda t: t)}, params=[WEIGHT])
    _, runs = compare_or_refused(changed, [x])
    assert all(run.error is not None for run in runs)
    for _ in range(2):
        error = raised(lambda: remat.checkpoint(region_name="block")(refused)(x).sum().backward())
        assert "recompute_state_hooks" in str(error)
