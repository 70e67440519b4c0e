"""Which body a call runs.

The key of a call is made of code, of what the code is bound to or has captured (modules with their configuration and
their switches), and of simple arguments; never of tensors, so that equal layers share what is learned of them.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_remat.runtime.captured import looked_up
from torch_remat.runtime.tree import Static

__all__ = ["BodyKey", "Trained", "body_key"]


class BodyKey(NamedTuple):
    """Which body a call runs: its code, and what tells calls of that code apart."""

    code: Any
    details: Any

    def without_integers(self) -> Any:
        """The details without the values of integer arguments, whose combinations may be too many."""
        captured, circumstances, leaves = self.details
        return captured, circumstances, tuple([int if type(one) is tuple and one[0] is int else one for one in leaves])


class Trained(NamedTuple):
    """A module that a call leads to with what is below it, and the training flags of all."""

    modules: list[torch.nn.Module]
    flags: list[bool]

    def restore(self) -> Trained:
        """Set the flags. Returns what undoes that."""
        now = [one.training for one in self.modules]
        if now != self.flags:
            for one, flag in zip(self.modules, self.flags, strict=True):
                if one.training is not flag:
                    one.training = flag
        return Trained(self.modules, now)


class _Look:
    """How many values, and how deep, a key still looks; whether it tells all numbers apart, or small integers only."""

    __slots__ = ("depth", "left", "numbers", "trained")

    def __init__(self, trained: list[Trained], *, numbers: bool = True) -> None:
        self.left = 256
        self.depth = 12
        self.numbers = numbers
        self.trained = trained


_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, complex)
_NUMBERS = (int, float, complex)
_SMALL = 256


def body_key(function: Any, leaves: list[Any], *circumstances: Any, trained: list[Trained] | None = None) -> BodyKey:
    """The key of a call of ``function`` with these argument leaves; ``circumstances`` are what else changes plans.

    ``trained`` gets the modules that the call leads to.
    """
    trained = [] if trained is None else trained
    look = _Look(trained)
    code, captured = _callable_key(function, look)
    found = _globals_key(function, look)
    if found:
        captured = captured, found
    return BodyKey(code, (captured, circumstances, tuple([_leaf_key(leaf, trained) for leaf in leaves])))


def _globals_key(function: Any, look: _Look) -> tuple[Any, ...]:
    """Which functions and modules, and which switches, the global variables hold that the function itself looks up."""
    while isinstance(function, functools.partial):
        function = function.func
    if type(function) is types.MethodType:
        function = function.__func__
    if type(function) is not types.FunctionType:
        return ()
    space = function.__globals__
    return tuple([_global_key(space.get(name), look) for name in looked_up(function.__code__)[1]])


def _global_key(value: Any, look: _Look) -> Any:
    kind = type(value)
    if kind in _SWITCHES:
        return value
    if kind is types.FunctionType:
        return _callable_key(value, look)
    return _value_key(value, look) if isinstance(value, torch.nn.Module) else kind


def _leaf_key(leaf: Any, trained: list[Trained]) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.requires_grad
    kind = type(leaf)
    if kind is bool or kind is str or leaf is None:
        return leaf
    if kind is int or kind is float:
        return _number_key(kind, leaf)
    return _value_key(leaf.value if kind is Static else leaf, _Look(trained, numbers=False))


def _number_key(kind: type, number: Any) -> Any:
    """A number among the arguments.

    A small integer picks a layer, an item, a branch, and the body then reads something else. Others are positions,
    steps or amounts, new in every call. (A step is new 255 times, too: one observed call each.) Of an amount the sign
    counts: a term of a sum, or a branch, that is off while its weight is 0.
    """
    if kind is int and -_SMALL < number < _SMALL:
        return int, number
    return (float, (number > 0) - (number < 0)) if kind is float else kind


def _callable_key(function: Any, look: _Look) -> tuple[Any, Any]:
    """(code, what it is bound to or has captured)."""
    kind = type(function)
    if kind is types.FunctionType:
        if function.__closure__ is None and function.__defaults__ is None and function.__kwdefaults__ is None:
            return function.__code__, None
        cells = tuple([_cell_key(cell, look) for cell in function.__closure__ or ()])
        return function.__code__, (
            cells,
            _value_key(function.__defaults__, look),
            _value_key(function.__kwdefaults__, look),
        )
    if kind is types.MethodType:
        code, captured = _callable_key(function.__func__, look)
        return code, (captured, _value_key(function.__self__, look))
    if isinstance(function, functools.partial):
        code, captured = _callable_key(function.func, look)
        return code, (captured, _value_key(function.args, look), _value_key(function.keywords, look))
    return _type_of(function), _value_key(function, look)


def _type_of(value: Any) -> Any:
    """The type of an object; of a module with parametrizations that of before.

    Each such module has a class of its own, which leads to the module: held in a key, it would never be freed.
    """
    kind = type(value)
    parametrized = isinstance(value, torch.nn.Module) and "parametrizations" in value._modules
    return ("parametrized", kind.__bases__[0]) if parametrized else kind


def _cell_key(cell: Any, look: _Look) -> Any:
    try:
        return _value_key(cell.cell_contents, look)
    except ValueError:  # the cell is empty: its variable is not assigned yet
        return "empty cell"


def _value_key(value: Any, look: _Look) -> Any:
    look.left -= 1
    look.depth -= 1
    try:
        return _value_key_within(value, look)
    finally:
        look.depth += 1


def _value_key_within(value: Any, look: _Look) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return Tensor, value.requires_grad
    if kind in _VALUES or isinstance(value, type):
        return _number_key(kind, value) if kind in _NUMBERS and not look.numbers else (kind, value)
    if isinstance(value, torch.nn.Module):
        if kind in weakref.ProxyTypes:  # a parent that must not become a submodule, say
            value = value.modules.__self__
        return _digest(value, _module_parts, look), _switches_of(value, look)
    if look.left <= 0 or look.depth <= 0:
        return kind
    if kind is types.FunctionType or kind is types.MethodType or isinstance(value, functools.partial):
        return _callable_key(value, look)
    if isinstance(value, tuple) or kind is list:
        return kind, tuple([_value_key(item, look) for item in value])
    if kind is dict:
        return kind, tuple([(_value_key(key, look), _value_key(item, look)) for key, item in value.items()])
    if kind is types.BuiltinFunctionType:
        return kind, value.__name__, getattr(value.__self__, "__name__", None)
    digest = _digest(value, _object_parts, look)
    if type(digest) is _Digest and digest.modules:
        modules = [one for reference in digest.modules if (one := reference()) is not None]
        return digest, tuple([_switches_of(one, look) for one in modules])
    return digest


_digests: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _digest(value: Any, parts: Callable[[Any, _Look], Any], look: _Look) -> Any:
    """``parts`` of an object as a key, read when the object is first seen."""
    try:
        known = _digests.get(value)
        if known is None:
            outer, look.trained = look.trained, []
            try:
                known = _digests[value] = _Digest((_type_of(value), parts(value, look)))
                known.modules = tuple([weakref.ref(one.modules[0]) for one in look.trained])
            finally:
                look.trained = outer
        return known
    except TypeError:  # takes no weak reference, or cannot be hashed, as a dataclass that is compared by its fields
        return _parts_now(value, parts, look)


def _parts_now(value: Any, parts: Callable[[Any, _Look], Any], look: _Look) -> Any:
    """``parts`` of an object as it is now. It may count steps: of its numbers only small integers."""
    numbers, look.numbers = look.numbers, False
    try:
        return _type_of(value), parts(value, look)
    except TypeError:
        return _type_of(value)
    finally:
        look.numbers = numbers


def _module_parts(module: torch.nn.Module, look: _Look) -> Any:
    """Types and simple attributes of a module and everything below it."""
    return tuple(
        (
            path,
            _type_of(one),
            getattr(type(one), "forward", None),  # of a scripted module there is none
            tuple(
                (name, value)
                for name, value in sorted(vars(one).items())
                if name != "training" and not name.startswith("_") and type(value) in _VALUES
            ),
        )
        for path, one in module.named_modules()
    )


_SWITCHES = (bool, str, type(None))
_MOST_MODULES = 128  # of a module with more below it, only its own switches count
_MOST_STATES = 64  # of a module whose switches take more, none counts: it has a name for each step, say
_switches: weakref.WeakKeyDictionary[torch.nn.Module, _Switches] = weakref.WeakKeyDictionary()


def _switches_of(module: torch.nn.Module, look: _Look) -> Any:
    """What bool, string and None attributes (training flags, too) of a module and what is below it are now.

    A program turns a task, an adapter or a cache on and off with them, and the body then does something else.
    """
    known = _switches.get(module)
    if known is None:
        known = _switches[module] = _Switches()
    modules, state = known.now(module)
    look.trained.append(Trained(modules, state.flags))
    return state


class _State:
    """The values of switches at one time: one object for each that a module takes, so that keys compare by identity."""

    __slots__ = ("flags", "parts")

    def __init__(self, parts: Any, flags: list[bool]) -> None:
        self.parts = parts
        self.flags = flags

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _State) and self.parts == other.parts)


class _Switches:
    """Reads the switches of one module. Holds names and simple values, no object that may lead back to the module."""

    __slots__ = ("_alone", "_latest", "_readers", "_states", "_values")

    def __init__(self) -> None:
        self._alone = False  # too many modules, or a circle of them
        self._readers: list[tuple[Callable[[Any], Any], int]] = []  # of each module: its switches; how many attributes
        self._states: dict[Any, _State] = {}
        self._values: list[Any] = []  # of the latest call
        self._latest: _State | None = None

    def now(self, module: torch.nn.Module) -> tuple[list[torch.nn.Module], _State]:
        """The module with those below it, and their state."""
        try:
            modules, values = self._read(module)
        except (KeyError, IndexError):  # attributes or modules came or went
            self._learn(module)
            modules, values = self._read(module)
        latest = self._latest
        if latest is not None and len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
            return modules, latest
        parts = tuple([value if type(value) in _SWITCHES else type(value) for value in values])
        state = self._states.get(parts)
        if state is None:
            flags = [one.training for one in modules]
            many = len(self._states) >= _MOST_STATES
            state = _State(None if many else parts, flags)
            if not many:
                self._states[parts] = state
        self._latest = None
        if all(type(value) in _SWITCHES for value in values):
            self._values, self._latest = values, state
        return modules, state

    def _read(self, module: torch.nn.Module) -> tuple[list[torch.nn.Module], list[Any]]:
        modules, values = [module], []
        readers = self._readers
        for index, one in enumerate(modules):
            attributes = one.__dict__
            reader, size = readers[index]
            if len(attributes) != size:
                raise KeyError
            values += reader(attributes)
            if attributes["_modules"] and not self._alone:
                modules += [child for child in attributes["_modules"].values() if child is not None]
        return modules, values

    def _learn(self, module: torch.nn.Module) -> None:
        self._values, self._latest = [], None
        found = [module]
        for one in found:
            found += [child for child in one._modules.values() if child is not None]
            if len(found) > _MOST_MODULES:
                self._alone = True
                found = [module]
                break
        self._readers = [_reader(one) for one in found]


def _reader(module: torch.nn.Module) -> tuple[Callable[[Any], Any], int]:
    attributes = module.__dict__
    names = [
        name for name, value in attributes.items() if type(value) in _SWITCHES and (name[0] != "_" or value is not None)
    ]
    return operator.itemgetter(*names, *names[:1]), len(attributes)  # two at least, which makes a tuple


def _object_parts(value: Any, look: _Look) -> Any:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        names = [field.name for field in fields(value)] if is_dataclass(value) else []
        attributes = {name: getattr(value, name, None) for name in names}
    return tuple((name, _value_key(item, look)) for name, item in sorted(attributes.items()))


class _Digest:
    """A long part of a key that is hashed once."""

    __slots__ = ("_hash", "_parts", "modules")

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.modules: tuple[
            weakref.ref[torch.nn.Module], ...
        ] = ()  # that an object led to: their switches are not in it
        self._parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Digest) and self._hash == other._hash and self._parts == other._parts
        )
