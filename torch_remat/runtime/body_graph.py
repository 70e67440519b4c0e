"""What one observed call of a body did, as a graph over storages, and the plan that follows from it.

An operation reads the last writers of its arguments' storages and becomes the writer of its outputs'. Views make no
node. A SAVE region is a black box: its outputs are sources, like the checkpoint's inputs and what was there before the
body. A backward slice from the slots that are alive at the end of the body (and from reads that become Python values,
writes and collectives before the last of them) names the sources that replay reads: :meth:`BodyGraph.plan`.

Storages are identified by weak references, so the graph keeps no memory alive.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_remat.errors import ModifiedError, display_name
from torch_remat.runtime import externals
from torch_remat.runtime.handed_on import Reading
from torch_remat.runtime.overwritten import shells
from torch_remat.runtime.plan import Plan, Step
from torch_remat.runtime.state_hooks import carry_state
from torch_remat.runtime.tape import OutputKind, Region, Slot, Tape, WeakStorage
from torch_remat.runtime.tensors import fills_its_memory, storage_keys, storages_of

__all__ = ["EXTERNAL", "INPUT", "OP", "OUTPUT", "STALE", "BodyGraph"]

_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None)
_NO_END = 1 << 63
_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
OP, INPUT, OUTPUT, EXTERNAL, STALE = range(5)


class Node(NamedTuple):
    """An operation of recomputed code, or a source of what it reads.

    ``detail``: INPUT: leaves; OUTPUT: (region index, leaf); EXTERNAL: storage; STALE: region name; OP: label.
    """

    kind: int
    reads: tuple[int, ...]
    detail: Any


class _Event(NamedTuple):
    """A saved tensor of recomputed code: its slot, the node that made it, and how many nodes there were then.

    ``number`` is autograd's sequence number then: nodes of operations that came before have smaller ones.
    """

    slot: weakref.ref[Slot]
    node: int | None
    position: int
    storage: int | None
    number: int


class _Alias(NamedTuple):
    """An output of a SAVE region in memory that the region captured: its node, and the storage's writer before."""

    node: int
    storage: int
    before: int


def _number() -> int:
    return _NO_END if _sequence_nr is None else _sequence_nr()


def _is_among(wanted: set[int], reached: set[int], tensor: Tensor) -> bool:
    keys = wanted.intersection(storage_keys(tensor))
    reached.update(keys)
    return bool(keys)


def _is_stored(key: int, own: dict[int, list[Any]]) -> bool:
    """Whether a tensor that is not the tape's own lies in the storage."""
    mine = own.get(key, ())
    uses = _use_count(key)
    return bool(uses) and uses > len(mine) + bool(mine)  # the objects in ``own`` count as one use together


def _keys_in(slot: Slot) -> list[int]:
    return [] if slot.tensor is None else storage_keys(slot.tensor)


_UNCOUNTED = -1  # version of a tensor that is changed without a count


class BodyGraph:
    """Filled by :class:`~torch_remat.runtime.observe.Observer` while the body runs."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.nodes: list[Node] = []
        self.writer: dict[int, int] = {}  # storage -> the node that wrote it last
        self.roots: list[int] = []  # nodes that replay runs though no slot needs them
        self.writes: list[tuple[int, int]] = []  # (node, storage) of in-place operations in recomputed code
        self.external_writes: dict[int, tuple[Tensor, int, str]] = {}
        self.declared: set[tuple[int, int]] = set()
        self.rebuild_arguments: dict[int, set[int]] = {}
        self.kept: dict[int, set[int]] = {}  # region -> storages that its own saves keep
        self.packed: set[int] = set()  # storages that hook pairs have packed for saves of regions
        self.output_keys: dict[tuple[int, int], set[int]] = {}  # (region, leaf) -> storages, also once hooks packed it
        self.makers: dict[tuple[str, int, int], int] = {}  # autograd node of an output, and which -> graph node
        self.overwritten: dict[int, int] = {}  # a SAVE region modified another's output: node after -> node before
        self.random: str | None = None
        self.own_generators = False
        self.under_mode = False
        self.updates = False  # SAVE regions may have changed something from outside in place
        self.swapped = False  # something is saved while a parameter has other data: replay must come to where it ends
        self.readers: dict[int, str] = {}  # source -> who reads it first, once there is a plan
        self.replaced: list[externals.Replaced] = []  # places from which backward's tensors were computed
        self._values: list[int] = []  # nodes that make what backward needs
        self.handed_on: list[int] = []  # storages that SAVE regions made and did not return, and that replay reads
        self.out_of_reach = False  # to one of them no path leads
        self._events: list[_Event] = []
        self._told = 0  # how many of them there were at the last operation
        self._aliases: list[_Alias] = []
        self._spans: list[tuple[int, int]] = []  # autograd sequence numbers of SAVE regions
        self._weak: dict[int, WeakStorage] = {}
        self._updated: dict[int, tuple[int, str]] = {}  # from outside -> nodes before a SAVE region modified it, region
        self._made: dict[int, str] = {}  # storage -> the SAVE region in which it was made
        self._read_at: dict[int, tuple[int, int]] = {}  # of those: saves and region calls before recomputed code read

    # --- Recording

    def add(self, kind: int, reads: tuple[int, ...], detail: Any) -> int:
        """Append a node; returns its index."""
        self.nodes.append(Node(kind, reads, detail))
        self._told = len(self._events) if kind == OP else self._told
        return len(self.nodes) - 1

    def own(self, tensor: Tensor, node: int, *, overwrite: bool) -> None:
        """``node`` is the last writer of the storages under ``tensor``, if they have none yet or ``overwrite``."""
        for storage in storages_of(tensor):
            key = storage._cdata
            if overwrite or key not in self.writer:
                self.writer[key] = node
            if key not in self._weak:
                self._weak[key] = WeakStorage(storage)

    def source(self, key: int) -> int:
        """The last writer of a storage; a new node for one that was there before the body."""
        node = self.writer.get(key)
        if node is None:
            node = self.writer[key] = self.add(EXTERNAL, (), key)
            if key in self._made:
                self._read_at[key] = (len(self.tape.slots), len(self.tape.order))
        return node

    def made(self, tensor: Tensor, region: str) -> None:
        """An operation inside a SAVE region made the memory of ``tensor``."""
        for storage in storages_of(tensor):
            key = storage._cdata
            self._made[key] = region
            if key not in self._weak:
                self._weak[key] = WeakStorage(storage)

    def was_made(self, key: int) -> bool:
        """Whether a SAVE region made the storage, this one or one before."""
        return key in self._made

    def sources(self, keys: list[int]) -> tuple[int, ...]:
        """The last writers of several, each once."""
        return tuple({self.source(key): None for key in keys})

    def saved(self, slot: weakref.ref[Slot], tensor: Tensor, position: int) -> None:
        """Backward needs ``tensor`` in ``slot``, at ``position`` of the nodes."""
        for key in storage_keys(tensor) or (None,):
            if key in self._made and key not in self.writer:
                self.source(key)
                self._read_at[key] = (len(self.tape.slots) - 1, len(self.tape.order))
            node = None if key is None else self.source(key)
            self._events.append(_Event(slot, node, position, key, _number()))

    def saved_unread(self, keys: set[int]) -> None:
        """The operation about to be recorded has saved these storages for its backward, which will not read them."""
        for index in range(self._told, len(self._events)):
            event = self._events[index]
            if event.storage in keys:
                self._events[index] = event._replace(node=None, storage=None)

    def is_saved(self, key: int) -> bool:
        """Whether a living slot of recomputed code lies in the storage."""
        return any(event.storage == key and event.slot() is not None for event in self._events)

    def is_outside(self, key: int) -> bool:
        """Whether the storage is from outside, or was not seen yet."""
        node = self.writer.get(key)
        return node is None or self.nodes[node].kind == EXTERNAL

    def is_operation(self, key: int) -> bool:
        """Whether an operation of recomputed code wrote the storage last."""
        node = self.writer.get(key)
        return node is not None and self.nodes[node].kind == OP

    def input(self, index: int, leaf: Tensor) -> None:
        """Leaf ``index`` of the checkpoint's arguments."""
        for node in {self.writer[key] for key in storage_keys(leaf) if key in self.writer}:
            self.nodes[node].detail.append(index)  # chunks of one tensor, say: read one, keep all, at no cost
        self.own(leaf, self.add(INPUT, (), [index]), overwrite=False)

    def external_write(self, key: int, tensor: Tensor, where: str, *, counted: bool) -> None:
        """Recomputed code is about to modify ``tensor``; of interest if it was there before the body."""
        node = self.writer.get(key)
        if key not in self.external_writes and (node is None or self.nodes[node].kind == EXTERNAL):
            try:
                self.external_writes[key] = (tensor, tensor._version if counted else _UNCOUNTED, where)
            except RuntimeError:  # an inference tensor
                return

    def declare(self, tensor: Tensor) -> None:
        """Every output of SAVE regions on the storage of ``tensor`` is to be persisted."""
        for key in storage_keys(tensor):
            node = self.writer.get(key)
            if node is not None and self.nodes[node].kind == OUTPUT:
                self.declared.add(self.nodes[node].detail)
            self.declared.update(self.nodes[alias.node].detail for alias in self._aliases if alias.storage == key)

    def changed(self, region: int, argument: int, tensor: Tensor) -> None:
        """A SAVE region has modified leaf ``argument`` of its arguments in place."""
        detail = (region, -1 - argument)
        for key in storage_keys(tensor):
            before = self.writer.get(key)
            # Replay writes the change into its own argument, which must have data for that: its maker's, or what the
            # region returned that is the argument.
            replaced = before is not None and (before in self.overwritten or self._is_result(before))
            replaced = replaced and fills_its_memory(tensor)
            node = self.add(OUTPUT, () if before is None or replaced else (before,), detail)
            if before is not None and replaced:
                self.overwritten[node] = before
            elif before is None or self.nodes[before].kind != INPUT:
                self.declared.add(detail)
            if self.is_saved(key):
                self.declared.add(detail)  # replay must notice, as eager does
            self.own(tensor, node, overwrite=True)
            self.writes.append((node, key))

    def stale(self, key: int, region: str) -> None:
        """A SAVE region has modified a storage that it captured; replay reads one from outside as it is left."""
        before = self.writer[key]
        if self.nodes[before].kind != EXTERNAL:
            self.writer[key] = self.add(STALE, (before,), region)
        else:
            self._updated.setdefault(before, (len(self.nodes), region))

    def returned(self, region: int, position: int, leaf: Tensor, *, persisted: bool) -> None:
        """A SAVE region has returned ``leaf``; ``persisted`` if only the tape could give it back."""
        keys = self.output_keys[region, position] = set(storage_keys(leaf))
        for key in keys:
            before = self.writer.get(key)
            if before is None:
                node = self.add(OUTPUT, (), (region, position))
                self.own(leaf, node, overwrite=True)
            elif persisted and not (self._is_result(before) and self.nodes[before].detail[0] == region):
                node = self.add(OUTPUT, (), (region, position))
                self._aliases.append(_Alias(node, key, before))
            else:
                continue
            if leaf.grad_fn is not None:
                self.makers[leaf.grad_fn.name(), leaf.grad_fn._sequence_nr(), leaf.output_nr] = node

    def _is_result(self, node: int) -> bool:
        """Whether ``node`` is what a region returned, and not an argument that it has changed."""
        return self.nodes[node].kind == OUTPUT and self.nodes[node].detail[1] >= 0

    def region_starts(self) -> None:
        """A SAVE region starts."""
        self._spans.append((_number(), -1))

    def region_ends(self) -> None:
        """The SAVE region that started last has ended."""
        self._spans[-1] = (self._spans[-1][0], _number())

    def read_so_far(self) -> set[tuple[int, int]]:
        """(region, leaf) of the SAVE outputs that recomputed code has read by now."""
        reads = {read for node in self.nodes if node.kind == OP for read in node.reads}
        return {self.nodes[read].detail for read in reads if self.nodes[read].kind == OUTPUT}

    # --- What was learned

    def plan(self, function: Any, outputs: list[Any], early_stop: bool, replaced: list[externals.Replaced]) -> Plan:
        """The plan for the path just observed. Raises ``ModifiedError`` for what no replay can reproduce."""
        alive = [event for event in self._events if event.slot() is not None]
        last = max((event.position for event in alive), default=-1)
        saved = {event.storage for event in alive}
        to_end = self.swapped or any(node >= last and key in saved for node, key in self.writes)
        end = max((event.number for event in alive), default=0)
        if alive and (to_end or not early_stop):
            last, end = len(self.nodes), _NO_END
        saves = [event.node for event in alive if event.node is not None]
        roots = [root for root in (*self.roots, *self._stored(outputs)) if root < last]
        needed = self._slice(saves + roots)
        self._join_functions(outputs, end, needed)
        self._add_aliases(alive, needed)
        writing = {node for node, _ in self.writes}
        self._check(needed, self._slice(saves + [root for root in roots if root not in writing]))
        self._values = saves + [root for root in self.roots if root < last]
        self.replaced = [one for one in replaced if self._reads(one.before, frozenset())]
        keep: dict[int, set[int]] = {}
        inputs: set[int] = set()
        for node in needed:
            kind, _, detail = self.nodes[node]
            if kind == OUTPUT:
                keep.setdefault(detail[0], set()).add(detail[1])
            elif kind == INPUT:
                inputs.update(detail)
        for region_index, position in self.declared:
            if not alive and position >= 0:
                continue  # what a region changed is kept all the same: another path after it may read it
            keep.setdefault(region_index, set()).add(position)
        overwritten = shells(self, needed, keep)
        readers = {
            self.nodes[node].detail: label for node, label in self.readers.items() if self.nodes[node].kind == OUTPUT
        }
        steps = tuple(
            self._step(index, region, keep.get(index, set()), overwritten.get(index, set()), readers)
            for index, region in enumerate(self.tape.order)
        )
        wanted = {self.nodes[node].detail for node in needed if self.nodes[node].kind == EXTERNAL}
        wanted -= set(self.external_writes)  # a counter of the body's own changes with every call
        wanted.update(key for one in self.replaced for key in one.now.keys)
        found: tuple[externals.Holder, ...] = ()
        reached: set[int] = set()
        if wanted:
            found = externals.find(externals.root_of(self.tape), functools.partial(_is_among, wanted, reached))
        self.handed_on = [key for key in wanted if key in self._read_at]
        self.out_of_reach = not reached.issuperset(self.handed_on)
        slots = len(self.tape.slots)
        return Plan(
            steps,
            slots,
            dead=frozenset(place for place, slot in enumerate(self.tape.slots) if slot() is None),
            inputs=frozenset(inputs),
            to_end=to_end,
            random=self.random,
            own_generators=self.own_generators,
            externals=found,
            under_mode=self.under_mode,
            replaces=bool(replaced or self.handed_on),
            updates=self.updates,
        )

    def readings(self) -> list[Reading]:
        """What replay has to read because a SAVE region handed it on beside its outputs."""
        return [Reading(key, self._weak[key], self._made[key], *self._read_at[key]) for key in self.handed_on]

    def _stored(self, outputs: list[Any]) -> list[int]:
        """Nodes whose results somebody outside of the body has stored (``self.norm = h.norm()``).

        The body has returned: what is alive, and neither returned nor saved by a SAVE region, is held by user state.
        Replay will store it again, and must not store a placeholder.
        """
        if self.tape.check is not None or _use_count is None:
            return []  # the check holds values of its own
        returned = [one for one in outputs if isinstance(one, Tensor)]
        elsewhere = {key for one in returned for key in storage_keys(one)} | self.packed.union(*self.kept.values())
        of_regions = set().union(*self.output_keys.values())
        candidates = {
            key: node
            for key, node in self.writer.items()
            if key not in elsewhere and key in self._weak
            if (kind := self.nodes[node].kind) == OUTPUT or (kind == OP and key not in of_regions)
        }
        own = self._own_storages()
        if any(_is_stored(key, own) for key in candidates):
            gc.collect(1)  # functions inside the body that know themselves keep its variables until then
        return [node for key, node in candidates.items() if _is_stored(key, own)]

    def _own_storages(self) -> dict[int, list[Any]]:
        """The storages of persisted outputs, once for each tensor that the tape has in them."""
        found: dict[int, list[Any]] = {}
        for region in self.tape.order:
            for output in (*region.outputs, *(output for _, output in region.changed)):
                if isinstance(output.data, Tensor):
                    for storage in storages_of(output.data):
                        found.setdefault(storage._cdata, []).append(storage)
        return found

    def check_replay(
        self,
        slots: list[Slot],
        changed: list[tuple[str, Any]],
        suspects: list[externals.Suspect],
        replaced: list[externals.Replaced],
    ) -> None:
        """Refuse what the replay just observed has read and should not have: what is no longer as forward left it.

        ``slots`` are those that it has filled, ``changed`` what was modified or replaced since forward, with names, and
        ``suspects`` what the body itself has changed in forward, ``replaced`` what it has replaced in this replay.
        """
        saves = [self.writer[key] for slot in slots for key in _keys_in(slot) if key in self.writer]
        writing = {node for node, _ in self.writes}
        self._values = saves + [root for root in self.roots if root not in writing]
        values = self._slice(self._values)
        self._check(values, values, replaying=True)
        read = {self.nodes[node].detail for node in values if self.nodes[node].kind == EXTERNAL}
        read -= set(self.external_writes)
        for name, tensor in changed:
            if isinstance(tensor, Tensor) and not read.isdisjoint(storage_keys(tensor)):
                raise externals.changed(self.tape.name, name)
        for one in suspects:
            if not read.isdisjoint(one.keys):
                raise externals.changed_again(self.tape.name, one.name)
        for one in replaced:
            if self.reads_old(one):
                raise externals.changed_again(self.tape.name, one.name)

    def _step(
        self, index: int, region: Region, keep: set[int], shells: set[int], readers: dict[tuple[int, int], str]
    ) -> Step:
        shared = self.with_siblings(index, region, keep)
        changed = dict(region.changed)
        return Step(
            region.name,
            region.recompute,
            region.slots_before,
            frozenset(shared),
            frozenset(
                position
                for position in shared - shells
                if (region.outputs[position] if position >= 0 else changed[-1 - position]).cloned
            ),
            frozenset(shells),
            region.given,
            frozenset(changed),
            frozenset(self._free(index, region, shared)),
            frozenset(self.rebuild_arguments.get(index, ())),
            tuple((position, readers[index, position]) for position in sorted(keep) if (index, position) in readers),
            any(node.kind == STALE and node.detail == region.name for node in self.nodes),
        )

    def with_siblings(self, index: int, region: Region, keep: set[int]) -> set[int]:
        """``keep`` and the outputs on the same storages, which cost nothing more."""
        wanted = {position for position in keep if position >= 0}
        kept = set().union(*[self.output_keys.get((index, position), ()) for position in wanted])
        siblings = {
            position
            for position, output in enumerate(region.outputs)
            if output.kind is OutputKind.KEPT and not kept.isdisjoint(self.output_keys.get((index, position), ()))
        }
        return keep | siblings

    def _free(self, index: int, region: Region, keep: set[int]) -> set[int]:
        """Outputs in memory that the region's own saves keep."""
        saved = self.kept.get(index, set())
        return {
            position
            for position, output in enumerate(region.outputs)
            if output.kind is OutputKind.KEPT and position not in keep and not output.cloned
            if (keys := self.output_keys.get((index, position))) and saved.issuperset(keys)
        }

    def reads_old(self, replaced: externals.Replaced) -> bool:
        """Whether backward's tensors are computed from what was there, and not only from what is there now."""
        return self._reads(
            replaced.before, frozenset(self.writer[key] for key in replaced.now.keys if key in self.writer)
        )

    def _reads(self, keys: frozenset[int], cut: frozenset[int]) -> bool:
        return any(
            self.nodes[node].kind == EXTERNAL and self.nodes[node].detail in keys and node not in cut
            for node in self._slice(self._values, cut)
        )

    def _slice(self, starts: list[int], cut: frozenset[int] = frozenset()) -> set[int]:
        """The nodes that ``starts`` are made from; what is in ``cut`` is taken as it is."""
        needed: set[int] = set()
        pending = sorted(set(starts), reverse=True)
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed.add(node)
            for read in () if node in cut else self.nodes[node].reads:
                self.readers.setdefault(read, self.nodes[node].detail)
                pending.append(read)
        return needed

    def _join_functions(self, outputs: list[Any], end: int, needed: set[int]) -> None:
        """Add what custom autograd Functions of recomputed code read; the dispatcher may not have seen it.

        Those behind ``end``, the last save, are not run again.
        """
        if not self.makers:
            return
        first = self.tape.first_sequence_nr
        seen: set[Any] = set()
        pending = [one.grad_fn for one in outputs if isinstance(one, Tensor) and one.grad_fn is not None]
        while pending:
            function = pending.pop()
            if function in seen or function._sequence_nr() < first:
                continue
            seen.add(function)
            following = [(edge, which) for edge, which in function.next_functions if edge is not None]
            number = function._sequence_nr()
            if (
                number < end
                and isinstance(function, torch.autograd.function.BackwardCFunction)
                and not self._in_span(number)
            ):
                for edge, which in following:
                    maker = self.makers.get((edge.name(), edge._sequence_nr(), which))
                    if maker is not None and maker not in needed:
                        needed.add(maker)
                        self.readers.setdefault(maker, type(function).__name__.removesuffix("Backward"))
            pending.extend(edge for edge, _ in following)

    def _in_span(self, number: int) -> bool:
        return any(start <= number < end for start, end in self._spans)

    def _add_aliases(self, alive: list[_Event], needed: set[int]) -> None:
        """Which outputs in captured memory replay may read: any reader of the memory after the region may be one.

        Only the tape can give them back, as tensors of their own: what is written to one would not show in the other.
        """
        for alias in self._aliases:
            later = {node for node, key in self.writes if key == alias.storage and node > alias.node}
            writers = {alias.before, *later}
            reading = [node for node in needed if node > alias.node and not writers.isdisjoint(self.nodes[node].reads)]
            saving = [event.position for event in alive if event.storage == alias.storage]
            if reading:
                self.readers.setdefault(alias.node, self.nodes[min(reading)].detail)
            elif max(saving, default=0) <= alias.node:
                continue
            needed.add(alias.node)
            if any(node not in later and not later.isdisjoint(self.nodes[node].reads) for node in reading) or (
                later and max(saving, default=0) > min(later)
            ):
                name = self.tape.order[self.nodes[alias.node].detail[0]].name
                raise ModifiedError(
                    f"Region {display_name(self.tape.name, name)} (recompute=False) returns a view of a tensor that it "
                    f"captured, or a view of an argument in another dtype or type, and that memory is modified in "
                    f"place afterwards; replay skips the region, and the change would show in one of the two only.\n"
                    f"To fix: return a .clone() of the view, or pass a captured tensor as an argument."
                )

    def _check(self, needed: set[int], values: set[int], *, replaying: bool = False) -> None:
        """Refuse what replay could not reproduce. ``values`` are the nodes that backward's tensors are made from."""
        for node in needed:
            kind, _, detail = self.nodes[node]
            if kind == STALE:
                raise ModifiedError(
                    f"Region {display_name(self.tape.name, detail)} (recompute=False) modifies in place a tensor that "
                    f"it captured, and recomputed code reads that tensor afterwards; replay skips the region, so the "
                    f"change would be missing.\n"
                    f"To fix: pass the tensor to the region as an argument, work on a .clone() inside the region, or "
                    f"mark it recompute=True."
                )
        lost = self._lost(needed, values)
        if lost and carry_state(self.tape.hooks):
            lost = {} if replaying else self._unrestored(lost)
        for error in lost.values():
            raise error

    def _lost(self, needed: set[int], values: set[int]) -> dict[int, ModifiedError]:
        """The storages from outside that the body reads and has changed in place, with the error for each."""
        lost: dict[int, ModifiedError] = {}
        for source, (count, region) in self._updated.items():
            if any(node < count and source in self.nodes[node].reads for node in needed):
                lost[self.nodes[source].detail] = ModifiedError(
                    f"Region {display_name(self.tape.name, region)} (recompute=False) modifies in place a tensor from "
                    f"outside that recomputed code has read before; replay would read it as the region left it.\n"
                    f"To fix: read it after the region, or mark the region recompute=True."
                )
        for key, (tensor, version, where) in self.external_writes.items():
            writers = {node for node, written in self.writes if written == key}
            states = {*writers, *(node for node in values if self.nodes[node] == (EXTERNAL, (), key))}
            read = any(node not in writers and not states.isdisjoint(self.nodes[node].reads) for node in values)
            if version == _UNCOUNTED:  # or saved as it is, which version counters tell of others
                read = read or any(event.node in states and event.slot() is not None for event in self._events)
            if read and tensor._version != version:
                lost[key] = ModifiedError(
                    f"Recomputed code of checkpoint {display_name(self.tape.name)} modifies a tensor from outside in "
                    f"place ({where}) and reads it, too; a replay would read it as this call left it, modify it a "
                    f"second time, and compute something else. (Whether is_recomputing() guards it is not looked at.)\n"
                    f"To fix: put that code in a region with recompute=False that takes the tensor as an argument, or "
                    f"pass a state hook that restores it (recompute_state_hooks=...)."
                )
        return lost

    def _unrestored(self, lost: dict[int, ModifiedError]) -> dict[int, ModifiedError]:
        """Those of the storages that the state hooks do not restore, as far as a path leads to them."""
        root = externals.root_of(self.tape)
        reached: set[int] = set()
        holders = externals.find(root, functools.partial(_is_among, set(lost), reached))
        places = [
            externals.Lost(seen, index)
            for seen in externals.locate(root, holders)
            for index, _ in enumerate(seen.versions)
        ]
        alone = externals.unrestored(self.tape, places)
        keys = {key for one in alone for key in storage_keys(one.then)}
        return {key: error for key, error in lost.items() if key in keys}
