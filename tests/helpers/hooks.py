"""State hooks that tests pass to ``recompute_state_hooks``."""

from __future__ import annotations

import contextvars
from typing import Any

import torch

import torch_remat as remat


class DefaultGenerator:
    """The hook a user of 0.2 would write: the CPU generator by its full state."""

    def snapshot(self) -> torch.Tensor:
        """The generator's state."""
        return torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        """Put the state back."""
        torch.set_rng_state(state)


class ContextVariable:
    """One context variable."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.variable = variable

    def snapshot(self) -> Any:
        """Its value."""
        return self.variable.get()

    def restore(self, state: Any) -> None:
        """Set it."""
        self.variable.set(state)


class Counting:
    """A hook that logs its calls; its state is a number that tests advance by hand."""

    def __init__(self, log: list[str], name: str = "") -> None:
        self.log, self.name = log, name
        self.value = 0

    def snapshot(self) -> int:
        """Log and return the value."""
        self.log.append(f"{self.name}snapshot {self.value}")
        return self.value

    def restore(self, state: int) -> None:
        """Log and set the value."""
        self.log.append(f"{self.name}restore {state}")
        self.value = state


def generator_hooks() -> tuple[Any, ...]:
    """The shipped hook for the default generators."""
    return (remat.GeneratorHook(),)


class Buffers:
    """The buffers of a module, written back into the tensors that are there."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def snapshot(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.module.buffers()]

    def restore(self, state: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.module.buffers(), state, strict=True):
                buffer.copy_(value)
