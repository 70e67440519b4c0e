"""What is alive: checkpoints, autograd nodes and what these save, read without changing or unpacking anything.

Nothing is recorded for this while a program runs. Tapes, spans and tensors are found by asking the garbage collector
for its objects, which have every instance of such types in them whether or not the collector is on; what is saved is
read off the autograd graph that can be reached from the tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat.runtime.backward import Trigger
from torch_remat.runtime.replay_frame import taken
from torch_remat.runtime.tape import Kept, Packed, Slot, Spans, Tape
from torch_remat.runtime.tensors import is_leaf_node, storage_keys

__all__ = [
    "Live",
    "NodeSaves",
    "Save",
    "discover_autograd_roots",
    "find_live",
    "is_weight",
    "nodes_of",
    "saves_of",
    "unseen",
    "walk",
]

_RAW = "_raw_saved_"
_MOST_VIEWS = 16  # of views of views
_FAKE = ("FakeTensor", "FunctionalTensor")
_no_dispatch = getattr(torch._C, "_DisableTorchDispatch", None)
_grad_fn = vars(torch._C.TensorBase)["grad_fn"].__get__  # whatever a subclass has made of the attribute


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that an autograd node saves.

    ``kind`` is ``"native"``, ``"kept"`` (by our hook), ``"slot"`` (dropped, or rebuilt by now), ``"packed"`` (by a
    user's hook pair that we apply), ``"foreign"`` (by hooks that are not ours) or ``"replay"`` (of a graph that replay
    makes and throws away). ``tensor`` is what is resident; ``payload`` what a hook pair made of it. ``weight`` says
    that the tensor is a leaf, or a view of one.
    """

    kind: str
    attribute: str
    position: int
    tensor: Tensor | None
    payload: Any = None
    weight: bool = False


@dataclass(frozen=True, slots=True)
class NodeSaves:
    """An autograd node with its saves, in the order in which it made them."""

    number: int
    name: str
    saves: tuple[Save, ...]


@dataclass(frozen=True, slots=True)
class Live:
    """What the garbage collector knows of now."""

    tapes: tuple[Tape, ...]
    spans: tuple[Spans, ...]
    nodes: tuple[Any, ...]
    weights: frozenset[int]  # identities of the storages of parameters


def unseen() -> ExitStack:
    """A context in which no mode of the user's and no subclass sees how a report looks at tensors."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    if _no_dispatch is not None:
        stack.enter_context(_no_dispatch())
    return stack


def find_live() -> Live:
    """Every living tape, every checkpoint's spans, and an autograd node for each tensor that has one."""
    tapes: list[Tape] = []
    spans: dict[int, Spans] = {}
    nodes: list[Any] = []
    weights: set[int] = set()
    with unseen():
        for thing, sort in _found():
            if sort == "tensor":
                nodes.extend(nodes_of([thing]))
                if type(thing) is Parameter or getattr(thing, "_is_param", False):
                    weights.update(storage_keys(thing))
            elif sort == "fake":
                if getattr(thing, "_is_param", False):
                    weights.update(storage_keys(thing))
            elif sort == "node":
                nodes.append(thing)
            else:
                spans[id(thing.spans)] = thing.spans
                if sort == "tape":
                    tapes.append(thing)
    return Live(tuple(tapes), tuple(spans.values()), tuple(nodes), frozenset(weights))


def discover_autograd_roots() -> list[Tensor]:
    """Every living tensor that has a ``grad_fn``, fake tensors excepted.

    One pass over the objects of the garbage collector, which need not be enabled: milliseconds per 100 000 objects.
    """
    with unseen():
        return [thing for thing, sort in _found() if sort == "tensor" and nodes_of([thing])]


def is_weight(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a leaf that requires a gradient, or a view of one: it would be there anyway."""
    base = tensor._base if tensor._base is not None else tensor
    return base.is_leaf and base.requires_grad


def nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    """The nodes that made ``tensors``."""
    found = []
    with unseen():
        for tensor in tensors:
            try:
                node = _grad_fn(tensor)
            except RuntimeError:  # a view whose base is gone, an object that is being made
                continue
            if node is not None:
                found.append(node)
    return found


def walk(roots: Iterable[Any]) -> list[NodeSaves]:
    """Every node that can be reached from ``roots``, oldest first."""
    seen: set[Any] = set()
    pending = list(roots)
    found = []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        found.append(NodeSaves(node._sequence_nr(), node.name(), tuple(saves_of(node))))
        pending.extend(edge for edge, _ in node.next_functions if edge is not None and edge not in seen)
    return sorted(found, key=lambda one: one.number)


def _found() -> list[tuple[Any, str]]:
    """What is of interest among the objects of the garbage collector, and what it is."""
    sorts = {kind: sort for kind in set(map(type, _objects())) if (sort := _sort(kind))}
    return [(thing, sorts[type(thing)]) for thing in _of_types(sorts)]


def _objects() -> Iterator[Any]:
    """The objects of the garbage collector, asked for when the first is wanted."""
    return chain.from_iterable(map(gc.get_objects, (None,)))


def _of_types(types: Container[type]) -> list[Any]:
    """The objects of these types.

    Among all objects are tuples that other threads are making right now, which fails if somebody else has a reference
    to them when they are completed. So between taking the objects and letting go of those that are not wanted there
    must be no bytecode, after which another thread may run: all of it is one call of iterators written in C.
    """
    everything: list[Any] = []
    fill, clear = map(everything.extend, map(gc.get_objects, (None,))), map(list.clear, (everything,))
    wanted = chain((False,), map(types.__contains__, map(type, everything)), (False,))
    return list(compress(chain(fill, everything, clear), wanted))


def _sort(kind: type) -> str:
    if kind is Tape:
        return "tape"
    if kind is Trigger:
        return "trigger"
    if _is_node(kind):
        return "node"
    if not issubclass(kind, Tensor):
        return ""
    return "fake" if kind.__name__ in _FAKE else "tensor"


def _is_node(kind: type) -> bool:
    return getattr(torch._C._functions, kind.__name__, None) is kind or issubclass(
        kind, torch.autograd.function.BackwardCFunction
    )


def saves_of(node: Any) -> Iterator[Save]:
    """What ``node`` saves, as long as it has not run."""
    leaves: set[int] | None = None
    for attribute in _attributes(node):
        try:
            saved = getattr(node, attribute)
        except RuntimeError:  # released: the node has run
            continue
        several = saved if isinstance(saved, (tuple, list)) else (saved,)
        for position, one in enumerate(several):
            save = _save(one, attribute.removeprefix(_RAW), position)
            if save is None:
                continue
            if save.tensor is not None and save.kind in ("native", "kept"):
                with unseen():
                    leaves = _leaf_storages(node) if leaves is None else leaves
                    if is_weight(save.tensor) or not leaves.isdisjoint(storage_keys(save.tensor)):
                        save = replace(save, weight=True)
            yield save


def _leaf_storages(node: Any) -> set[int]:
    """The storages of leaves that ``node`` got, or of which it got views: what is saved of a view knows no base."""
    found: set[int] = set()
    for edge, _ in node.next_functions:
        leaf = _leaf_behind(edge)
        if leaf is not None:
            found.update(storage_keys(leaf))
    return found


def _leaf_behind(node: Any) -> Tensor | None:
    """The leaf that a chain of nodes with one input each, as those of views are, leads to."""
    for _ in range(_MOST_VIEWS):
        if node is None:
            break
        if is_leaf_node(node):
            return node.variable
        before = node.next_functions
        if len(before) != 1:
            break
        node = before[0][0]
    return None


def _save(saved: Any, attribute: str, position: int) -> Save | None:
    try:
        data, unpack = saved.data, saved.unpack_hook
    except (AttributeError, RuntimeError):  # released, or a torch that does not show it
        return None
    if unpack is None:
        return Save("native", attribute, position, data) if isinstance(data, Tensor) else None
    if type(data) is Slot:
        return Save("slot", attribute, position, data.tensor)
    if type(data) is Kept:
        return Save("kept", attribute, position, data.tensor)
    if type(data) is Packed:
        return Save("packed", attribute, position, None, data.payload)
    if unpack is taken:
        return Save("replay", attribute, position, None)
    return Save("foreign", attribute, position, None, data)


_attribute_names: dict[type, tuple[str, ...]] = {}


def _attributes(node: Any) -> tuple[str, ...]:
    """Names of the raw saves of a node's type, in the order in which torch lists them."""
    kind = type(node)
    names = _attribute_names.get(kind)
    if names is None:
        own = [name for name in vars(kind) if name.startswith(_RAW)]
        names = tuple(own) if own else tuple(name for name in dir(kind) if name.startswith(_RAW))
        if len(_attribute_names) < 10_000:
            _attribute_names[kind] = names
    return names
