"""What the runtime has learned about a body.

A :class:`Plan` belongs to one path through a body: the sequence of its region calls with the number of recomputed saves
before each. The registry maps a body's key (``body_key.py``) to the plans of the paths seen so far.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch_remat.runtime.body_key import BodyKey

__all__ = ["Known", "Plan", "Registry", "Step", "merged", "path_of", "registry", "widened"]


@dataclass(frozen=True, slots=True)
class Step:
    """One region call of a path."""

    name: str
    recompute: bool
    slots_before: int
    keep: frozenset[int] = frozenset()
    """Leaves of the output that replay reads: persisted. ``-1 - i`` stands for leaf ``i`` of the arguments, modified in
    place.
    """
    clone: frozenset[int] = frozenset()
    """Those of ``keep`` that the body modifies in place later: persisted as a private copy."""
    shells: frozenset[int] = frozenset()
    """Those of ``keep`` that a later SAVE region overwrites before anything reads them: their versions do not matter.
    """
    given: tuple[tuple[int, Any, int], ...] = ()
    """Leaves of the output that are arguments, views of arguments or earlier leaves: position, kind, of which."""
    changed: frozenset[int] = frozenset()
    """Leaves of the arguments that the region modifies in place."""
    free: frozenset[int] = frozenset()
    """Leaves of the output that nobody reads and that lie in memory which the region's own saves keep.

    Replay gets the real tensor while that lives, which costs nothing and spares a placeholder.
    """
    rebuild: frozenset[int] = frozenset()
    """Leaves of the arguments that the region saves and that replay can make: dropped and rebuilt."""
    readers: tuple[tuple[int, str], ...] = ()
    """Who reads each kept leaf first, for people."""
    captures: bool = False
    """The region modifies in place what recomputed code made and it captured; on this path nobody reads that."""

    def starts(self, record: Any) -> bool:
        """Whether ``record``, of a region call that starts now, is of this step."""
        return (
            self.name == record.name and self.recompute is record.recompute and self.slots_before == record.slots_before
        )


def merged(steps: list[Step]) -> Step:
    """Keep what any of ``steps`` keeps: which path this call takes is not known yet."""
    first = steps[0]
    if all(step == first for step in steps):
        return first
    return Step(
        first.name,
        first.recompute,
        first.slots_before,
        frozenset().union(*[step.keep for step in steps]),
        frozenset().union(*[step.clone for step in steps]),
        frozenset.intersection(*[step.shells for step in steps]),
        (),
        frozenset.intersection(*[step.changed for step in steps]),
        frozenset.intersection(*[step.free for step in steps]),
        frozenset.intersection(*[step.rebuild for step in steps]),
        captures=any(step.captures for step in steps),
    )


def widened(step: Step, leaves: frozenset[int]) -> Step:
    """``step`` with copies of ``leaves`` kept, until it is known which path the call takes."""
    return replace(step, keep=step.keep | leaves, clone=step.clone | leaves)


@dataclass(frozen=True, slots=True)
class Plan:
    """What one path through a body needs from forward to backward."""

    steps: tuple[Step, ...]
    slots: int
    dead: frozenset[int] = frozenset()
    """Saves that nothing led to any more when forward had ended: what they are made from was not looked at."""
    inputs: frozenset[int] = frozenset()
    """Leaves of the arguments that replay reads."""
    to_end: bool = False
    """Replay must run to its end: the tail modifies a tensor that was saved before."""
    random: str | None = None
    """The first random operation of recomputed code, for the error when a call brings no state hook."""
    own_generators: bool = False
    """Recomputed code draws from generators other than the default ones: replay is watched."""
    externals: tuple[Any, ...] = ()
    """Where the parameters and buffers that replay reads are found; see ``externals.py``."""
    under_mode: bool = False
    """Some operation saves other tensors under a dispatch mode, as the observed call was: all calls run under one."""
    replaces: bool = False
    """The body put something in its place outside; if it read it, it read only what it put there."""
    updates: bool = False
    """SAVE regions changed something from outside in place; recomputed code read it afterwards only."""

    @property
    def path(self) -> Path:
        """What tells this path from others of the same body."""
        return path_of(self.steps, self.slots)

    def needing(self, region: str, leaf: int, *, clone: bool) -> Plan:
        """With ``leaf`` of what ``region`` returns kept, as a copy if the body modifies it."""
        found = frozenset((leaf,))
        return replace(
            self,
            steps=tuple(
                replace(step, keep=step.keep | found, clone=step.clone | found if clone else step.clone)
                if step.name == region
                else step
                for step in self.steps
            ),
        )


Path = tuple[Any, ...]


def path_of(steps: Iterable[Any], slots: int) -> Path:
    """The path of a call with these region calls, steps or records, and so many saves."""
    return (slots, *((step.name, step.recompute, step.slots_before, step.given) for step in steps))


class Known:
    """What is known of one body: plans, newest first, and paths that were taken without being observed."""

    __slots__ = (
        "_taught",
        "clones",
        "compiled",
        "layouts",
        "outside",
        "plans",
        "rare",
        "stays_observed",
        "suspect",
        "trusted",
        "under_mode",
        "unobserved",
    )

    _TRIES = 8
    _PATHS = 16

    def __init__(self, *, trusted: bool = True) -> None:
        self.trusted = trusted  # False: many bodies share this entry, and nothing is learned from any of them
        self.suspect = False  # a generator moved during a replay, perhaps in another thread: watch the next one
        self.stays_observed = 0  # a SAVE region hands on tensors where no plan can name the place: for so many calls
        self.plans: list[Plan] = []
        self.compiled = False  # recomputed code ran compiled code
        self.under_mode = False  # one of the plans needs a dispatch mode around the body
        self.clones: set[tuple[str, int]] = set()  # (region, leaf) of what is modified in place on some path
        self.rare: dict[str, frozenset[int]] = {}  # region -> leaves, modified in place on a path without a plan
        self.outside: tuple[Any, ...] = ()  # where the tensors are that a call leads to, parameters excepted
        self.layouts: list[Any] = []  # shape, dtype and device of each save in the latest call, for the next to share
        self.unobserved: dict[Path, int] = {}
        self._taught: dict[Path, set[tuple[str, int, bool]]] = {}  # (region, leaf, whether as a copy)

    def unlearned(self) -> Known:
        """An entry for one call from which nothing is learned; only what has to be copied is known."""
        entry = Known(trusted=False)
        entry.clones = self.clones
        return entry

    def wants_observing(self) -> bool:
        """Whether the next call should be observed: a path is unknown, and was not waited for in vain too often."""
        return self.trusted and (not self.plans or self.stays_observed > 0 or self._misses_a_path())

    def _misses_a_path(self) -> bool:
        return any(tries < self._TRIES for tries in self.unobserved.values())

    def learn(self, plan: Plan) -> None:
        """Store ``plan`` in place of an earlier one for the same path, with what errors have shown to be needed."""
        path = plan.path
        for region, leaf, clone in self._taught.get(path, ()):
            plan = plan.needing(region, leaf, clone=clone)
        self.stays_observed = max(self.stays_observed - 1, 0)
        self.unobserved.pop(path, None)
        for other in self.unobserved:
            self.unobserved[other] += 1
        self.plans = [plan, *[one for one in self.plans if one.path != path]][: self._PATHS]
        self.under_mode = any(one.under_mode for one in self.plans)
        self.clones |= {(step.name, leaf) for step in plan.steps for leaf in step.clone}

    def teach(self, path: Path, region: str, leaf: int, *, clone: bool = False) -> None:
        """An error has shown what replay needs on ``path``: later calls keep it, however rarely it is needed.

        The next calls are observed all the same: the program may have changed for good, and need less of the rest.
        """
        if clone:
            self.clones.add((region, leaf))
        if not self.trusted:
            return
        if clone and all(one.path != path for one in self.plans):
            self.rare[region] = self.rare.get(region, frozenset()) | {leaf}
        if len(self._taught) < self._PATHS:
            self._taught.setdefault(path, set()).add((region, leaf, clone))
        self.plans = [one.needing(region, leaf, clone=clone) if one.path == path else one for one in self.plans]
        self.stay_observed()

    def stay_observed(self) -> None:
        """Observe the next calls, whichever paths they take.

        A SAVE region handed on a tensor where no path leads, or a call did on its path what no plan knows of.
        """
        self.stays_observed = self._TRIES

    def missed(self, path: Path) -> None:
        """A call took ``path``, for which there is no plan."""
        if self.trusted and len(self.unobserved) < self._PATHS:
            self.unobserved.setdefault(path, 0)


class Registry:
    """Everything known, by body key.

    Bounded: where the captured values of one body never stop changing, calls beyond the bound keep everything.
    """

    def __init__(self, per_code: int = 1024, codes: int = 1024) -> None:
        self._known: dict[Any, dict[Any, Known]] = {}
        self._per_code = per_code
        self._codes = codes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(details) for details in self._known.values())

    def known(self, key: BodyKey) -> Known:
        """What is known of the body ``key``; empty at first."""
        details = self._known.get(key.code)
        found = None if details is None else details.get(key.details)
        return self._new(key) if found is None else found

    def _new(self, key: BodyKey) -> Known:
        with self._lock:
            if key.code not in self._known and len(self._known) >= self._codes:
                self._known.clear()
            details = self._known.setdefault(key.code, {})
            if len(details) < self._per_code:
                return details.setdefault(key.details, Known())
            coarse = key.without_integers()
            if coarse in details or (coarse != key.details and len(details) < 2 * self._per_code):
                return details.setdefault(coarse, Known())
            if None not in details:
                warnings.warn(
                    f"torch_remat has seen {self._per_code} variants of the checkpointed function "
                    f"{_name_of(key.code)}: values "
                    f"that it captures change with every call. From here on its checkpoints keep every output of their "
                    f"SAVE "
                    f"regions. To fix: pass changing numbers to the function as arguments.",
                    stacklevel=2,
                )
            return details.setdefault(None, Known(trusted=False))

    def forget(self, key: BodyKey) -> None:
        """Drop what is known about ``key``, so that the next call is observed again."""
        with self._lock:
            self._known.pop(key.code, None)


def _name_of(code: Any) -> str:
    return (
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})" if hasattr(code, "co_qualname") else repr(code)
    )


registry = Registry()
