"""Where a tensor was allocated: an annotator for the memory reports, from the allocator's own record."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["clear_memory_snapshot_cache", "memory_snapshot_annotate"]


def memory_snapshot_annotate(snapshot: Any = None) -> Callable[[Tensor], str | None]:
    """An annotator that says which line allocated a tensor, for ``annotate=`` of the memory reports.

    Args:
        snapshot: what ``torch.cuda.memory._snapshot()`` returned. By default the present one, fetched when the first
            label is asked for and again when the allocator has done anything since.

    The label is ``file.py:line name`` of the innermost Python frame that is neither torch's nor ours; ``file.py:line``
    of the innermost one where there is no other. The allocator notes lines after
    ``torch.cuda.memory._record_memory_history()``; without that, and for memory that is not CUDA's, there is no label.
    """
    blocks = None if snapshot is None else _Blocks(snapshot)

    def annotate(tensor: Tensor) -> str | None:
        known = blocks if blocks is not None else _present()
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # no memory of its own: sparse, fake
            return None
        return None if known is None else known.label(address)

    return annotate


def clear_memory_snapshot_cache() -> None:
    """Forget the snapshot that :func:`memory_snapshot_annotate` has fetched."""
    _cache.clear()


class _Blocks:
    """The allocated blocks of a snapshot, by address."""

    def __init__(self, snapshot: Any) -> None:
        found: list[tuple[int, int, list[Any]]] = []
        for segment in snapshot.get("segments", ()):
            address = segment.get("address", 0)
            for block in segment.get("blocks", ()):
                start = block.get("address", address)
                if block.get("state") == "active_allocated":
                    found.append((start, block["size"], block.get("frames") or []))
                address = start + block["size"]
        self._found = sorted(found, key=lambda one: one[0])
        self._starts = [start for start, _, _ in self._found]

    def label(self, address: int) -> str | None:
        """The line that allocated the block around ``address``."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start, size, frames = self._found[index]
        if address >= start + size or not frames:
            return None
        ours = ("/torch/", "/torch_remat/")
        python = [frame for frame in frames if str(frame["filename"]).endswith(".py")] or frames
        for frame in python:
            if not any(part in str(frame["filename"]) for part in ours):
                return f"{_place(frame)} {frame['name']}"
        return _place(python[0])


def _place(frame: Any) -> str:
    return f"{os.path.basename(str(frame['filename']))}:{frame['line']}"


_cache: dict[Any, _Blocks] = {}  # by how often the allocator has given and taken


def _present() -> _Blocks | None:
    """The blocks of now; fetched anew when anything was allocated or freed since."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    key = tuple(
        (device, stats.get("allocation.all.allocated"), stats.get("allocation.all.freed"))
        for device in range(torch.cuda.device_count())
        for stats in (torch.cuda.memory_stats(device),)
    )
    if key not in _cache:
        _cache.clear()
        _cache[key] = _Blocks(torch.cuda.memory._snapshot())
    return _cache[key]
