"""Keeps Dynamo out of this library's own code.

A graph breaks where a checkpoint or region begins and nowhere inside; user code within is compiled as usual. Torch
marks functions for this with an attribute (``torch.compiler.disable`` sets it) and code objects with a call into its
frame evaluator; both are used here without importing ``torch._dynamo``, which takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

__all__ = [
    "Phase",
    "eager_only",
    "evaluator",
    "frames_compiled_by",
    "keep_dynamo_out",
    "live",
    "set_frames_compiled_by",
    "tracing",
]

F = TypeVar("F")

tracing = torch.compiler.is_dynamo_compiling
"""Whether Dynamo is tracing the code that asks. A constant to Dynamo, and otherwise one call that returns False."""


class Phase:
    """What compiled code asks about the pass it is called in: it can read and guard attributes, not context variables.

    One type for both passes, so that replay runs what was compiled in forward.
    """

    def __init__(self, replaying: bool) -> None:
        self.inside = True  # in recomputed code; False in the body of a SAVE region
        self.replaying = replaying


class _Live(threading.local):
    def __init__(self) -> None:
        self.phase: Phase | None = None


live = _Live()


def evaluator(name: str, otherwise: Any) -> Any:
    """A function of Dynamo's frame evaluator, or ``otherwise`` where this torch has none of that name."""
    try:
        return getattr(importlib.import_module("torch._C._dynamo.eval_frame"), name)
    except (ImportError, AttributeError):
        return otherwise


def _nobody() -> None:
    return None


frames_compiled_by = evaluator("get_eval_frame_callback", _nobody)
"""Who compiles the functions that this thread calls: something inside a ``torch.compile``, None outside.

A replay has to run what forward ran, so it takes over forward's answer; compiled and plain code save other tensors.
"""

set_frames_compiled_by = evaluator("set_eval_frame", id)


def eager_only(reason: str) -> Any:
    """Decorator: Dynamo breaks the graph here; with ``fullgraph=True`` its error says ``reason``."""

    def mark(function: F) -> F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return mark


def keep_dynamo_out(package: str, *entries: types.CodeType) -> None:
    """Run the functions of the loaded modules of ``package`` as they are, where torch has a switch for that.

    ``entries`` are where Dynamo may start: a compiled module whose ``forward`` is a checkpoint.
    """
    try:
        found = importlib.import_module("torch._C._dynamo.eval_frame")
        skip_this_frame = found._FrameExecStrategy(found._FrameAction.SKIP, found._FrameAction.DEFAULT)
        set_strategy = found.set_code_exec_strategy
    except (ImportError, AttributeError, TypeError):
        return
    for name, module in tuple(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for code in _codes(module, name):
                if code not in entries:
                    set_strategy(code, skip_this_frame)


def _codes(holder: Any, module: str) -> Iterator[types.CodeType]:
    for value in tuple(vars(holder).values()):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield from _nested(value.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            yield from _codes(value, module)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
