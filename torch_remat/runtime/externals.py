"""Parameters, buffers and captured tensors that a body reads: found once, by path, on the callable itself.

The first observed call gives the storages that replay reads and that the body did not make. :func:`paths` says where each is
found from the body's callable; :func:`locate` finds the tensors of a later call there, so that their version counters can be
compared between forward and replay. What no path leads to (a tensor in a global list, say) is not watched unless it is saved.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["locate", "paths"]

Path = tuple[str, Callable[[Any], Any]]


def paths(function: Any, wanted: Callable[[Tensor], bool]) -> tuple[Path, ...]:
    """(name, getter) of each tensor reachable from ``function`` for which ``wanted`` holds, without repeats."""
    seen: set[int] = set()
    found = []
    for name, tensor, getter in _tensors(function):
        if id(tensor) not in seen and wanted(tensor):
            seen.add(id(tensor))
            found.append((name, getter))
    return tuple(found)


def locate(function: Any, known: tuple[Path, ...]) -> list[tuple[str, Tensor, int]]:
    """Name, tensor and version counter of each of ``known`` paths on ``function``; what is not there any more is left out."""
    found = []
    for name, getter in known:
        try:
            tensor = getter(function)
            found.append((name, tensor, tensor._version))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
            continue  # another object of the same code is built differently, or holds an inference tensor
    return found


def _tensors(function: Any) -> Iterator[tuple[str, Tensor, Callable[[Any], Any]]]:
    for name, holder, getter in _holders(function, "", lambda one: one, 3):
        if isinstance(holder, Tensor):
            yield name, holder, getter
        else:
            yield from _module_tensors(name, holder, getter)


def _module_tensors(name: str, module: Any, getter: Callable[[Any], Any]) -> Iterator[tuple[str, Tensor, Callable[[Any], Any]]]:
    prefix = f"{name}." if name else ""
    for path, one in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(one, kind).items():
                if tensor is not None:
                    full = f"{prefix}{path}.{key}" if path else f"{prefix}{key}"
                    yield full, tensor, functools.partial(_from_module, getter, tuple(path.split(".")) if path else (), kind, key)


def _from_module(getter: Callable[[Any], Any], path: tuple[str, ...], kind: str, key: str, function: Any) -> Any:
    module = getter(function)
    for part in path:
        module = module._modules[part]
    return getattr(module, kind)[key]


def _holders(value: Any, name: str, getter: Callable[[Any], Any], depth: int) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Tensors and modules that ``value`` is, is bound to or has captured."""
    if isinstance(value, (Tensor, torch.nn.Module)):
        yield name, value, getter
    elif depth == 0:
        return
    elif isinstance(value, types.MethodType):
        yield from _holders(value.__self__, name, lambda one: getter(one).__self__, depth - 1)
    elif isinstance(value, functools.partial):
        yield from _holders(value.func, name, lambda one: getter(one).func, depth - 1)
        for index, item in enumerate(value.args):
            yield from _holders(item, f"argument {index}", functools.partial(_partial_argument, getter, index), depth - 1)
    elif isinstance(value, types.FunctionType):
        for index, cell in enumerate(value.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            variable = value.__code__.co_freevars[index]
            yield from _holders(content, variable, functools.partial(_cell, getter, index), depth - 1)
        for variable in value.__code__.co_names:
            if isinstance(value.__globals__.get(variable), (Tensor, torch.nn.Module)):
                yield variable, value.__globals__[variable], functools.partial(_global, getter, variable)


def _partial_argument(getter: Callable[[Any], Any], index: int, function: Any) -> Any:
    return getter(function).args[index]


def _cell(getter: Callable[[Any], Any], index: int, function: Any) -> Any:
    return getter(function).__closure__[index].cell_contents


def _global(getter: Callable[[Any], Any], variable: str, function: Any) -> Any:
    return getter(function).__globals__[variable]
