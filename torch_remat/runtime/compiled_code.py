"""Makes a replay run the compiled code that forward ran, or say that it cannot.

Compiled code saves other tensors than plain code does, and other ones than the same function compiled again, for other
shapes: some may have the layout of what forward saved. So forward notes which code saved each tensor, and replay looks
whether the same does. Only where something is compiled in the process: otherwise it costs nothing.

Dynamo chooses among the codes that it has made for one function by their guards, the last used first. A function that
was compiled for the length that forward had, and for any length later, has two that fit. So replay runs with the codes
of forward in front of all others.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from typing import Any

from torch_remat.runtime.dynamo import evaluator

__all__ = ["compiles", "is_compiled", "pinned", "what_saves"]


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


def is_compiled(code: types.CodeType) -> bool:
    """Whether Dynamo made ``code``."""
    # ``torch._dynamo.reset()`` forgets what a code was made of; the graphs that it calls have such names.
    return _original(code) is not None or any(name.startswith("__compiled_fn") for name in code.co_names)


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
