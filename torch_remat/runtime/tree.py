"""Containers of arguments and outputs: take them apart into leaves and put them together again.

Leaves are tensors, everything that is no known container (numbers, strings, ``None``, opaque objects), and containers
without a tensor in them, which are handed out again as the same object unless somebody changed them meanwhile. Known
containers are tuples, named tuples and ``torch.return_types``, lists, dicts, their subclasses, dataclass instances,
``types.SimpleNamespace``, and
whatever is registered with ``torch.utils._pytree``. Attributes that an instance of a subclass or dataclass has beside
its items or fields belong to it. A rebuilt container is a new object of the same type; opaque objects are passed on as
they are. Containers that hold themselves are not supported (``RecursionError``), as in
``torch.utils._pytree``.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

__all__ = ["Spec", "Static", "flatten", "is_container", "is_iterator", "unflatten"]

# A spec is either LEAF or (rebuild, [child specs]); rebuild takes the list of rebuilt children.
LEAF: Any = None
Spec = Any

_BUILT_IN = (list, tuple, dict)
_PLAIN = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.Size, torch.dtype, torch.device, slice, range}
)


def is_container(value: object) -> bool:
    """Whether ``value`` is taken apart; one type look-up for the kinds that arguments usually are."""
    kind = type(value)
    if kind in _PLAIN or kind is Tensor or isinstance(value, Tensor):
        return False
    if isinstance(value, (tuple, list, dict)):
        return True
    if (dataclasses.is_dataclass(value) and not isinstance(value, type)) or kind is types.SimpleNamespace:
        return True
    return kind in torch_pytree.SUPPORTED_NODES


def is_iterator(value: object) -> bool:
    """Whether ``value`` is a generator, ``zip``, ``iter([...])`` or the like, which gives what it holds once only."""
    kind = type(value)
    return hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")


def flatten(value: object, leaves: list[Any]) -> Spec:
    """Append the leaves of ``value`` to ``leaves`` in order and return the spec that puts it together again."""
    if not is_container(value):
        leaves.append(value)
        return LEAF
    start = len(leaves)
    children, rebuild = _take_apart(value)
    spec = rebuild, [flatten(child, leaves) for child in children]
    if any(isinstance(leaf, Tensor) for leaf in leaves[start:]):
        return spec
    inner = leaves[start:]
    del leaves[start:]
    leaves.append(Static(value, spec, inner))
    return LEAF


class Static:
    """A container without tensors, with what it held when it was taken apart."""

    __slots__ = ("leaves", "spec", "value")

    def __init__(self, value: object, spec: Spec, leaves: list[Any]) -> None:
        self.value = value
        self.spec = spec
        self.leaves = leaves

    def restore(self) -> Any:
        """The same object if it still holds the same, else a new one with what it held."""
        children, _ = _take_apart(self.value)
        now: list[Any] = []
        for child in children:
            flatten(child, now)
        if len(now) == len(self.leaves) and all(_same(a, b) for a, b in zip(now, self.leaves, strict=True)):
            return self.value
        return unflatten(self.spec, self.leaves)


def _same(now: object, then: object) -> bool:
    if isinstance(then, Static):
        return isinstance(now, Static) and now.value is then.value and then.restore() is then.value
    return now is then


def unflatten(spec: Spec, leaves: list[Any]) -> Any:
    """The inverse of :func:`flatten`: a new structure around ``leaves``, which must be as many as were taken out."""
    return _build(spec, iter(leaves))


def _build(spec: Spec, leaves: Any) -> Any:
    if spec is LEAF:
        leaf = next(leaves)
        return leaf.restore() if type(leaf) is Static else leaf
    rebuild, children = spec
    return rebuild([_build(child, leaves) for child in children])


def _take_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    kind = type(value)
    if kind is tuple:
        return list(value), tuple
    if kind is list:
        return list(value), list
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda items: dict(zip(keys, items, strict=True))
    if isinstance(value, tuple):
        if hasattr(kind, "n_sequence_fields"):  # torch.return_types and other struct sequences take one iterable
            return list(value), kind
        count, names = len(value), list(_attributes(value))
        others = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in names}
        return [*value, *_attributes(value).values()], lambda parts: _filled(
            tuple.__new__(kind, parts[:count]), [*others, *names], [*others.values(), *parts[count:]]
        )
    if isinstance(value, list):
        count, names, shell = len(value), list(_attributes(value)), _shell(value)
        return [*value, *_attributes(value).values()], lambda parts: _filled(
            _extended(shell, parts[:count]), names, parts[count:]
        )
    if isinstance(value, dict):
        keys, names, shell = list(value), list(_attributes(value)), _shell(value)
        count, itself = len(keys), getattr(value, "__dict__", None) is value
        return [*value.values(), *_attributes(value).values()], lambda parts: _filled(
            _updated(shell, itself, keys, parts[:count]), names, parts[count:]
        )
    if kind in torch_pytree.SUPPORTED_NODES:
        node = torch_pytree.SUPPORTED_NODES[kind]
        children, context = node.flatten_fn(value)
        return list(children), lambda items: node.unflatten_fn(items, context)
    if kind is types.SimpleNamespace:
        names = list(vars(value))
        return list(vars(value).values()), lambda items: kind(**dict(zip(names, items, strict=True)))
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    names += [name for name in _attributes(value) if name not in names]
    shell = copy.copy(value)
    for name in names:
        object.__setattr__(shell, name, None)
    return [getattr(value, name) for name in names], lambda parts: _filled(copy.copy(shell), names, parts)


def _attributes(value: Any) -> dict[str, Any]:
    """Tensors, and lists, tuples and dicts, that an instance has beside its items.

    Whatever else it has stays as it is: objects may know their parents.
    """
    attributes = getattr(value, "__dict__", None)
    if attributes is value or not isinstance(attributes, dict):
        return {}  # the attributes are the items
    return {name: one for name, one in attributes.items() if isinstance(one, Tensor) or type(one) in _BUILT_IN}


def _shell(value: Any) -> Any:
    """An empty copy of a list or dict subclass: same type and attributes (a default factory, say), no items."""
    shell = copy.copy(value)
    shell.clear()
    for name in _attributes(shell):
        del shell.__dict__[name]
    return shell


def _extended(shell: Any, items: list[Any]) -> Any:
    rebuilt = copy.copy(shell)
    list.extend(rebuilt, items)
    return rebuilt


def _updated(shell: Any, itself: bool, keys: list[Any], items: list[Any]) -> Any:
    rebuilt = copy.copy(shell)
    if itself:
        rebuilt.__dict__ = rebuilt
    for key, item in zip(keys, items, strict=True):
        rebuilt[key] = item  # not dict.__setitem__: it would leave an OrderedDict without its order
    return rebuilt


def _filled(rebuilt: Any, names: list[str], values: list[Any]) -> Any:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)
    return rebuilt
