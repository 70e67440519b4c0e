"""What the core tells whoever listens. With no listener an event costs one ``if``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = [
    "Event",
    "backward_reached",
    "body_learned",
    "forward_ended",
    "graph_made",
    "output_reached",
    "region_called",
    "region_started",
    "replay_ended",
    "replay_started",
]

_lock = threading.Lock()


class Event:
    """A list of listeners, each called with what the event is about, in whatever thread it happens.

    The code that emits asks ``if event.listeners:`` first. What a listener raises goes through to the caller.
    """

    __slots__ = ("_counts", "listeners")

    def __init__(self) -> None:
        self.listeners: tuple[Callable[..., None], ...] = ()
        self._counts: dict[Callable[..., None], int] = {}

    def __call__(self, *details: Any) -> None:
        """Tell every listener."""
        for listener in self.listeners:
            listener(*details)

    def subscribe(self, listener: Callable[..., None]) -> None:
        """Call ``listener`` from now on. Counted: undo each call."""
        with _lock:
            self._counts[listener] = self._counts.get(listener, 0) + 1
            self.listeners = tuple(self._counts)

    def unsubscribe(self, listener: Callable[..., None]) -> None:
        """Undo one :meth:`subscribe`."""
        with _lock:
            self._counts[listener] -= 1
            if not self._counts[listener]:
                del self._counts[listener]
            self.listeners = tuple(self._counts)


region_called = Event()
"""``(function, tape, record, replaying) -> function``: the body of a region runs in the form that the listener returns.
Whether anybody listens is looked up when a pass starts."""
region_started = Event()
"""``(tape, record)``: a region call starts in forward."""
body_learned = Event()
"""``(tape, plan)``: forward was observed and has ended; ``plan`` is what was learned. Before :data:`forward_ended`."""
graph_made = Event()
"""``(tape, nodes)``: the body has returned, and backward will enter its graph through ``nodes``, those of its outputs.
Before :data:`forward_ended`; not where the body has no region and leaves nothing to replay."""
forward_ended = Event()
"""``(tape,)``: the body has returned, and what the checkpoint keeps is settled."""
output_reached = Event()
"""``()``: backward reaches an output of a checkpoint, even when nothing of its tape is left."""
backward_reached = Event()
"""``(tape,)``: backward is about to enter the block, with or without something to replay. May come repeatedly."""
replay_started = Event()
"""``(tape,)``: before the body runs again."""
replay_ended = Event()
"""``(tape, error)``: after the body ran again; ``error`` is None, or what replay raises."""
