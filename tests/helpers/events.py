"""Event logs: which region ran when, in forward, in replay and in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torch_remat as remat


class Hidden(dict[str, Any]):
    """Switches that a body reads unseen by the runtime: not a plain dict, whose entries it would look at."""


def under(letter: str, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``function`` as a region called ``name``: S is SAVE, R is RECOMPUTE, - no region at all."""
    return function if letter == "-" else remat.region(function, name, recompute=letter == "R")


class EventLog(list[str]):
    """A list of events such as ``"fwd A"``, ``"replay A"``, ``"bwd A"``."""

    def note(self, name: str) -> None:
        """Record that ``name`` runs now, in forward or in replay."""
        self.append(f"{'replay' if remat.is_recomputing() else 'fwd'} {name}")

    def tally(self, prefix: str) -> int:
        """How many events start with ``prefix``."""
        return sum(event.startswith(prefix) for event in self)

    def op(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """``sin`` that logs its runs and saves an internal tensor (``cos``), neither its input nor its output."""

        class Logged(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                self.note(name)
                ctx.save_for_backward(x.cos())
                return x.sin()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                self.append(f"bwd {name}")
                (cos,) = ctx.saved_tensors
                return grad * cos

        return Logged.apply

    def input_saving_op(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """``sin`` that logs its runs and saves its input."""

        class LoggedInput(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                self.note(name)
                ctx.save_for_backward(x)
                return x.sin()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                self.append(f"bwd {name}")
                (x,) = ctx.saved_tensors
                return grad * x.cos()

        return LoggedInput.apply

    def nothing_saving_op(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """Doubling that logs its runs and saves nothing."""

        class LoggedNothing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                self.note(name)
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                self.append(f"bwd {name}")
                return grad * 2

        return LoggedNothing.apply


def chain(log: EventLog, policy: str, op: str = "op") -> Callable[[torch.Tensor], torch.Tensor]:
    """A body of logged regions A, B, C ..., one per letter of ``policy``: S is SAVE, R is RECOMPUTE, - a bare op."""
    ops = [getattr(log, op)(chr(ord("A") + index)) for index in range(len(policy))]

    def body(x: torch.Tensor) -> torch.Tensor:
        for index, (letter, function) in enumerate(zip(policy, ops, strict=True)):
            x = under(letter, function, chr(ord("A") + index))(x)
        return x

    return body
