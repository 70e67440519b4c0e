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

from torch_remat.errors import ModifiedError, display_name

__all__ = ["Holder", "Seen", "changed", "find", "locate"]

Getter = Callable[[Any], Any]
_PLAIN = (Tensor, torch.nn.Parameter)


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
    for name, value, getter in _reachable(function, "", _itself, 3, set()):
        if isinstance(value, Tensor):
            if take(value):
                found.append(Holder(name, getter, ()))
            continue
        entries = tuple(entry for entry, tensor in _module_entries(name, value) if take(tensor))
        if entries:
            found.append(Holder(name, getter, entries))
    return tuple(found)


def changed(checkpoint: str | None, name: str) -> ModifiedError:
    """The error for an external tensor that replay would read and that is not as forward left it."""
    return ModifiedError(
        f"{name}, which the body of checkpoint {display_name(checkpoint)} reads, was modified or replaced between "
        f"forward and backward; a replay would compute with the new value.\n"
        f"To fix: call backward before the optimizer step (or whatever changes {name})."
    )


class Seen:
    """The external tensors of one call that one holder led to, and their version counters then."""

    __slots__ = ("places", "tensors", "versions")

    def __init__(self, places: list[Place], tensors: list[Tensor]) -> None:
        self.places = places
        self.tensors = tensors
        self.versions = [tensor._version for tensor in tensors]

    def changed(self) -> str | None:
        """The name of one that was modified or replaced since; None when all are as they were."""
        if [tensor._version for tensor in self.tensors] == self.versions:
            for place, tensor in zip(self.places, self.tensors, strict=True):
                if place.now() is not tensor:
                    break
            else:
                return None
        return next((name for name, _ in self.all_changed()), None)

    def all_changed(self) -> Iterator[tuple[str, Any]]:
        """Names of those that were modified or replaced since, and what is there now."""
        if [tensor._version for tensor in self.tensors] != self.versions:
            for place, tensor, version in zip(self.places, self.tensors, self.versions, strict=True):
                if tensor._version != version:
                    yield place.name, tensor
        for place, tensor in zip(self.places, self.tensors, strict=True):
            now = place.now()
            if now is not tensor and not (
                place.is_parameter and (type(now) not in _PLAIN or type(tensor) not in _PLAIN)
            ):
                yield place.name, now


class Place(NamedTuple):
    """Where an external tensor is: its name, a call that gets it, and whether it is a module's parameter.

    FSDP swaps a parameter for a sharded one, of another type, between forward and backward.
    """

    name: str
    now: Callable[[], Any]
    is_parameter: bool


def locate(function: Any, holders: tuple[Holder, ...]) -> list[Seen]:
    """What ``holders`` lead to on ``function``, as far as it is there."""
    found: list[Seen] = []
    for holder in holders:
        try:
            value = holder.getter(function)
            if not holder.entries:
                places = [Place(holder.name, functools.partial(_now, holder.getter, function), False)]
                found.append(Seen(places, [value]))
            else:
                places = _places(value, holder.entries)
                found.append(Seen(places, [place.now() for place in places]))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
            continue  # another object of the same code is built differently, or holds an inference tensor
    return found


def _now(getter: Getter, function: Any) -> Any:
    try:
        return getter(function)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


_known_places: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, list[Place]]] = weakref.WeakKeyDictionary()


def _places(module: torch.nn.Module, entries: tuple[Entry, ...]) -> list[Place]:
    """Where ``entries`` are on ``module``; walked once per module."""
    known = _known_places.get(module)
    if known is not None and known[0] is entries:
        return known[1]
    places = []
    for entry in entries:
        owner: Any = module
        for part in entry.path:
            owner = owner._modules[part]
        now = functools.partial(getattr(owner, entry.kind).get, entry.key)
        places.append(Place(entry.name, now, entry.kind == "_parameters"))
    _known_places[module] = (entries, places)
    return places


def _module_entries(name: str, module: torch.nn.Module) -> Iterator[tuple[Entry, Tensor | None]]:
    prefix = f"{name}." if name else ""
    for path, one in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(one, kind).items():
                full = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                yield Entry(full, tuple(path.split(".")) if path else (), kind, key), tensor


def _itself(value: Any) -> Any:
    return value


def _reachable(value: Any, name: str, getter: Getter, depth: int, seen: set[int]) -> Iterator[tuple[str, Any, Getter]]:
    """Tensors and modules that ``value`` is, is bound to, has captured or holds."""
    if isinstance(value, (Tensor, torch.nn.Module)):
        yield name, value, getter
        return
    if depth == 0:
        return
    if isinstance(value, types.MethodType):
        yield from _reachable(value.__self__, name, functools.partial(_attribute, getter, "__self__"), depth - 1, seen)
    elif isinstance(value, functools.partial):
        yield from _reachable(value.func, name, functools.partial(_attribute, getter, "func"), depth - 1, seen)
        yield from _reachable(value.args, name, functools.partial(_attribute, getter, "args"), depth - 1, seen)
    elif isinstance(value, types.FunctionType):
        if id(value) in seen:
            return  # functions call each other
        seen.add(id(value))
        for index, cell in enumerate(value.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            variable = value.__code__.co_freevars[index]
            yield from _reachable(content, variable, functools.partial(_cell, getter, index), depth - 1, seen)
        for variable in value.__code__.co_names:
            if variable in value.__globals__:
                content = value.__globals__[variable]
                if not isinstance(content, (types.ModuleType, type)):
                    deep = depth - 1 if isinstance(content, types.FunctionType) else 1
                    yield from _reachable(content, variable, functools.partial(_global, getter, variable), deep, seen)
    elif isinstance(value, (list, tuple)) and len(value) <= _MANY:
        for index, item in enumerate(value):
            yield from _reachable(item, f"{name}[{index}]", functools.partial(_item, getter, index), depth - 1, seen)
    elif isinstance(value, dict) and len(value) <= _MANY:
        for key, item in value.items():
            yield from _reachable(item, f"{name}[{key!r}]", functools.partial(_item, getter, key), depth - 1, seen)
    elif isinstance(vars_of := getattr(value, "__dict__", None), dict) and len(vars_of) <= _MANY:
        for key, item in vars_of.items():
            full = f"{name}.{key}" if name else key
            yield from _reachable(item, full, functools.partial(_attribute, getter, key), depth - 1, seen)


_MANY = 64  # larger containers are not searched


def _attribute(getter: Getter, name: str, function: Any) -> Any:
    return getattr(getter(function), name)


def _item(getter: Getter, key: Any, function: Any) -> Any:
    return getter(function)[key]


def _cell(getter: Getter, index: int, function: Any) -> Any:
    return getter(function).__closure__[index].cell_contents


def _global(getter: Getter, variable: str, function: Any) -> Any:
    return getter(function).__globals__[variable]
