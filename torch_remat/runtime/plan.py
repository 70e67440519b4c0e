"""What the runtime has learned about a body, and which body a call runs.

A :class:`Plan` belongs to one path through a body: the sequence of its region calls with the number of recomputed saves before
each. The registry maps a body's key to the plans of the paths seen so far. The key is made of code, module configuration, training
flag and simple arguments, never of tensors, so that equal layers share a plan.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_remat.runtime.tree import Static

__all__ = ["Plan", "Registry", "Step", "body_key", "registry"]


@dataclass(frozen=True, slots=True)
class Step:
    """One region call of a path."""

    name: str
    recompute: bool
    slots_before: int
    keep: frozenset[int] = frozenset()
    """Leaves of the output that replay reads: persisted. ``-1 - i`` stands for leaf ``i`` of the arguments, modified in place."""
    clone: frozenset[int] = frozenset()
    """Those of ``keep`` that the body modifies in place later: persisted as a private copy."""
    unchecked: frozenset[int] = frozenset()
    """Those of ``keep`` that a later SAVE region overwrites before anything reads them: their versions do not matter."""
    changed: frozenset[int] = frozenset()
    """Leaves of the arguments that the region modifies in place."""
    rebuild: frozenset[int] = frozenset()
    """Leaves of the arguments that the region saves and that replay can make: dropped and rebuilt."""
    readers: tuple[tuple[int, str], ...] = ()
    """Who reads each kept leaf first, for people."""


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
    watched: tuple[tuple[int, int], ...] = ()
    """(slot, output leaf) where an output of the checkpoint is itself saved: modifying it afterwards must be noticed."""
    externals: tuple[Any, ...] = ()
    """Where the parameters and buffers that replay reads are found; see ``externals.py``."""

    @property
    def path(self) -> Path:
        """What tells this path from others of the same body."""
        return (self.slots, *((step.name, step.recompute, step.slots_before) for step in self.steps))


Path = tuple[Any, ...]


class Known:
    """What is known of one body: plans, newest first, and paths that were taken without being observed."""

    __slots__ = ("plans", "unobserved")

    _TRIES = 8
    _PATHS = 16

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.unobserved: dict[Path, int] = {}

    def wants_observing(self) -> bool:
        """Whether the next call should be observed: a path is unknown, and was not waited for in vain too often."""
        return not self.plans or any(tries < self._TRIES for tries in self.unobserved.values())

    def learn(self, plan: Plan) -> None:
        """Store ``plan`` in place of an earlier one for the same path."""
        path = plan.path
        self.unobserved.pop(path, None)
        for other in self.unobserved:
            self.unobserved[other] += 1
        self.plans = [plan, *[one for one in self.plans if one.path != path]][: self._PATHS]

    def missed(self, path: Path) -> None:
        """A call took ``path``, for which there is no plan."""
        if len(self.unobserved) < self._PATHS:
            self.unobserved.setdefault(path, 0)


class Registry:
    """Everything known, by body key. Bounded: starts afresh when it holds more than ``limit`` keys."""

    def __init__(self, limit: int = 4096) -> None:
        self._known: dict[Any, Known] = {}
        self._limit = limit
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def known(self, key: Any) -> Known:
        """What is known of the body ``key``; empty at first."""
        found = self._known.get(key)
        if found is None:
            with self._lock:
                if len(self._known) >= self._limit:
                    self._known.clear()
                found = self._known.setdefault(key, Known())
        return found

    def forget(self, key: Any) -> None:
        """Drop what is known about ``key``, so that the next call is observed again."""
        with self._lock:
            self._known.pop(key, None)


registry = Registry()


_BUDGET = 256
_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, complex)


def body_key(function: Any, leaves: list[Any]) -> Any:
    """The key of a call of ``function`` with these argument leaves."""
    return _callable_key(function, [_BUDGET]), tuple([_leaf_key(leaf) for leaf in leaves])


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad
    kind = type(leaf)
    if kind is bool or kind is str or leaf is None:
        return leaf
    if kind is Static:
        return _value_key(leaf.value, [_BUDGET])
    if isinstance(leaf, (torch.nn.Module, types.FunctionType, types.MethodType, functools.partial)):
        return _value_key(leaf, [_BUDGET])
    return kind if kind in _VALUES else _identity_key(leaf)


def _callable_key(function: Any, budget: list[int]) -> Any:
    kind = type(function)
    if kind is types.MethodType:
        return function.__func__.__code__ if _has_code(function) else kind, _value_key(function.__self__, budget)
    if kind is types.FunctionType:
        return _function_key(function, budget)
    if isinstance(function, functools.partial):
        inner = _callable_key(function.func, budget)
        return inner, _value_key(function.args, budget), _value_key(function.keywords, budget)
    return _value_key(function, budget)


def _has_code(method: Any) -> bool:
    return isinstance(method.__func__, types.FunctionType)


def _function_key(function: Any, budget: list[int]) -> Any:
    closure = function.__closure__
    if closure is None and function.__defaults__ is None and function.__kwdefaults__ is None:
        return function.__code__
    cells = tuple([_cell_key(cell, budget) for cell in closure or ()])
    return function.__code__, cells, _value_key(function.__defaults__, budget), _value_key(function.__kwdefaults__, budget)


def _cell_key(cell: Any, budget: list[int]) -> Any:
    try:
        return _value_key(cell.cell_contents, budget)
    except ValueError:  # the cell is empty: its variable is not assigned yet
        return "empty cell"


def _value_key(value: Any, budget: list[int]) -> Any:
    budget[0] -= 1
    kind = type(value)
    if isinstance(value, Tensor):
        return Tensor, value.requires_grad
    if isinstance(value, torch.nn.Module):
        return _module_key(value)
    if kind in _VALUES or isinstance(value, type):
        return kind, value
    if budget[0] <= 0:
        return _identity_key(value)
    if kind is types.FunctionType or kind is types.MethodType or isinstance(value, functools.partial):
        return _callable_key(value, budget)
    if kind is tuple or kind is list:
        return kind, tuple([_value_key(item, budget) for item in value])
    if kind is dict:
        return kind, tuple([(_value_key(key, budget), _value_key(item, budget)) for key, item in value.items()])
    return _identity_key(value)


class _Identity:
    """An object as a key: equal while it lives, never equal to a later object at the same address."""

    __slots__ = ("_address", "_reference", "__weakref__")

    def __init__(self, value: Any) -> None:
        self._address = id(value)
        self._reference = weakref.ref(value)

    def __hash__(self) -> int:
        return self._address

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity) or other._address != self._address:
            return False
        mine = self._reference()
        return mine is not None and mine is other._reference()


def _identity_key(value: Any) -> Any:
    try:
        return _Identity(value)
    except TypeError:  # no weak references: builtin functions and the like, which do not change
        return type(value), getattr(value, "__qualname__", None)


_module_keys: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def _module_key(module: torch.nn.Module) -> Any:
    """Types and simple attributes of a module and everything below it, read once, and its training flag, read each time."""
    known = _module_keys.get(module)
    if known is None:
        parts: list[Any] = []
        for path, one in module.named_modules():
            simple = tuple(
                (name, value)
                for name, value in sorted(vars(one).items())
                if name != "training" and not name.startswith("_") and type(value) in (bool, int, float, str, type(None))
            )
            parts.append((path, type(one), type(one).forward, simple))
        known = _module_keys[module] = _Digest(tuple(parts))
    return known, module.training


class _Digest:
    """A long key that is hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Digest) and self._hash == other._hash and self._parts == other._parts)
