"""R08: a context variable that only forward sees; backward after reset, in another thread, single-threaded."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from helpers.hooks import ContextVariable
from torch import Tensor

import torch_remat as remat

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


def block(x: Tensor) -> Tensor:
    """``sin(scale * x)``, the scale read once by a SAVE region and once by a RECOMPUTE region."""
    scaled = remat.region(lambda t: t * SCALE.get(), "scale", recompute=False)(x)
    return remat.region(lambda t, u: torch.sin(t + u * (SCALE.get() - 3.0)), "sin", recompute=True)(scaled, x)


@pytest.mark.parametrize("way", ["after reset", "new thread", "no multithreading"])
def test_r08_context_variable(way: str) -> None:
    for _ in range(3):
        x = torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()
        token = SCALE.set(3.0)
        output = remat.checkpoint(region_name="block", recompute_state_hooks=(ContextVariable(SCALE),))(block)(x)
        SCALE.reset(token)
        seen: list[float] = []

        def work(output: Tensor = output, seen: list[float] = seen) -> None:
            SCALE.set(7.0) if way == "new thread" else None
            output.sum().backward()
            seen.append(SCALE.get())

        if way == "new thread":
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(10)
        elif way == "no multithreading":
            with torch.autograd.set_multithreading_enabled(False):
                work()
        else:
            work()
        assert seen == [7.0 if way == "new thread" else 1.0]
        assert SCALE.get() == 1.0
        assert x.grad is not None
        assert torch.equal(x.grad, (3 * torch.cos(3 * x)).detach())
