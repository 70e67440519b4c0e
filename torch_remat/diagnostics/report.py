"""What all reports share: plain values with a JSON form, and how bytes and counts are written."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any, TextIO

__all__ = ["Report", "count_of", "format_bytes", "print_text"]

_UNITS = ("KiB", "MiB", "GiB", "TiB")


class Report:
    """Base of the frozen dataclasses that reports are made of."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as nested dicts, tuples and plain values."""
        if not dataclasses.is_dataclass(self):
            raise TypeError(f"{type(self).__name__} is no dataclass")
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """The report as JSON. Numbers that are not finite, which JSON does not have, are strings: ``"inf"``."""
        return json.dumps(_finite(self.as_dict()), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def format_bytes(count: int) -> str:
    """``count`` bytes for people: ``216 B``, ``1.26 KiB``."""
    if count < 1024:
        return f"{count} B"
    power = next((power for power in range(1, 4) if round(count / 1024**power, 2) < 1024), 4)
    return f"{count / 1024**power:.2f} {_UNITS[power - 1]}"


def count_of(count: int, noun: str) -> str:
    """``1 save``, ``2 saves``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_text(text: str, file: TextIO | None) -> None:
    """Write ``text`` and a newline to ``file``, by default the standard output of the moment."""
    stream = sys.stdout if file is None else file
    stream.write(text + "\n")
