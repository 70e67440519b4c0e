"""Parameters, buffers and other tensors from outside that a body reads: found once, by path, and looked at there later.

The first observed call gives the storages that replay reads and that the body did not make. :func:`find` says where
each is found from the body's callable or from the objects among its arguments (a module, a namespace, a set);
:func:`locate` finds the tensors of a later call there, so that their version counters can be compared between forward
and replay. What no path leads to (a tensor in a list of another file, say) is not watched unless it is saved.

A tensor that is found in several places is watched in each: the body may look at any of them. A parameter is watched in
one, since it may be replaced.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_remat.errors import ModifiedError, display_name
from torch_remat.runtime import fused_steps
from torch_remat.runtime.paths import Getter, Root, joined, search
from torch_remat.runtime.state_hooks import as_restored
from torch_remat.runtime.tape import OutputKind, Tape, WeakStorage
from torch_remat.runtime.tensors import storage_keys, storages_of

__all__ = [
    "Before",
    "Holder",
    "Lost",
    "Memories",
    "Replaced",
    "Seen",
    "Suspect",
    "changed",
    "changed_again",
    "find",
    "locate",
    "objects",
    "overwritten",
    "root_of",
    "unrestored",
]

_PLAIN = (Tensor, torch.nn.Parameter)


def root_of(tape: Tape) -> Root:
    """The root of the call that ``tape`` is of. It holds no more than the tape does."""
    return Root(tape.function, objects(tape))


def objects(tape: Tape) -> list[Any]:
    """The arguments of the call that ``tape`` is of, by leaf; None in place of tensors."""
    return [one.data if one.kind is OutputKind.OBJECT else None for one in tape.inputs]


class Entry(NamedTuple):
    """A parameter or buffer of a module: full name, path of its owner, which of the owner's dicts, key there."""

    name: str
    path: tuple[str, ...]
    kind: str
    key: str


class Holder(NamedTuple):
    """A tensor (no entries) or module that is reachable from a root. ``owners`` are the entries, in the same order."""

    name: str
    getter: Getter
    entries: tuple[Entry, ...] = ()
    owners: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = ()  # path, kind, keys

    def named(self, index: int) -> str:
        """The name of tensor ``index``."""
        return self.entries[index].name if self.entries else self.name

    def is_parameter(self, index: int) -> bool:
        """Whether tensor ``index`` is a parameter of a module. FSDP swaps one for a sharded one, of another type."""
        return bool(self.entries) and self.entries[index].kind == "_parameters"

    def tensors(self, start: Any) -> list[Any]:
        """What is there now, as seen from the module, or from the root of a tensor; None where there is nothing."""
        if not self.owners:
            return [self.getter(start)]
        found: list[Any] = []
        for path, kind, keys in self.owners:
            owner = start
            for part in path:
                owner = None if owner is None else owner._modules.get(part)
            content: Any = {} if owner is None else getattr(owner, kind)
            found.extend(map(content.get, keys))
        return found


def find(root: Root, wanted: Callable[[Tensor], bool]) -> tuple[Holder, ...]:
    """Where the tensors are for which ``wanted`` holds, as seen from ``root``."""
    taken: set[int] = set()

    def take(tensor: Tensor | None) -> bool:
        if tensor is None or id(tensor) in taken or not wanted(tensor):
            return False
        if isinstance(tensor, torch.nn.Parameter):
            taken.add(id(tensor))
        return True

    found = []
    for name, value, getter in search(root):
        if isinstance(value, Tensor):
            if take(value):
                found.append(Holder(name, getter))
            continue
        entries = tuple(entry for entry, tensor in _module_entries(name, value) if take(tensor))
        if entries:
            owners = itertools.groupby(entries, lambda entry: (entry.path, entry.kind))
            keys = tuple((*owner, tuple(entry.key for entry in of_owner)) for owner, of_owner in owners)
            found.append(Holder(name, getter, entries, keys))
    return tuple(found)


def changed(checkpoint: str | None, name: str) -> ModifiedError:
    """The error for an external tensor that replay would read and that is not as forward left it."""
    return ModifiedError(
        f"{name}, which the body of checkpoint {display_name(checkpoint)} reads, was modified or replaced between "
        f"forward and backward; a replay would compute with the new value.\n"
        f"To fix: call backward before the optimizer step (or whatever changes {name}); pass what is there for the "
        f"forward only (under torch.func.functional_call, say) as an argument of the checkpoint."
    )


def changed_again(checkpoint: str | None, name: str) -> ModifiedError:
    """The error for an external tensor that the body reads and changes, in forward and once more in replay."""
    return ModifiedError(
        f"The body of checkpoint {display_name(checkpoint)} reads {name} and modifies or replaces it; a replay would "
        f"read another value than forward did.\n"
        f"To fix: put that code in a region with recompute=False, or pass a state hook that restores {name} "
        f"(recompute_state_hooks=...)."
    )


class Seen:
    """The external tensors of one call that one holder led to, and their version counters then.

    Parameters are held; where a tensor among them may have a graph of its own, all are referred to weakly: held on the
    tape it could be a cycle. Raises one of ``ABSENT`` where the holder leads to something else.
    """

    __slots__ = ("_holder", "_start", "_steps", "_tensors", "_weak", "gradients", "versions")

    def __init__(self, holder: Holder, root: Root) -> None:
        self._holder = holder
        self._start: Any = holder.getter(root) if holder.owners else root
        tensors = holder.tensors(self._start)
        self.versions = [tensor._version for tensor in tensors]
        self.gradients = [tensor.requires_grad for tensor in tensors]
        self._weak = any(one.requires_grad and not isinstance(one, torch.nn.Parameter) for one in tensors)
        self._tensors: list[Any] = [weakref.ref(tensor) for tensor in tensors] if self._weak else tensors
        self._steps = fused_steps.count()

    def then(self) -> list[Any]:
        """The tensors of that call; None for one that is gone."""
        return [reference() for reference in self._tensors] if self._weak else self._tensors

    def now(self) -> list[Any]:
        """What is in their places."""
        try:
            return self._holder.tensors(self._start)
        except ABSENT:
            return [None] * len(self.versions)

    def named(self, index: int) -> str:
        """The name of tensor ``index``."""
        return self._holder.named(index)

    def changed(self) -> str | None:
        """The name of one that was modified or replaced since; None when all are as they were."""
        tensors = self._tensors
        if (
            not self._weak
            and self._steps == fused_steps.count()
            and [one._version for one in tensors] == self.versions
            and [one.requires_grad for one in tensors] == self.gradients
            and all(map(operator.is_, tensors, self.now()))
        ):
            return None
        return next((name for name, _ in self.all_changed()), None)

    def all_changed(self) -> Iterator[tuple[str, Any]]:
        """Names of those that were modified or replaced since, and what is there now."""
        for index, (tensor, now) in enumerate(zip(self.then(), self.now(), strict=True)):
            name = self.named(index)
            if tensor is None:
                yield name, now
            elif tensor._version != self.versions[index] or fused_steps.is_written_since(self._steps, tensor):
                yield name, tensor
            elif tensor.requires_grad is not self.gradients[index]:
                yield f"{name}.requires_grad", tensor
            elif now is not tensor and not self.is_swapped(index, tensor, now):
                yield name, now

    def is_swapped(self, index: int, then: Any, now: Any) -> bool:
        """Whether tensor ``index`` is a parameter that has become sharded, or whole: as good as the same."""
        return self._holder.is_parameter(index) and (type(now) not in _PLAIN or type(then) not in _PLAIN)


class Lost(NamedTuple):
    """A place where a body has changed a tensor, or put another one, so that what it read before that may be lost."""

    seen: Seen
    place: int

    @property
    def name(self) -> str:
        """The name of the place."""
        return self.seen.named(self.place)

    @property
    def then(self) -> Any:
        """The tensor that was there; None when it is gone."""
        return self.seen.then()[self.place]

    @property
    def now(self) -> Any:
        """What is there."""
        return self.seen.now()[self.place]


class Suspect:
    """What a body has left in a place of which forward may have read the old value: replay must not read it."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.name = name
        self.keys = frozenset(storage_keys(tensor) if isinstance(tensor, Tensor) else ())
        # So that no other memory takes their identity.
        self._storages = [WeakStorage(one) for one in storages_of(tensor)] if isinstance(tensor, Tensor) else []


def overwritten(found: list[Seen], *, replaced: bool, updated: bool) -> list[Lost]:
    """The places among ``found`` that a body has changed.

    In place, unless ``updated``, or by a tensor that does not hold the old values, unless ``replaced``: then it is
    known that it reads what is there afterwards.
    """
    lost: list[Lost] = []
    for seen in found:
        for index, (then, now) in enumerate(zip(seen.then(), seen.now(), strict=True)):
            in_place = not updated and then is not None and then._version != seen.versions[index]
            kept = now is then or replaced or seen.is_swapped(index, then, now) or _extends(now, then)
            if in_place or not kept:
                lost.append(Lost(seen, index))
    return lost


def unrestored(tape: Tape, lost: list[Lost]) -> list[Lost]:
    """Those that the state hooks leave as they are when they restore the entry, as they will for replay."""
    before = [(one.then, one.now, _copy(one.then)) for one in lost]
    alone: list[Lost] = []
    with as_restored(tape.hooks, tape.states) as written:
        for one, (then, now, copy) in zip(lost, before, strict=True):
            here = one.now
            if now is then:
                same = here is then and written.isdisjoint(storage_keys(then))
                same = same and (copy is None or _are_equal(then, copy))
            else:
                same = not _same(here, then)
            if same:
                alone.append(one)
    return alone


def _copy(tensor: Any) -> Tensor | None:
    return tensor.detach().clone() if _is_plain(tensor) else None


def _extends(now: Any, then: Any) -> bool:
    """Whether a plain tensor has the values of another one, up to its size: a table that has grown, another dtype."""
    if not (_is_plain(now) and _is_plain(then)) or now.dim() != then.dim() or now.device != then.device:
        return False
    part = tuple([slice(min(sizes)) for sizes in zip(now.shape, then.shape, strict=True)])
    return _are_equal(now[part].to(then.dtype), then[part])


class Memories:
    """Where the plain parameters that a call leads to have their memory: ``parameter.data = ...`` tells nobody."""

    _LOOKS = 100_000  # at so many parameters, then no more

    def __init__(self, root: Root) -> None:
        holders = find(root, lambda tensor: type(tensor) is torch.nn.Parameter and _is_plain(tensor))
        self._parameters = [tensor for seen in locate(root, holders) for tensor in seen.then()]
        self._addresses = self._now()
        self._looks = self._LOOKS

    def _now(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._parameters]

    def moved(self) -> bool:
        """Whether one of them has other memory now."""
        self._looks -= len(self._parameters)
        return self._looks > 0 and self._now() != self._addresses


class Replaced(NamedTuple):
    """A place where something else is than before: its name, the storages of what was there and of what is now."""

    name: str
    before: frozenset[int]
    now: Suspect


class Before:
    """The tensors, parameters excepted, that paths led to before a body ran."""

    def __init__(self, root: Root) -> None:
        self.holders = find(root, lambda tensor: not isinstance(tensor, torch.nn.Parameter))
        self._root = root
        found = locate(root, self.holders)
        self._seen = [(seen, [frozenset(storage_keys(one)) for one in seen.then()]) for seen in found]

    def replaced(self) -> list[Replaced]:
        """Where something else is now, with other values."""
        return [
            Replaced(seen.named(index), memory, Suspect(seen.named(index), now))
            for seen, memories in self._seen
            for index, (now, then, memory) in enumerate(zip(seen.now(), seen.then(), memories, strict=True))
            if not _same(now, then)
        ]

    def still_there(self) -> frozenset[int]:
        """The storages of parameters, and of what is where it was."""
        holders = find(self._root, lambda tensor: isinstance(tensor, torch.nn.Parameter))
        parameters = [tensor for seen in locate(self._root, holders) for tensor in seen.then()]
        pairs = [pair for seen, _ in self._seen for pair in zip(seen.now(), seen.then(), strict=True)]
        others = [then for now, then in pairs if now is then and then is not None]
        return frozenset(key for tensor in (*parameters, *others) for key in storage_keys(tensor))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and value.layout is torch.strided and not (value.is_nested or value.is_quantized)


def _same(now: Any, then: Any) -> bool:
    """One tensor, or two plain ones with the same values."""
    if now is then or not (_is_plain(now) and _is_plain(then)):
        return now is then and then is not None
    alike = (now.dtype, now.device, now.shape) == (then.dtype, then.device, then.shape)
    return alike and _are_equal(now, then)


def _are_equal(now: Tensor, then: Tensor) -> bool:
    """Whether the values are equal. While a CUDA graph is captured nobody can tell."""
    if now.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return now.is_meta or torch.equal(now, then)


def locate(root: Root, holders: tuple[Holder, ...]) -> list[Seen]:
    """What ``holders`` lead to from ``root``, as far as it is there."""
    found: list[Seen] = []
    for holder in holders:
        try:
            found.append(Seen(holder, root))
        except ABSENT:
            continue  # another object of the same code is built differently, or holds an inference tensor
    return found


ABSENT = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError)


def _module_entries(name: str, module: torch.nn.Module) -> Iterator[tuple[Entry, Tensor | None]]:
    for path, one in module.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(one, kind).items():
                yield Entry(joined(name, path, key), tuple(path.split(".")) if path else (), kind, key), tensor
