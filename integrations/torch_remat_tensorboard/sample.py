"""One rank's figures of one step, and their form of fixed size.

A sample is `SAMPLE_BYTES` long whatever the model: some numbers, then `ROWS` rows of a label and a number. Rows are the
largest pairs of block group and region; what has no row of its own is added up in the last one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch_remat.diagnostics.report import Report

__all__ = ["OTHERS", "ROWS", "SAMPLE_BYTES", "Sample", "largest_rows"]

ROWS = 16
"""Rows of a sample: `ROWS - 1` labels, and the rest."""

OTHERS = "others"
"""Label of the row for what has none of its own."""

_LABEL_BYTES = 56


@dataclass(frozen=True, kw_only=True)
class Sample(Report):
    """What one rank measured since its last sample. None where there is no such figure on its device.

    Attributes:
        rank: number of the rank in its process group.
        stage: pipeline stage, where one is known.
        seconds: time since the last sample.
        kept_bytes: the most that checkpoints kept from forward to backward: SAVE regions, and checkpoint inputs.
        rebuilt_bytes: the most that replays had rebuilt and backward not used yet.
        offloaded_bytes: the most in the payloads of hook pairs.
        allocated_bytes: peak of the device's allocator.
        reserved_bytes: what the allocator holds of the device.
        resident_bytes: resident set of the process, where it computes on the CPU.
        capacity_bytes: memory of the device, or of the machine.
        replay_seconds: time in replays; on the device, where it is not the CPU.
        replays: how many there were.
        retries: times that the allocator gave back its cached memory and tried again.
        out_of_memory: times that memory ran out.
        regions: label -> bytes kept at the time of `kept_bytes`, of which they are the parts; largest first.
    """

    rank: int = 0
    stage: int | None = None
    seconds: float = 0.0
    kept_bytes: int = 0
    rebuilt_bytes: int = 0
    offloaded_bytes: int = 0
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    resident_bytes: int | None = None
    capacity_bytes: int | None = None
    replay_seconds: float = 0.0
    replays: int = 0
    retries: int = 0
    out_of_memory: int = 0
    regions: tuple[tuple[str, int], ...] = ()

    def pack(self) -> bytes:
        """The sample in `SAMPLE_BYTES` bytes."""
        values = (getattr(self, name) for name in _NAMES)
        head = _HEAD.pack(*(_ABSENT if value is None else float(value) for value in values))
        rows = [_ROW.pack(_short(label), float(size)) for label, size in self.regions[:ROWS]]
        return head + b"".join(rows) + bytes(_ROW.size * (ROWS - len(rows)))

    @classmethod
    def unpack(cls, data: bytes) -> Sample:
        """The sample that `data` was packed from."""
        values = dict(zip(_NAMES, _HEAD.unpack_from(data), strict=True))
        figures = {
            name: None if value == _ABSENT else value if name.endswith("seconds") else int(value)
            for name, value in values.items()
        }
        rows = (_ROW.unpack_from(data, _HEAD.size + _ROW.size * index) for index in range(ROWS))
        regions = tuple((label.rstrip(b"\0").decode(), int(size)) for label, size in rows if label[0])
        return cls(**figures, regions=regions)  # pyright: ignore[reportArgumentType]

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Sample:
        """The sample that `as_dict()` was taken of, also after it went through JSON."""
        known = {name: values[name] for name in (*_NAMES, "regions") if name in values}
        known["regions"] = tuple((str(label), int(size)) for label, size in known.get("regions", ()))  # pyright: ignore
        return cls(**known)  # pyright: ignore[reportArgumentType]

    def percent(self, size: int | None) -> float | None:
        """`size` as a share of the capacity."""
        return None if size is None or not self.capacity_bytes else 100.0 * size / self.capacity_bytes


_ABSENT = -1.0  # no figure is negative
_NAMES = tuple(field.name for field in fields(Sample) if field.name != "regions")
_HEAD = struct.Struct(f"<{len(_NAMES)}d")
_ROW = struct.Struct(f"<{_LABEL_BYTES}sd")

SAMPLE_BYTES = _HEAD.size + ROWS * _ROW.size
"""What each rank sends."""


def largest_rows(sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """`sizes` in at most `ROWS` rows, the largest first and what has no row added up behind them."""
    ordered = sorted(((label, size) for label, size in sizes.items() if size), key=lambda row: (-row[1], row[0]))
    if len(ordered) <= ROWS:
        return tuple(ordered)
    return (*ordered[: ROWS - 1], (OTHERS, sum(size for _, size in ordered[ROWS - 1 :])))


def _short(label: str) -> bytes:
    """The label in `_LABEL_BYTES`, its middle left out where it is longer: both ends of a path say something."""
    data = label.encode()
    if len(data) <= _LABEL_BYTES:
        return data
    half = (_LABEL_BYTES - 3) // 2
    return f"{data[:half].decode(errors='ignore')}…{data[-half:].decode(errors='ignore')}".encode()
