"""``collect_trace`` and ``trace_scope``: which regions ran, in order, with policy, time and what they keep.

Kept bytes are looked up once forward has ended: before the first backward, or where the ``with`` block ends.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from torch_remat.diagnostics.memory import kept_bytes_by_span
from torch_remat.diagnostics.report import Report, format_bytes
from torch_remat.errors import InvalidValueError, UsageError
from torch_remat.runtime.dynamo import tracing
from torch_remat.runtime.events import backward_reached, region_called, region_started
from torch_remat.runtime.tape import Region, Span, Tape

__all__ = ["Trace", "TraceEntry", "collect_trace", "trace_scope"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class TraceEntry(Report):
    """One region call, or one scope with the entries in it.

    ``policy`` is ``"save"`` or ``"recompute"`` for a region and None for a scope; ``checkpoint`` is the name of the
    checkpoint a region was called in; ``phase`` is ``"forward"`` or ``"replay"``. ``seconds`` is the time on the host
    that the region's function took, what is nested in it included. ``kept_bytes`` is what a SAVE region keeps when
    forward has ended; None while that is not known, and for what is not saved.
    """

    name: str
    policy: str | None = None
    checkpoint: str | None = None
    metadata: str | None = None
    entries: list[TraceEntry] = field(default_factory=list)
    phase: str = "forward"
    seconds: float | None = None
    kept_bytes: int | None = None

    def _lines(self, depth: int, details: bool) -> Iterator[str]:
        text = f"{self.name}: {self.policy}" if self.policy is not None else self.name
        if self.metadata is not None:
            text += f" [{self.metadata}]"
        if details and self.policy is not None:
            text += self._details()
        yield "  " * depth + text
        for entry in self.entries:
            yield from entry._lines(depth + 1, details)

    def _details(self) -> str:
        facts = [self.checkpoint or "", "" if self.seconds is None else f"{self.seconds * 1e3:.3f} ms"]
        facts.append("" if self.kept_bytes is None else f"keeps {format_bytes(self.kept_bytes)}")
        return f"  ({', '.join(fact for fact in facts if fact)})"


@dataclass
class Trace(Report):
    """What one :func:`collect_trace` recorded: region calls of forwards, and those of replays of these forwards."""

    entries: list[TraceEntry] = field(default_factory=list)
    replayed: list[TraceEntry] = field(default_factory=list)

    def format(self, *, details: bool = False) -> str:
        """A heading and one line per entry, two spaces for each level of nesting.

        ``details`` adds checkpoint, time and kept bytes, and the replayed regions under a heading of their own.
        """
        text = ["torch_remat trace", *(line for entry in self.entries for line in entry._lines(0, details))]
        if details and self.replayed:
            text += ["replayed", *(line for entry in self.replayed for line in entry._lines(0, details))]
        return "\n".join(text)


class _Collector:
    """One open :func:`collect_trace`."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.waiting: list[tuple[TraceEntry, Span]] = []  # kept bytes are not known yet

    def look_up(self) -> None:
        """Fill in what SAVE regions keep now."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            kept = kept_bytes_by_span(span for _, span in waiting)
            for entry, span in waiting:
                entry.kept_bytes = kept.get(id(span), 0)


_collector: ContextVar[_Collector | None] = ContextVar("torch_remat_collector", default=None)
_collectors: weakref.WeakKeyDictionary[Tape, _Collector] = weakref.WeakKeyDictionary()  # who saw the tape's forward
_level: ContextVar[list[TraceEntry] | None] = ContextVar("torch_remat_trace", default=None)


def _listen(tape: Tape, record: Region) -> None:
    level, collector = _level.get(), _collector.get()
    if level is not None and collector is not None:
        level.append(TraceEntry(record.name, "recompute" if record.recompute else "save", tape.name))
        _collectors[tape] = collector


def _around(function: Any, tape: Tape, record: Region, replaying: bool) -> Any:
    """Time the region's function; asked right after :func:`_listen` in forward."""
    if replaying:
        collector = _collectors.get(tape)
        if collector is None:
            return function
        entry = TraceEntry(record.name, "recompute", tape.name, phase="replay")
        collector.trace.replayed.append(entry)
        return _timed(function, entry, None, record)
    level, collector = _level.get(), _collector.get()
    if not level or collector is None or level[-1].name != record.name:
        return function
    return _timed(function, level[-1], collector, record)


def _timed(function: Any, entry: TraceEntry, collector: _Collector | None, record: Region) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            entry.seconds = time.perf_counter() - start
            if collector is not None and record.span is not None:
                collector.waiting.append((entry, record.span))

    return call


def _before_backward(tape: Tape) -> None:
    collector = _collectors.get(tape)
    if collector is not None:
        collector.look_up()


@contextmanager
def collect_trace() -> Iterator[Trace]:
    """Record the region calls of forwards run inside the ``with`` block, in this thread or task.

    Yields an object with ``entries``, ``format()`` and ``to_json()``. Of nested collectors only the innermost records.
    Replays of these forwards within the block are in ``replayed``, in whatever thread they run.
    """
    collector = _Collector()
    tokens = _level.set(collector.trace.entries), _collector.set(collector)
    region_started.subscribe(_listen)
    region_called.subscribe(_around)
    backward_reached.subscribe(_before_backward)
    try:
        yield collector.trace
    finally:
        backward_reached.unsubscribe(_before_backward)
        region_called.unsubscribe(_around)
        region_started.unsubscribe(_listen)
        _collector.reset(tokens[1])
        _level.reset(tokens[0])
        collector.look_up()


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
