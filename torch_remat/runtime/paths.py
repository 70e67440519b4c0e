"""What a call leads to: a search from its callable and the objects among its arguments, with the way to each find.

The way is a getter, which finds what is there in a later call of the same code.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_remat.runtime.tree import Static

__all__ = ["Getter", "Root", "joined", "search"]

_DEPTH = 3


class Root:
    """Where all paths of one call start: the callable, and its arguments, None in place of tensors.

    Replay puts here what it runs and passes, whose variables hold what they held in forward.
    """

    __slots__ = ("arguments", "function")

    def __init__(self, function: Any, arguments: list[Any]) -> None:
        self.function = function
        self.arguments = arguments


Getter = Callable[[Root], Any]


def joined(*names: str) -> str:
    """The names that are not empty, with dots between them."""
    return ".".join([name for name in names if name])


Found = Iterator[tuple[str, Any, Getter]]
Step = Callable[[Getter], Getter]
_MANY = 64  # larger containers are not searched
_NO_TENSORS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type, types.ModuleType, torch.Size, torch.dtype, torch.device}
)
_ENTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def search(root: Root) -> Found:
    """Tensors and modules that a call leads to."""
    seen: dict[int, int] = {}
    yield from _reachable(root.function, "", operator.attrgetter("function"), _DEPTH, seen)
    for index, argument in enumerate(root.arguments):
        if type(argument) not in _NO_TENSORS:
            getter = functools.partial(_argument, index)
            yield from _reachable(argument, f"input {index}", getter, _DEPTH, seen)


def _reachable(value: Any, name: str, getter: Getter, depth: int, seen: dict[int, int]) -> Found:
    """Tensors and modules that ``value`` is, is bound to, has captured or holds."""
    if isinstance(value, Tensor):
        yield name, value, getter
        return
    is_module = isinstance(value, torch.nn.Module)
    if type(value) in _NO_TENSORS or seen.get(id(value), 0) >= (1 if is_module else max(depth, 1)):
        return
    if is_module:
        yield name, value, getter
        yield from _module_attributes(value, name, getter, seen)
    elif depth > 0:
        seen[id(value)] = depth
        for label, item, step in _inside(value, name):
            yield from _reachable(item, label, step(getter), depth - 1, seen)
        if isinstance(value, types.FunctionType):
            for variable, content in _globals(value):
                at = functools.partial(_global, getter, variable)
                yield from _reachable(
                    content, variable, at, depth - 1 if isinstance(content, types.FunctionType) else 1, seen
                )


def _module_attributes(module: torch.nn.Module, name: str, getter: Getter, seen: dict[int, int]) -> Found:
    """What the modules below ``module`` hold besides parameters and buffers, and what their code finds by itself."""
    for path, one in module.named_modules():
        if id(one) in seen:
            continue
        seen[id(one)] = 1
        owner = functools.partial(_submodule, getter, tuple(path.split(".")) if path else ())
        for key, item in vars(one).items():
            if key not in _ENTRIES:
                at = functools.partial(_attribute, owner, key)
                yield from _reachable(item, joined(name, path, key), at, _DEPTH - 1, seen)
        code = functools.partial(_attribute, functools.partial(_type, owner), "forward")
        forward = getattr(type(one), "forward", None)  # of a scripted module there is none
        yield from _reachable(forward, joined(name, path), code, _DEPTH - 1, seen)


def _inside(value: Any, name: str) -> Iterator[tuple[str, Any, Step]]:
    """The values in ``value``: name, value, how to get there from ``value``."""
    if isinstance(value, types.MethodType):
        for part in ("__self__", "__func__"):
            yield name, getattr(value, part), _step(_attribute, part)
    elif isinstance(value, functools.partial):
        for part in ("func", "args", "keywords"):
            yield name, getattr(value, part), _step(_attribute, part)
    elif isinstance(value, types.FunctionType):
        yield from _in_function(value, name)
    elif isinstance(value, Static):
        for index, item in enumerate(value.leaves[:_MANY]):
            yield f"{name}[{index}]", item, _step(_leaf, index)
    elif isinstance(value, dict):
        if len(value) <= _MANY:
            for key, item in value.items():
                yield f"{name}[{key!r}]", item, _step(_item, key)
    elif isinstance(value, (list, tuple, collections.deque)):
        if len(value) <= _MANY:
            for index, item in enumerate(value):
                yield f"{name}[{index}]", item, _step(_item, index)
    elif isinstance(value, (set, frozenset)):
        if len(value) <= _MANY:
            for index, item in enumerate(value):
                yield f"an item of {name}", item, _step(_member, index)
    else:
        held = getattr(value, "__dict__", None)
        names = list(held) if isinstance(held, dict) else []
        names += [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
        if len(names) <= _MANY:
            for key in names:
                yield joined(name, key), getattr(value, key, None), _step(_attribute, key)


def _in_function(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any, Step]]:
    for index, cell in enumerate(function.__closure__ or ()):
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield function.__code__.co_freevars[index], content, _step(_cell, index)
    for part in ("__defaults__", "__kwdefaults__"):
        yield joined(name, part), getattr(function, part), _step(_attribute, part)


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for variable in function.__code__.co_names:
        content = function.__globals__.get(variable)
        if not isinstance(content, type):
            yield variable, content


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple([name for name in names if not name.startswith("__")])


# --- Getters: each takes what came before it, and a root


def _step(getting: Callable[..., Any], key: Any) -> Step:
    return lambda getter: functools.partial(getting, getter, key)


def _argument(index: int, root: Root) -> Any:
    return root.arguments[index]


def _attribute(getter: Getter, name: str, root: Root) -> Any:
    return getattr(getter(root), name)


def _type(getter: Getter, root: Root) -> Any:
    return type(getter(root))


def _submodule(getter: Getter, path: tuple[str, ...], root: Root) -> Any:
    owner = getter(root)
    for part in path:
        owner = owner._modules[part]
    return owner


def _item(getter: Getter, key: Any, root: Root) -> Any:
    value = getter(root)
    if isinstance(value, dict) and key not in value:
        raise KeyError(key)  # a defaultdict must not grow
    return value[key]


def _leaf(getter: Getter, index: int, root: Root) -> Any:
    return getter(root).leaves[index]


def _member(getter: Getter, index: int, root: Root) -> Any:
    return list(getter(root))[index]


def _cell(getter: Getter, index: int, root: Root) -> Any:
    return getter(root).__closure__[index].cell_contents


def _global(getter: Getter, variable: str, root: Root) -> Any:
    return getter(root).__globals__[variable]
