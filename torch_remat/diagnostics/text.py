"""Names of checkpoints for people: sorted by number, runs of numbers joined."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["compressed", "sort_key"]


def sort_key(name: str) -> tuple[str, int]:
    """Sorts ``L2`` before ``L10``."""
    prefix, number = _split(name)
    return prefix, -1 if number is None else number


def compressed(names: Iterable[str]) -> str:
    """Names with runs of numbers behind one prefix joined, and equal ones counted: ``L0-2, L11, x x2``."""
    numbers: dict[str, list[int | None]] = {}
    for name in names:
        prefix, number = _split(name)
        numbers.setdefault(prefix, []).append(number)
    return ", ".join(text for prefix, several in numbers.items() for text in _runs(prefix, several))


def _split(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.*?)(\d+)", name, re.DOTALL)
    return (match[1], int(match[2])) if match else (name, None)


def _runs(prefix: str, numbers: list[int | None]) -> Iterator[str]:
    counts: dict[int | None, int] = {}
    for number in numbers:
        counts[number] = counts.get(number, 0) + 1
    pending: list[int] = []
    for number, count in [*counts.items(), (None, 0)]:
        if pending and (number != pending[-1] + 1 or count > 1):
            yield f"{prefix}{pending[0]}" + (f"-{pending[-1]}" if len(pending) > 1 else "")
            pending = []
        if count > 1 or (number is None and count):
            yield f"{prefix}{'' if number is None else number}" + (f" x{count}" if count > 1 else "")
        elif number is not None:
            pending.append(number)
