"""Which modules of a block are regions: shell patterns over module paths, decided before anything is attached.

Knows paths and patterns only; ``policy.py`` finds the modules and attaches the calls.
"""

from __future__ import annotations

import difflib
import enum
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_remat.errors import InvalidTypeError, InvalidValueError

__all__ = ["Rule", "Verdict", "checked_overrides", "checked_patterns", "decide", "matches", "nearest"]


class Rule(NamedTuple):
    """The patterns that hold for one block."""

    save: tuple[str, ...]
    recompute: tuple[str, ...]
    required: tuple[str, ...]


class Verdict(enum.Enum):
    """What a call of a module becomes."""

    SAVE = "save"
    RECOMPUTE = "recompute"


class _Status(enum.IntEnum):
    """What the patterns say of a path, inherited by everything below it."""

    BARE = 0
    SAVE = 1
    RECOMPUTE = 2
    REQUIRED = 3


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a shell pattern matches the whole of ``path``; ``*`` crosses dots."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def nearest(wanted: str, paths: Iterable[str]) -> str:
    """The three known paths that look most like ``wanted``, for people."""
    found = difflib.get_close_matches(wanted, dict.fromkeys(paths), n=3, cutoff=0.0)
    return ", ".join(map(repr, found)) if found else "none, there is no module at all"


def decide(callable_paths: Mapping[str, bool], rule: Rule) -> dict[str, Verdict]:
    """The regions among the module paths of one block.

    ``callable_paths`` has every path, parents before children, and whether its module can be called (a list of modules
    cannot). What a pattern says of a module holds for everything below it; among patterns ``required`` wins over
    ``recompute`` and that over ``save``. Only the outermost module becomes a region. A module with something recomputed
    below it is not saved as a whole: its other submodules are.
    """
    status = {}
    for path in callable_paths:
        above = status.get(path.rpartition(".")[0], _Status.BARE)
        status[path] = max(above, _status(path, rule))
    opened = {
        above for path, one in status.items() if one is _Status.RECOMPUTE for above in _above(path) if above in status
    }
    found: dict[str, Verdict] = {}
    for path, can_be_called in callable_paths.items():
        if not can_be_called or (path in opened and status[path] is not _Status.RECOMPUTE):
            continue
        outer = next((found[above] for above in _above(path) if above in found), None)
        if status[path] in (_Status.SAVE, _Status.REQUIRED) and outer is not Verdict.SAVE:
            found[path] = Verdict.SAVE
        elif status[path] is _Status.RECOMPUTE and outer is None:
            found[path] = Verdict.RECOMPUTE
    return found


def _status(path: str, rule: Rule) -> _Status:
    if matches(path, rule.required):
        return _Status.REQUIRED
    if matches(path, rule.recompute):
        return _Status.RECOMPUTE
    return _Status.SAVE if matches(path, rule.save) else _Status.BARE


def _above(path: str) -> list[str]:
    """The paths of the modules around ``path``, innermost first."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def checked_patterns(name: str, patterns: Any) -> tuple[str, ...]:
    """``patterns`` as a tuple, if it is a sequence of non-empty strings."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise InvalidTypeError(
            f"apply_policy expects {name} to be a list of patterns, got {patterns!r}. "
            f'To fix: {name}=["attention.wo", "feed_forward.*"].'
        )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidTypeError(f"apply_policy expects every pattern in {name} to be a str, got {pattern!r}.")
        if not pattern:
            raise InvalidValueError(
                f"apply_policy got an empty pattern in {name}. To fix: name a module path relative to a block."
            )
    return tuple(patterns)


def checked_overrides(
    overrides: Any, save: tuple[str, ...], recompute: tuple[str, ...], required: tuple[str, ...]
) -> dict[str, Rule | None]:
    """Block pattern -> its rule, None for blocks that are no checkpoints; what an override leaves out is as given."""
    if not isinstance(overrides, Mapping):
        raise InvalidTypeError(
            f"apply_policy expects overrides to be a mapping, got {overrides!r}. "
            f'To fix: overrides={{"layers.31": {{"save": []}}}}.'
        )
    rules: dict[str, Rule | None] = {}
    for block, override in overrides.items():
        if override is None:
            rules[block] = None
            continue
        if not isinstance(override, Mapping) or not set(override) <= {"save", "recompute"}:
            raise InvalidValueError(
                f'apply_policy expects the override of {block!r} to be a mapping with "save" and "recompute", or None '
                f"for no checkpoint, got {override!r}."
            )
        rules[block] = Rule(
            checked_patterns(f"save of the override {block!r}", override.get("save", save)),
            checked_patterns(f"recompute of the override {block!r}", override.get("recompute", recompute)),
            required,
        )
    return rules
