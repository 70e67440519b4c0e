"""Parameters, buffers and captured tensors that a body reads: found once, by path, on the callable itself.

The first observed call gives the storages that replay reads and that the body did not make. :func:`find` says where
each is found from the body's callable; :func:`locate` finds the tensors of a later call there, so that their version
counters can be compared between forward and replay. What no path leads to (a tensor in a global list, say) is not
watched unless it is saved.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Holder", "find", "locate"]

Getter = Callable[[Any], Any]


class Entry(NamedTuple):
    """A parameter or buffer of a module: full name, path of its owner, which of the owner's dicts, key there."""

    name: str
    path: tuple[str, ...]
    kind: str
    key: str


class Holder(NamedTuple):
    """A tensor (no entries) or module that is reachable from a callable."""

    name: str
    getter: Getter
    entries: tuple[Entry, ...]


def find(function: Any, wanted: Callable[[Tensor], bool]) -> tuple[Holder, ...]:
    """Where the tensors are for which ``wanted`` holds, as seen from ``function``; each once."""
    seen: set[int] = set()

    def take(tensor: Tensor | None) -> bool:
        if tensor is None or id(tensor) in seen or not wanted(tensor):
            return False
        seen.add(id(tensor))
        return True

    found = []
    for name, value, getter in _reachable(function, "", _itself, 3):
        if isinstance(value, Tensor):
            if take(value):
                found.append(Holder(name, getter, ()))
            continue
        entries = tuple(entry for entry, tensor in _module_entries(name, value) if take(tensor))
        if entries:
            found.append(Holder(name, getter, entries))
    return tuple(found)


def locate(function: Any, holders: tuple[Holder, ...]) -> list[tuple[str, Tensor, int]]:
    """Name, tensor and version counter of what ``holders`` lead to on ``function``, as far as it is still there."""
    found = []
    for holder in holders:
        try:
            value = holder.getter(function)
            if not holder.entries:
                found.append((holder.name, value, value._version))
                continue
            for name, owner, key in _resolved(value, holder.entries):
                tensor = owner[key]
                found.append((name, tensor, tensor._version))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
            continue  # another object of the same code is built differently, or holds an inference tensor
    return found


_owners: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, list[tuple[str, dict[str, Any], str]]]]
_owners = weakref.WeakKeyDictionary()


def _resolved(module: torch.nn.Module, entries: tuple[Entry, ...]) -> list[tuple[str, dict[str, Any], str]]:
    """The dicts that hold ``entries`` on ``module``; walked once per module."""
    known = _owners.get(module)
    if known is not None and known[0] is entries:
        return known[1]
    found = []
    for entry in entries:
        owner: Any = module
        for part in entry.path:
            owner = owner._modules[part]
        found.append((entry.name, getattr(owner, entry.kind), entry.key))
    _owners[module] = (entries, found)
    return found


def _module_entries(name: str, module: torch.nn.Module) -> Iterator[tuple[Entry, Tensor | None]]:
    prefix = f"{name}." if name else ""
    for path, one in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(one, kind).items():
                full = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                yield Entry(full, tuple(path.split(".")) if path else (), kind, key), tensor


def _itself(value: Any) -> Any:
    return value


def _reachable(value: Any, name: str, getter: Getter, depth: int) -> Iterator[tuple[str, Any, Getter]]:
    """Tensors and modules that ``value`` is, is bound to or has captured."""
    if isinstance(value, (Tensor, torch.nn.Module)):
        yield name, value, getter
    elif depth == 0:
        return
    elif isinstance(value, types.MethodType):
        yield from _reachable(value.__self__, name, functools.partial(_bound_to, getter), depth - 1)
    elif isinstance(value, functools.partial):
        yield from _reachable(value.func, name, functools.partial(_partial_function, getter), depth - 1)
        for index, item in enumerate(value.args):
            yield from _reachable(
                item, f"argument {index}", functools.partial(_partial_argument, getter, index), depth - 1
            )
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            variable = value.__code__.co_freevars[index]
            yield from _reachable(content, variable, functools.partial(_cell, getter, index), depth - 1)
        for variable in value.__code__.co_names:
            if isinstance(value.__globals__.get(variable), (Tensor, torch.nn.Module)):
                yield variable, value.__globals__[variable], functools.partial(_global, getter, variable)


def _bound_to(getter: Getter, function: Any) -> Any:
    return getter(function).__self__


def _partial_function(getter: Getter, function: Any) -> Any:
    return getter(function).func


def _partial_argument(getter: Getter, index: int, function: Any) -> Any:
    return getter(function).args[index]


def _cell(getter: Getter, index: int, function: Any) -> Any:
    return getter(function).__closure__[index].cell_contents


def _global(getter: Getter, variable: str, function: Any) -> Any:
    return getter(function).__globals__[variable]
