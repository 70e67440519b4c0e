"""Names of replays and regions in profiler traces, and what else runs around a region's function.

A pass asks once, when it starts, whether anybody wants to know; the region calls of a pass that nobody watches pay one
``if``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from torch_remat.errors import display_name
from torch_remat.runtime import events
from torch_remat.runtime.tape import Region, Tape

__all__ = ["label", "profiling", "wrapped"]

label = torch.autograd.profiler.record_function


def profiling() -> bool:
    """Whether torch's profiler runs in this process."""
    return getattr(profiler, "_is_profiler_enabled", False)


def wrapped(function: Callable[..., Any], tape: Tape, record: Region, replaying: bool) -> Callable[..., Any]:
    """``function``, the body of a region call, as listeners and the profiler want it to run."""
    wraps: Any
    for wraps in events.region_called.listeners:
        function = wraps(function, tape, record, replaying)
    if tape.check is not None:
        function = tape.check.around(function, record)
    return _labelled(function, tape, record) if profiling() else function


def _labelled(function: Callable[..., Any], tape: Tape, record: Region) -> Callable[..., Any]:
    policy = "recompute" if record.recompute else "save"
    text = f"torch_remat.{policy}: {display_name(tape.name, record.name)}"

    def call(*args: Any, **kwargs: Any) -> Any:
        with label(text):
            return function(*args, **kwargs)

    return call
