"""Makes a replay run the compiled code that forward ran, or say that it cannot.

Compiled code saves other tensors than plain code does, and other ones than the same function compiled again, for other
shapes: some may have the layout of what forward saved. So forward notes which code saved each tensor, and replay looks
whether the same does. Only where something is compiled in the process: otherwise it costs nothing.

Dynamo chooses among the codes that it has made for one function by their guards, the last used first. A function that
was compiled for the length that forward had, and for any length later, has two that fit. So replay runs with the codes
of forward in front of all others.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import types
from typing import Any

from torch import Tensor

from torch_remat.runtime.dynamo import evaluator

__all__ = ["compiles", "globals_of", "guards_hold", "is_compiled", "is_same_program", "pinned", "what_saves"]


_compiles: list[bool] = []


def compiles() -> bool:
    """Whether this process has asked for a compiled function."""
    if not _compiles:
        evaluator = sys.modules.get("torch._dynamo.eval_frame")
        backends = {} if evaluator is None else getattr(evaluator, "cached_backends", {0: evaluator})
        if any(backend is not None for backend in tuple(backends.values())):
            _compiles.append(True)
    return bool(_compiles)


# Files that stand between an operation and the function that was compiled, or is run as it is.
_BETWEEN = tuple(
    part.replace("/", os.sep)
    for part in (
        "/torch/_functorch/",
        "/torch/_inductor/",
        "/torch/_dynamo/",
        "/torch/fx/",
        "/torch/autograd/function.py",
        "/torch/nn/modules/module.py",
        "/torch_remat/runtime/",
    )
)
_is_between: dict[str, bool] = {}


def what_saves() -> types.CodeType:
    """The code of the function whose operation saves a tensor: what Dynamo made of it where it is compiled.

    To be called by a pack hook.
    """
    frame = sys._getframe(2)
    while True:
        code = frame.f_code
        name = code.co_filename
        between = _is_between.get(name)
        if between is None:
            between = name.startswith("<eval_with_key>") or any(part in name for part in _BETWEEN)
            if len(_is_between) < 10_000:  # each graph has a name of its own
                _is_between[name] = between
        if not between or frame.f_back is None:
            return code
        frame = frame.f_back


def globals_of(code: types.CodeType) -> dict[str, Any]:
    """The globals of the running function with this code."""
    frame = sys._getframe(1)
    while frame.f_code is not code and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals


def is_compiled(code: types.CodeType) -> bool:
    """Whether Dynamo made ``code``."""
    # ``torch._dynamo.reset()`` forgets what a code was made of; the graphs that it calls have such names.
    return _original(code) is not None or any(name.startswith("__compiled_fn") for name in code.co_names)


def is_same_program(one: types.CodeType, other: types.CodeType, namespace: dict[str, Any]) -> bool:
    """Whether two compiled codes of one function call graphs that save the same tensors.

    So do graphs of one program that differ by constants, such as a flag or a counter that guards told. A graph for any
    length, or with another output (a tensor that the code keeps), may save others.
    ``namespace`` are the globals of the function, where Dynamo puts graphs.
    """
    where = (one.co_filename, one.co_name, one.co_firstlineno)
    if where != (other.co_filename, other.co_name, other.co_firstlineno):
        return False
    ends = _ends_of_graphs(one, namespace)
    return _steps(one) == _steps(other) or (ends is not None and ends == _ends_of_graphs(other, namespace))


def _steps(code: types.CodeType) -> list[tuple[str, Any]]:
    return [(step.opname, _argument(step)) for step in dis.get_instructions(code)]


def _argument(step: dis.Instruction) -> Any:
    if step.opcode in dis.hasconst:
        return None
    if isinstance(step.argval, str) and step.argval.startswith(("__compiled_fn", "__resume_at")):
        return "graph"  # each has a name of its own
    return step.argval if step.opcode in dis.hasname else step.arg


def _ends_of_graphs(code: types.CodeType, namespace: dict[str, Any]) -> list[tuple[int, int, int]] | None:
    """The number of tensors into and out of each graph that ``code`` calls, and of lengths that it asks tensors for.

    None if AOTAutograd did not make it. Numbers may come in and go out: a counter that is a constant of one graph.
    """
    found = [_made_by_aot_autograd(namespace.get(name)) for name in code.co_names if name.startswith("__compiled_fn")]
    if not found or None in found:
        return None
    asked = sum(isinstance(step.argval, str) and step.argval in _LENGTHS for step in dis.get_instructions(code))
    ends = []
    for graph in found:
        read = [one for one in graph.metadata.input_info if one.is_leaf or one.requires_grad]
        made = [one for one in graph.metadata.output_info if issubclass(one.raw_type, Tensor)]
        ends.append((len(read), len(made), asked))
    return ends


# What code made by Dynamo calls for a length that is an input of its graph.
_LENGTHS = {f"{prefix}{name}" for name in ("size", "stride", "storage_offset") for prefix in ("", "call_")}


def _made_by_aot_autograd(graph: Any) -> Any:
    """The ``autograd.Function`` that ``graph`` wraps."""
    seen, left = set(), [graph]
    while left and len(seen) < 100:
        one = left.pop()
        owner = getattr(one, "__self__", None)
        if isinstance(owner, type) and hasattr(owner, "metadata"):
            return owner
        if callable(one) and id(one) not in seen:
            seen.add(id(one))
            left.append(getattr(one, "__wrapped__", None))
            left.extend(cell.cell_contents for cell in getattr(one, "__closure__", None) or () if cell != _EMPTY)
    return None


_EMPTY = types.CellType()


def guards_hold(code: types.CodeType, variables: dict[str, Any]) -> bool:
    """Whether compiled ``code`` would run for these arguments; False where this build of torch does not tell."""
    original = _original(code)
    try:
        entries = () if original is None else _entries_of(original)
        return any(bool(entry.guard_manager.check(variables)) for entry in entries if entry.code is code)
    except Exception:  # noqa: BLE001 - whatever a build of torch says there
        return False


def _original(code: types.CodeType) -> types.CodeType | None:
    """What ``code`` was made of."""
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        return None if utils is None else utils.orig_code_map[code]
    except KeyError:
        return None


# --- Codes of forward in front of all others

_load = evaluator("_load_precompile_entry", None)
_loaded = evaluator("_debug_get_precompile_entries", None)
_reset = evaluator("_reset_precompile_entries", None)
_entries_of = evaluator("_debug_get_cache_entry_list", None)
_can_pin = None not in (_load, _loaded, _reset, _entries_of)
_pinning = threading.RLock()
_active: list[list[tuple[Any, Any, Any]]] = []


class pinned:  # noqa: N801 - used like a function
    """Context manager: of the compiled codes whose guards hold, those in ``codes`` run first.

    For all threads: the guards hold for whoever calls, so that no thread gets a wrong one. Costs a look at what Dynamo
    has for each code, microseconds, where nothing has to be done.
    """

    def __init__(self, codes: list[Any]) -> None:
        self._entries: list[tuple[Any, Any, Any]] = []
        for code in {id(code): code for code in codes}.values():
            original = _original(code)
            if original is not None and _can_pin:
                self._add(original, code)

    def _add(self, original: types.CodeType, code: types.CodeType) -> None:
        entries = _entries_of(original)
        if not _active and (_loaded(original) or (entries and entries[0].code is code)):
            return  # it comes first anyway, or another process has compiled it, and that would be lost
        self._entries.extend((original, entry.guard_manager, code) for entry in entries if entry.code is code)

    def __enter__(self) -> None:
        if self._entries:
            _pinning.acquire()
            _active.append(self._entries)
            self._install()

    def __exit__(self, *exc_info: object) -> None:
        if self._entries:
            _active.pop()
            self._install()
            _pinning.release()

    def _install(self) -> None:
        """Put what is pinned now before Dynamo; replays inside others come first."""
        originals = {id(entry[0]): entry[0] for entry in self._entries}
        for original in originals.values():
            _reset(original)
        for entries in reversed(_active):
            for entry in entries:
                if id(entry[0]) in originals:
                    _load(*entry)
