"""What is known of checkpoints and regions while Dynamo traces them: names, scopes, nesting.

The functions marked :func:`while_tracing` run in Python when Dynamo meets a call of them, and their result is a
constant of the graph. What they note hangs on Dynamo's tracer of the subgraph, which belongs to one attempt of one
thread to trace one function and is gone with it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch_remat.errors import UnsupportedError, display_name
from torch_remat.runtime.frame import current_frame, duplicate_message, qualified

__all__ = [
    "INERT",
    "NOWHERE",
    "Named",
    "RECOMPUTED",
    "UNREAD",
    "UNKNOWN",
    "around",
    "begin",
    "cannot_break",
    "claim",
    "claim_beside",
    "enter_save",
    "enter_scope",
    "free_name",
    "inner_name",
    "leave_save",
    "leave_scope",
    "numbered",
    "one_graph",
    "scoped",
    "unguarded",
    "while_tracing",
]

F = TypeVar("F", bound=Callable[..., Any])


class _Unread:
    """Nothing that Dynamo takes for a constant."""


UNREAD = _Unread()
Named = tuple[_Unread, Any]
"""``(UNREAD, name)``: Dynamo leaves the name unread until somebody asks for it.

A string in an attribute, or a list or tuple of strings, it reads when it meets it, and the graph depends on it.
"""

# What code that is traced stands in, as far as the graph is concerned.
NOWHERE = "nowhere"  # in no checkpoint
RECOMPUTED = "recomputed"  # in recomputed code of a checkpoint
INERT = "inert"  # in a SAVE region: annotations there do nothing
UNKNOWN = "unknown"  # this build of torch does not tell


def while_tracing(function: F) -> F:
    """Decorator: Dynamo calls the function instead of tracing it, and takes what it returns as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Traced:
    """What is known of one checkpoint, or of code around checkpoints."""

    def __init__(self, name: str | None = None, is_checkpoint: bool = False) -> None:
        self.name = name
        self.is_checkpoint = is_checkpoint
        self.scopes: list[str] = []
        self.saves = 0  # open SAVE regions
        self.names: set[str] = set()
        self.inner_checkpoints: dict[str, int] = {}
        self.checkpoints = 0  # of the whole graph; known at its root


_traced: WeakKeyDictionary[Any, _Traced] = WeakKeyDictionary()  # by tracer


def _translator() -> Any:
    """Dynamo's object for the function that it traces, or None where this build of torch does not tell."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator  # it is loaded: Dynamo calls us

        return InstructionTranslator.current_tx()
    except (ImportError, AttributeError):
        return None


def _tracer() -> Any:
    return getattr(getattr(_translator(), "output", None), "current_tracer", None)


def _chain() -> list[_Traced]:
    """What is being traced, outermost first."""
    found = []
    tracer = _tracer()
    while tracer is not None:
        state = _traced.get(tracer)
        if state is not None:
            found.insert(0, state)
        tracer = tracer.parent
    return found


def _checkpoint() -> _Traced | None:
    return next((state for state in _chain() if state.is_checkpoint), None)


def _qualified(name: str) -> str:
    return qualified("/".join([scope for state in _chain() for scope in state.scopes] + [name]))


@while_tracing
def unguarded(variable: str) -> str | None:
    """The string in a variable of the traced function that calls this; None for anything else.

    Dynamo does not learn that the graph depends on it. Blocks that differ by name only share what is compiled, which
    carries the names of the first one. So such a string may go into marks of the graph and into what is known while
    tracing, and nowhere else: what runs where a graph breaks gets the variable, which is read when it runs.
    """
    try:
        value = _caller().symbolic_locals[variable]
        value = value.unwrap() if hasattr(type(value), "unwrap") else value
        found = value.peek_value() if hasattr(type(value), "peek_value") else value.as_python_constant()
    except Exception:  # noqa: BLE001 - whatever a build of torch says there: Dynamo reads the variable itself
        return None
    return found if type(found) is str else None


def _caller() -> Any:
    """Dynamo's object for the function that it is in, which may be inlined."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "tx" not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["tx"]


@while_tracing
def around() -> str:
    """What the code being traced stands in."""
    if _tracer() is None:
        return UNKNOWN
    state = _checkpoint()
    if state is None:
        return NOWHERE
    return INERT if state.saves else RECOMPUTED


@while_tracing
def begin(name: str | None) -> None:
    """The body of a checkpoint starts here."""
    tracer = _tracer()
    if tracer is None:
        raise UnsupportedError(
            f"Checkpoint {display_name(name)} breaks the graph, and with torch._dynamo.config.nested_graph_breaks "
            f"Dynamo runs a part of it in eager code, where it would recompute its SAVE regions.\n"
            f"To fix: leave that option off; or compile with fullgraph=True, which says what breaks the graph."
        )
    _traced[tracer] = _Traced(name, is_checkpoint=True)


@while_tracing
def numbered(name: str | None) -> str:
    """What marks the operations of a checkpoint that starts: its number in the graph, and its name."""
    tracer = _tracer()
    while tracer.parent is not None:
        tracer = tracer.parent
    state = _traced.setdefault(tracer, _Traced())
    state.checkpoints += 1
    return f"{state.checkpoints}:{name or ''}"


@while_tracing
def scoped(name: str) -> str:
    """The name of a region with the open scopes."""
    return _qualified(name)


@while_tracing
def claim(name: str) -> str | None:
    """Note a region's name; returns the text of an error if this checkpoint has had it."""
    state = _checkpoint()
    if state is None:
        return None
    name = _qualified(name)
    if name in state.names:
        return duplicate_message(state.name, name, "forward")
    state.names.add(name)
    return None


@while_tracing
def claim_beside(name: str) -> str | None:
    """The same in a compiled part of a checkpoint that is not compiled, which knows of SAVE regions only."""
    frame, tracer = current_frame.get(), _tracer()
    if frame is None or tracer is None:
        return None
    state = _traced.setdefault(tracer, _Traced())
    name = _qualified(name)
    if name in state.names or (name in frame.names and not frame.replaying):
        return duplicate_message(frame.tape.name, name, "forward")
    state.names.add(name)
    return None


@while_tracing
def free_name(name: str) -> str:
    """``name``, or with ``#2`` and so on behind where this checkpoint has had it."""
    state = _checkpoint()
    if state is None:
        return name
    count, found = 1, name
    while _qualified(found) in state.names:
        count += 1
        found = f"{name}#{count}"
    return found


@while_tracing
def enter_save(name: str) -> str:
    """A SAVE region starts; returns its name as reports print it."""
    state = _checkpoint()
    if state is not None:
        state.saves += 1
    return display_name(None if state is None else state.name, _qualified(name))


@while_tracing
def leave_save() -> None:
    """A SAVE region ends."""
    state = _checkpoint()
    if state is not None:
        state.saves -= 1


@while_tracing
def inner_name(name: str | None) -> str | None:
    """The scope of a checkpoint inside the one being traced, named as in eager code."""
    state = _checkpoint()
    if name is None or state is None:
        return None
    count = state.inner_checkpoints[name] = state.inner_checkpoints.get(name, 0) + 1
    return name if count == 1 else f"{name}#{count}"


@while_tracing
def enter_scope(prefix: str | None) -> bool:
    """Open a name scope, unless None; returns what :func:`leave_scope` gets."""
    tracer = _tracer()
    if prefix is None or tracer is None:
        return False
    _traced.setdefault(tracer, _Traced()).scopes.append(prefix)
    return True


@while_tracing
def leave_scope(entered: bool) -> None:
    """Close the innermost name scope."""
    state = _traced.get(_tracer()) if entered else None
    if state is not None:
        state.scopes.pop()


def _one_graph() -> bool:
    translator = _translator()
    return bool(getattr(translator, "one_graph", False) or getattr(translator, "error_on_graph_break", False))


@while_tracing
def one_graph() -> bool:
    """Whether the user asked for one graph (``fullgraph=True``): then nothing may leave it."""
    return _one_graph()


@while_tracing
def cannot_break(name: str) -> bool:
    """Whether a SAVE region must stay in a compiled part of an eager checkpoint, which recomputes it; warns if so."""
    if not _one_graph():
        return False
    frame = current_frame.get()
    where = display_name(None if frame is None else frame.tape.name, _qualified(name))
    warnings.warn(
        f"SAVE region {where} is recomputed: it is compiled with fullgraph=True inside a checkpoint that is not "
        f"compiled, which runs the whole graph again.\n"
        f"To fix: compile around the checkpoint, torch.compile(checkpoint(...)(fn)), or compile without "
        f"fullgraph=True.",
        stacklevel=2,
    )
    return True
