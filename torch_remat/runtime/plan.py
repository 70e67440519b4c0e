"""What the runtime has learned about a body, and which body a call runs.

A :class:`Plan` belongs to one path through a body: the sequence of its region calls with the number of recomputed saves
before each. The registry maps a body's key to the plans of the paths seen so far. The key is made of code, module
configuration, training flag and simple arguments, never of tensors, so that equal layers share a plan.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_remat.runtime.tree import Static

__all__ = ["BodyKey", "Known", "Plan", "Registry", "Step", "body_key", "merged", "registry"]


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
        frozenset.intersection(*[step.changed for step in steps]),
        frozenset.intersection(*[step.free for step in steps]),
        frozenset.intersection(*[step.rebuild for step in steps]),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What one path through a body needs from forward to backward."""

    steps: tuple[Step, ...]
    slots: int
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

    @property
    def path(self) -> Path:
        """What tells this path from others of the same body."""
        return (self.slots, *((step.name, step.recompute, step.slots_before) for step in self.steps))


Path = tuple[Any, ...]


class Known:
    """What is known of one body: plans, newest first, and paths that were taken without being observed."""

    __slots__ = ("layouts", "plans", "stays_observed", "suspect", "trusted", "under_mode", "unobserved")

    _TRIES = 8
    _PATHS = 16

    def __init__(self, *, trusted: bool = True) -> None:
        self.trusted = trusted  # False: many bodies share this entry, and nothing is learned from any of them
        self.suspect = False  # a generator moved during a replay, perhaps in another thread: watch the next one
        self.stays_observed = 0  # a SAVE region hands on tensors where no plan can name the place: for so many calls
        self.plans: list[Plan] = []
        self.under_mode = False  # one of the plans needs a dispatch mode around the body
        self.layouts: list[Any] = []  # shape, dtype and device of each save in the latest call, for the next to share
        self.unobserved: dict[Path, int] = {}

    def wants_observing(self) -> bool:
        """Whether the next call should be observed: a path is unknown, and was not waited for in vain too often."""
        return self.trusted and (not self.plans or self.stays_observed > 0 or self._misses_a_path())

    def _misses_a_path(self) -> bool:
        return any(tries < self._TRIES for tries in self.unobserved.values())

    def learn(self, plan: Plan) -> None:
        """Store ``plan`` in place of an earlier one for the same path."""
        path = plan.path
        self.stays_observed = max(self.stays_observed - 1, 0)
        self.unobserved.pop(path, None)
        for other in self.unobserved:
            self.unobserved[other] += 1
        self.plans = [plan, *[one for one in self.plans if one.path != path]][: self._PATHS]
        self.under_mode = any(one.under_mode for one in self.plans)

    def stay_observed(self) -> None:
        """A SAVE region handed on a tensor where no path leads: on any path of this body it may do so again."""
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


class BodyKey(NamedTuple):
    """Which body a call runs: its code, and what tells calls of that code apart."""

    code: Any
    details: Any

    def without_integers(self) -> Any:
        """The details without the values of integer arguments, whose combinations may be too many."""
        captured, circumstances, leaves = self.details
        return captured, circumstances, tuple([int if type(one) is tuple and one[0] is int else one for one in leaves])


registry = Registry()


def _budget(*, numbers: bool = True) -> list[int]:
    """How many values, and how deep, a key looks; whether it tells all numbers apart, or small integers only."""
    return [256, 12, numbers]


_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, complex)
_NUMBERS = (int, float, complex)
_SMALL = 256


def body_key(function: Any, leaves: list[Any], *circumstances: Any) -> BodyKey:
    """The key of a call of ``function`` with these argument leaves; ``circumstances`` are what else changes plans."""
    code, captured = _callable_key(function, _budget())
    return BodyKey(code, (captured, circumstances, tuple([_leaf_key(leaf) for leaf in leaves])))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad
    kind = type(leaf)
    if kind is bool or kind is str or leaf is None:
        return leaf
    if kind is int or kind is float:
        return _number_key(kind, leaf)
    return _value_key(leaf.value if kind is Static else leaf, _budget(numbers=False))


def _number_key(kind: type, number: Any) -> Any:
    """A number among the arguments.

    A small integer picks a layer, an item, a branch, and the body then reads something else. Others are positions,
    steps or amounts, new in every call. (A step is new 255 times, too: one observed call each.)
    """
    return (int, number) if kind is int and -_SMALL < number < _SMALL else kind


def _callable_key(function: Any, budget: list[int]) -> tuple[Any, Any]:
    """(code, what it is bound to or has captured)."""
    kind = type(function)
    if kind is types.FunctionType:
        if function.__closure__ is None and function.__defaults__ is None and function.__kwdefaults__ is None:
            return function.__code__, None
        cells = tuple([_cell_key(cell, budget) for cell in function.__closure__ or ()])
        return function.__code__, (
            cells,
            _value_key(function.__defaults__, budget),
            _value_key(function.__kwdefaults__, budget),
        )
    if kind is types.MethodType:
        code, captured = _callable_key(function.__func__, budget)
        return code, (captured, _value_key(function.__self__, budget))
    if isinstance(function, functools.partial):
        code, captured = _callable_key(function.func, budget)
        return code, (captured, _value_key(function.args, budget), _value_key(function.keywords, budget))
    return type(function), _value_key(function, budget)


def _cell_key(cell: Any, budget: list[int]) -> Any:
    try:
        return _value_key(cell.cell_contents, budget)
    except ValueError:  # the cell is empty: its variable is not assigned yet
        return "empty cell"


def _value_key(value: Any, budget: list[int]) -> Any:
    budget[0] -= 1
    budget[1] -= 1
    try:
        return _value_key_within(value, budget)
    finally:
        budget[1] += 1


def _value_key_within(value: Any, budget: list[int]) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return Tensor, value.requires_grad
    if kind in _VALUES or isinstance(value, type):
        return _number_key(kind, value) if kind in _NUMBERS and not budget[2] else (kind, value)
    if isinstance(value, torch.nn.Module):
        return _digest(value, _module_parts, budget), value.training
    if budget[0] <= 0 or budget[1] <= 0:
        return kind
    if kind is types.FunctionType or kind is types.MethodType or isinstance(value, functools.partial):
        return _callable_key(value, budget)
    if isinstance(value, tuple) or kind is list:
        return kind, tuple([_value_key(item, budget) for item in value])
    if kind is dict:
        return kind, tuple([(_value_key(key, budget), _value_key(item, budget)) for key, item in value.items()])
    if kind is types.BuiltinFunctionType:
        return kind, value.__name__, getattr(value.__self__, "__name__", None)
    return _digest(value, _object_parts, budget)


_digests: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _digest(value: Any, parts: Callable[[Any, list[int]], Any], budget: list[int]) -> Any:
    """``parts`` of an object as a key, read when the object is first seen."""
    try:
        known = _digests.get(value)
        if known is None:
            known = _digests[value] = _Digest((type(value), parts(value, budget)))
        return known
    except TypeError:  # takes no weak reference, or cannot be hashed, as a dataclass that is compared by its fields
        return _parts_now(value, parts, budget)


def _parts_now(value: Any, parts: Callable[[Any, list[int]], Any], budget: list[int]) -> Any:
    """``parts`` of an object as it is now. It may count steps: of its numbers only small integers."""
    numbers, budget[2] = budget[2], False
    try:
        return type(value), parts(value, budget)
    except TypeError:
        return type(value)
    finally:
        budget[2] = numbers


def _module_parts(module: torch.nn.Module, budget: list[int]) -> Any:
    """Types and simple attributes of a module and everything below it."""
    return tuple(
        (
            path,
            type(one),
            type(one).forward,
            tuple(
                (name, value)
                for name, value in sorted(vars(one).items())
                if name != "training" and not name.startswith("_") and type(value) in _VALUES
            ),
        )
        for path, one in module.named_modules()
    )


def _object_parts(value: Any, budget: list[int]) -> Any:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        names = [field.name for field in fields(value)] if is_dataclass(value) else []
        attributes = {name: getattr(value, name, None) for name in names}
    return tuple((name, _value_key(item, budget)) for name, item in sorted(attributes.items()))


class _Digest:
    """A long key that is hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Digest) and self._hash == other._hash and self._parts == other._parts
        )
