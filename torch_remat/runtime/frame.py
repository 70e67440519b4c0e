"""What is live while a body runs: the frame of its pass, and the open name scopes."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from torch_remat.errors import DuplicateNameError, display_name
from torch_remat.runtime.dynamo import Phase, live, tracing
from torch_remat.runtime.tape import Tape

__all__ = ["Frame", "current_frame", "duplicate_message", "is_recomputing", "qualified", "scopes"]


class Frame:
    """One pass over a body. Subclasses are the two passes; see ``forward.py`` and ``replay_frame.py``."""

    replaying = False
    checkpoint_frame: Any = None
    """Set where a checkpoint called under this frame is one of its own, with a forward frame of this class."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.inert = 0  # above zero inside the body of a SAVE region: annotations there do nothing
        self.phase = Phase(self.replaying)
        self.names: set[str] = set()
        self.inner_checkpoints: dict[str, int] = {}

    def claim(self, name: str) -> str:
        """The qualified form of ``name``, which no region of this pass has had yet."""
        name = qualified(name)
        if name in self.names:
            phase = "recompute" if self.replaying else "forward"
            raise DuplicateNameError(duplicate_message(self.tape.name, name, phase))
        self.names.add(name)
        return name

    def free_name(self, name: str) -> str:
        """``name``, or with ``#2`` and so on behind where this pass has had it."""
        count, found = 1, name
        while qualified(found) in self.names:
            count += 1
            found = f"{name}#{count}"
        return found

    def inner_name(self, name: str) -> str:
        """The name of a checkpoint inside this one: as given, the second of its name with ``#2`` behind, and so on."""
        count = self.inner_checkpoints[name] = self.inner_checkpoints.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def enter_checkpoint(self, hooks: tuple[Any, ...]) -> tuple[Any, ...]:
        """A checkpoint with these state hooks starts inside this body; returns what :meth:`leave_checkpoint` gets."""
        return ()

    def leave_checkpoint(self, before: tuple[Any, ...]) -> None:
        """The checkpoint inside has ended."""

    def declare(self, tensors: tuple[Tensor, ...]) -> None:
        """``recompute_needs_tensor`` in this pass."""

    def name_saves(self, ctx: Any, saved: Mapping[str, Tensor | None]) -> None:
        """``save_for_backward`` in this pass."""

    def call_region(self, function: Any, name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
        """Run one region call of this pass."""
        raise NotImplementedError


current_frame: ContextVar[Frame | None] = ContextVar("torch_remat_frame", default=None)
scopes: ContextVar[tuple[str, ...]] = ContextVar("torch_remat_scopes", default=())


def duplicate_message(checkpoint: str | None, name: str, phase: str) -> str:
    """The text of the error for a second region of one name."""
    return (
        f"Duplicate torch_remat region name {display_name(checkpoint, name)} during {phase}. "
        f"To fix: give each call of a region in one checkpoint its own name, "
        f'for example with `with remat.name_scope(f"step{{i}}"):` around it.'
    )


def qualified(name: str) -> str:
    """``name`` behind the open name scopes, joined by ``/``."""
    prefix = scopes.get()
    return "/".join((*prefix, name)) if prefix else name


def is_recomputing() -> bool:
    """Whether the code asking is being replayed.

    True only while a checkpoint's body runs again inside backward; False in the forward, in backward code, outside, and
    in threads that the body starts. Use it to guard side effects that must happen once.

    In code compiled by ``torch.compile``: False in a checkpoint that is part of the graph, where the compiler replays
    operations and no Python; in a compiled part of an eager checkpoint as in eager code (one compilation for each
    answer).
    """
    if tracing():
        return live.phase is not None and live.phase.replaying
    frame = current_frame.get()
    if frame is None:
        return False
    frame.tape.guards = True
    return frame.replaying
