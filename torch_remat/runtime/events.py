"""What the core tells whoever listens. With no subscriber an event costs one ``if``.

Kinds: ``("region", tape, record)`` when a region call starts in forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["emit", "subscribe", "subscribers", "unsubscribe"]

subscribers: list[Callable[..., None]] = []
_counts: dict[Callable[..., None], int] = {}
_lock = threading.Lock()


def subscribe(listener: Callable[..., None]) -> None:
    """Call ``listener(kind, *details)`` for every event, in whatever thread it happens. Counted: undo each call."""
    with _lock:
        _counts[listener] = _counts.get(listener, 0) + 1
        if listener not in subscribers:
            subscribers.append(listener)


def unsubscribe(listener: Callable[..., None]) -> None:
    """Undo one :func:`subscribe`."""
    with _lock:
        _counts[listener] -= 1
        if not _counts[listener]:
            del _counts[listener]
            subscribers.remove(listener)


def emit(kind: str, *details: Any) -> None:
    """Tell every subscriber."""
    for listener in tuple(subscribers):
        listener(kind, *details)
