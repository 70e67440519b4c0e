"""Where a rank computes: what its allocator or its process holds, and how long replays take there."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Device", "DeviceTimer", "HostTimer", "Reading", "current_accelerator"]

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container's limit stands, in the two versions of control groups."""


@dataclass(frozen=True)
class Reading:
    """What the allocator or the process holds now; None where there is no such figure. The last two only ever grow."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    resident_bytes: int | None = None
    retries: int = 0
    out_of_memory: int = 0


class Device:
    """The accelerator of this process, or its CPU."""

    def __init__(self) -> None:
        self.on_host = not torch.accelerator.is_available()

    @property
    def device(self) -> torch.device:
        """The device of the moment: a rank may choose its own after this object was made."""
        return torch.device("cpu") if self.on_host else current_accelerator()

    def capacity_bytes(self) -> int:
        """Memory of the device; of the machine, or of the container's share of it, for the CPU."""
        if self.on_host:
            return _host_bytes()
        return int(torch.get_device_module(self.device).get_device_properties(self.device).total_memory)

    def read(self) -> Reading:
        """Read the counters. Resets none: the peak is that since the training loop last reset it."""
        if self.on_host:
            return Reading(resident_bytes=_resident_bytes())
        stats = torch.accelerator.memory_stats(self.device)
        return Reading(
            allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            retries=stats.get("num_alloc_retries", 0),
            out_of_memory=stats.get("num_ooms", 0),
        )

    def timer(self) -> HostTimer | DeviceTimer:
        """A timer of what runs here."""
        if self.on_host:
            return HostTimer()
        return DeviceTimer(self._make_event)

    def _make_event(self) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None  # part of a CUDA graph: it would say nothing of the graph's later runs
        return torch.Event(self.device, enable_timing=True)


def current_accelerator() -> torch.device:
    """The accelerator that this process has chosen, with its number."""
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu" if kind is None else kind.type, torch.accelerator.current_device_index())


class HostTimer:
    """Adds up times on the host."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def start(self) -> float:
        """The start of one span of time."""
        return time.perf_counter()

    def end(self, started: float) -> None:
        """Its end."""
        self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceTimer:
    """Adds up times on a device by events in its streams. Never waits: what the device has not done counts later."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._pairs: deque[tuple[Any, Any]] = deque()

    def start(self) -> Any:
        """The start of one span of time, in the stream of the moment."""
        event = self._make_event()
        if event is not None:
            event.record()
        return event

    def end(self, started: Any) -> None:
        """Its end, in the same stream."""
        event = self._make_event() if started is not None else None
        if event is not None:
            event.record()
            self._pairs.append((started, event))

    def take(self) -> float:
        """Seconds of what the device has done and was not counted yet."""
        seconds = 0.0
        while self._pairs and self._pairs[0][1].query():
            started, ended = self._pairs.popleft()
            seconds += started.elapsed_time(ended) / 1e3
        return seconds


def _resident_bytes() -> int:
    """The resident set of this process; its peak where the system does not tell the present one."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _host_bytes() -> int:
    """Memory of the machine, or the limit of the control group where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and 0 < int(limit) < total:
            return int(limit)
    return total
