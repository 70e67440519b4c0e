"""``collect_trace`` and ``trace_scope``: which regions ran in forward, in order, with their policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from torch_remat.errors import InvalidValueError, UsageError
from torch_remat.runtime.dynamo import tracing
from torch_remat.runtime.events import region_started
from torch_remat.runtime.tape import Region, Tape

__all__ = ["Trace", "TraceEntry", "collect_trace", "trace_scope"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class TraceEntry:
    """One region call, or one scope with the entries in it.

    ``policy`` is ``"save"`` or ``"recompute"`` for a region and None for a scope; ``checkpoint`` is the name of the
    checkpoint a region was called in.
    """

    name: str
    policy: str | None = None
    checkpoint: str | None = None
    metadata: str | None = None
    entries: list[TraceEntry] = field(default_factory=list)

    def _lines(self, depth: int) -> Iterator[str]:
        text = f"{self.name}: {self.policy}" if self.policy is not None else self.name
        if self.metadata is not None:
            text += f" [{self.metadata}]"
        yield "  " * depth + text
        for entry in self.entries:
            yield from entry._lines(depth + 1)


@dataclass
class Trace:
    """What one :func:`collect_trace` recorded."""

    entries: list[TraceEntry] = field(default_factory=list)

    def format(self) -> str:
        """A heading and one line per entry, two spaces for each level of nesting."""
        return "\n".join(["torch_remat trace", *(line for entry in self.entries for line in entry._lines(0))])


_level: ContextVar[list[TraceEntry] | None] = ContextVar("torch_remat_trace", default=None)


def _listen(tape: Tape, record: Region) -> None:
    level = _level.get()
    if level is not None:
        level.append(TraceEntry(record.name, "recompute" if record.recompute else "save", tape.name))


@contextmanager
def collect_trace() -> Iterator[Trace]:
    """Record the region calls of forwards run inside the ``with`` block, in this thread or task.

    Yields an object with ``entries`` and ``format()``. Replays are not recorded; of nested collectors only the
    innermost records.
    """
    trace = Trace()
    token = _level.set(trace.entries)
    region_started.subscribe(_listen)
    try:
        yield trace
    finally:
        region_started.unsubscribe(_listen)
        _level.reset(token)


def trace_scope(function: Callable[P, R], name: str, *, metadata: str | None = None) -> Callable[P, R]:
    """Wrap ``function`` so that what it records in a trace stands below an entry ``name [metadata]``.

    Raises:
        RuntimeError: ``function`` is not callable, or ``name`` or ``metadata`` is not a string.
        ValueError: ``name`` or ``metadata`` is empty.
    """
    if not callable(function):
        raise UsageError(f"trace_scope expects a function as its first argument, got {type(function).__name__}.")
    for label, value in (("name", name), ("metadata", metadata)):
        if value is None and label == "metadata":
            continue
        if not isinstance(value, str):
            raise UsageError(f"trace_scope expects {label} to be a str, got {type(value).__name__}.")
        if not value:
            raise InvalidValueError(f"a trace_scope {label} must be non-empty.")

    def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
        level = None if tracing() else _level.get()
        if level is None:
            return function(*args, **kwargs)
        entry = TraceEntry(name, metadata=metadata)
        level.append(entry)
        token = _level.set(entry.entries)
        try:
            return function(*args, **kwargs)
        finally:
            _level.reset(token)

    return scoped
