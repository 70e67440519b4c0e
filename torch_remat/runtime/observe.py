"""The first call of a body: a dispatch mode that learns what replay will read.

It records the operations of recomputed code as a graph over storages: an operation reads the last writers of its
arguments' storages and becomes the writer of its outputs'. Views make no node. A SAVE region is a black box: its
outputs are sources, like the checkpoint's inputs. A backward slice from the slots that are alive at the end of the body
(and from reads that become Python values, writes and collectives before the last of them) names the sources that replay
reads; see :meth:`Observer.plan`.

Kernels that the dispatcher does not see inside a custom ``autograd.Function`` are covered by the autograd graph: such a
node reads what its edges lead to. Those outside one meet an error at the placeholder's data pointer in replay.

Storages are identified by weak references, so observing keeps no memory alive beyond the outputs of SAVE regions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from torch_remat.errors import ModifiedError, RandomStateError, display_name
from torch_remat.runtime import externals
from torch_remat.runtime.generators import HostRandom, covered, drawing, is_default, random_message
from torch_remat.runtime.placeholder import METADATA_ONLY, inner_tensors, runs_without_data, user_line
from torch_remat.runtime.plan import Plan, Step
from torch_remat.runtime.tape import Kept, Output, OutputKind, Region, Slot, Tape, WeakStorage

__all__ = ["Observer", "laid_out", "private_copy", "storage_keys", "storages_of", "tensors_in", "written_by"]

_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None)
_NO_END = 1 << 63
_OP, _INPUT, _OUTPUT, _EXTERNAL, _STALE = range(5)


class _Node(NamedTuple):
    kind: int
    reads: tuple[int, ...]
    detail: Any  # _INPUT: leaves; _OUTPUT: (region index, leaf); _EXTERNAL: storage; _STALE: region name; _OP: label


class _Event(NamedTuple):
    """A saved tensor of recomputed code: its slot, the node that made it, and how many nodes there were then.

    ``number`` is autograd's sequence number then: nodes of operations that came before have smaller ones.
    """

    slot: weakref.ref[Slot]
    node: int | None
    position: int
    storage: int | None
    number: int


def _number() -> int:
    return _NO_END if _sequence_nr is None else _sequence_nr()


def storage_keys(tensor: Tensor) -> list[int]:
    """Identities of the storages under ``tensor`` (several for a wrapper subclass, none for what has no storage)."""
    if is_traceable_wrapper_subclass(tensor):
        return [key for _, inner in inner_tensors(tensor) for key in storage_keys(inner)]
    try:
        return [tensor.untyped_storage()._cdata]
    except (NotImplementedError, RuntimeError):
        return []


def storages_of(tensor: Tensor) -> Iterator[Any]:
    """The storages under ``tensor``, as :func:`storage_keys`."""
    if is_traceable_wrapper_subclass(tensor):
        for _, inner in inner_tensors(tensor):
            yield from storages_of(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``values`` and in the lists and tuples there."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


class Observer(TorchDispatchMode):
    """Active during the first forward of a body; see the top of this file."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled while we look."""
        return True

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._nodes: list[_Node] = []
        self._writer: dict[int, int] = {}
        self._weak: dict[int, WeakStorage] = {}
        self._events: list[_Event] = []
        self._roots: list[int] = []
        self._writes: list[tuple[int, int]] = []  # (position, storage) of in-place operations in recomputed code
        self._origins: dict[
            int, list[Output]
        ] = {}  # storage -> persisted outputs on it, copied before they are modified
        self._external_writes: dict[int, tuple[Tensor, int, str]] = {}
        self._in_region: Region | None = None
        self._region_writes: set[int] = set()
        self._region_start = 0
        self._spans: list[tuple[int, int]] = []  # autograd sequence numbers of SAVE regions
        self._declared: set[tuple[int, int]] = set()
        self._rebuild_arguments: dict[int, set[int]] = {}
        self._kept: dict[int, set[int]] = {}  # region -> storages that its own saves keep
        self._output_keys: dict[tuple[int, int], set[int]] = {}  # (region, leaf) -> storages, also once hooks packed it
        self._makers: dict[tuple[str, int], int] = {}  # autograd node of an output -> graph node
        self._overwritten: dict[int, int] = {}  # a SAVE region modified another's output: node after -> node before
        self._operations = 0  # that are running now
        self.random: str | None = None
        self._own_generators = False
        self._host_random = HostRandom()

    # --- What forward reports

    def inputs(self, leaves: list[Any]) -> None:
        """The checkpoint's argument leaves."""
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            sharing = {self._writer[key] for key in storage_keys(leaf) if key in self._writer}
            for node in sharing:
                self._nodes[node].detail.append(index)  # chunks of one tensor, say: read one, keep all, at no cost
            self._own(leaf, self._add(_INPUT, (), [index]), overwrite=False)

    def saved(self, slot: weakref.ref[Slot], tensor: Tensor) -> None:
        """Recomputed code saves ``tensor`` in ``slot``."""
        keys = storage_keys(tensor)
        for key in keys:
            self._events.append(_Event(slot, self._writer.get(key), len(self._nodes), key, _number()))
        if not keys:
            self._events.append(_Event(slot, None, len(self._nodes), None, _number()))

    def rebuild(self, slot: weakref.ref[Slot], region_index: int, argument: int | None, tensor: Tensor) -> None:
        """The SAVE region saves a recomputed argument (None: an input of the checkpoint), which replay will rebuild."""
        if argument is not None:
            self._rebuild_arguments.setdefault(region_index, set()).add(argument)
        for key in storage_keys(tensor):
            self._events.append(_Event(slot, self._writer.get(key), self._region_start, key, _number()))

    def packed(self, region_index: int, tensor: Tensor) -> None:
        """A hook pair is about to pack what the SAVE region saves for its backward."""

    def kept(self, region_index: int, tensor: Tensor, payload: weakref.ref[Kept]) -> None:
        """The SAVE region keeps ``tensor`` for its backward, as ``payload``."""
        self._kept.setdefault(region_index, set()).update(storage_keys(tensor))

    def is_recomputed(self, tensor: Tensor) -> bool:
        """Whether recomputed code of this body made ``tensor``."""
        keys = storage_keys(tensor)
        return bool(keys) and all(
            (node := self._writer.get(key)) is not None and self._nodes[node].kind == _OP for key in keys
        )

    def enter_region(self, region: Region) -> None:
        """A SAVE region starts."""
        self._check_host_random()
        self._in_region = region
        self._region_writes = set()
        self._region_start = len(self._nodes)
        if _sequence_nr is not None:
            self._spans.append((_sequence_nr(), -1))

    def leave_region(self, region: Region, leaves: list[Any], arguments: list[Any]) -> None:
        """A SAVE region returned ``leaves`` (or raised); classify what it made and what it modified."""
        self._in_region = None
        self._host_random = HostRandom()
        if self._spans and _sequence_nr is not None:
            self._spans[-1] = (self._spans[-1][0], _sequence_nr())
        index = len(self._tape.order) - 1
        unclaimed = {key for key in self._region_writes if key in self._writer}
        for argument, output in region.changed:
            for key in storage_keys(arguments[argument]):
                before = self._writer.get(key)
                made_by_output = before is not None and self._nodes[before].kind == _OUTPUT
                # Replay writes the change into its own argument, which must have data for that.
                node = self._add(_OUTPUT, () if before is None or made_by_output else (before,), (index, -1 - argument))
                if before is not None and made_by_output:
                    self._overwritten[node] = before
                elif before is None or self._nodes[before].kind != _INPUT:
                    self._declared.add((index, -1 - argument))
                if any(event.storage == key and event.slot() is not None for event in self._events):
                    self._declared.add((index, -1 - argument))  # replay must notice, as eager does
                self._own(arguments[argument], node, overwrite=True)
                self._writes.append((node, key))
                self._origins.setdefault(key, []).append(output)
                unclaimed.discard(key)
        for key in unclaimed:  # modified, and not as an argument: a captured tensor
            if any(event.storage == key and event.slot() is not None for event in self._events):
                raise ModifiedError(
                    f"Region {display_name(self._tape.name, region.name)} (recompute=False) has modified in place a "
                    f"tensor that recomputed code saved for its backward; replay skips the region and would not see "
                    f"it.\n"
                    f"To fix: work on a .clone() inside the region."
                )
            if self._nodes[self._writer[key]].kind != _EXTERNAL:
                self._writer[key] = self._add(_STALE, (self._writer[key],), region.name)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._region_output(region, index, position, leaf)

    def _region_output(self, region: Region, index: int, position: int, leaf: Tensor) -> None:
        output = region.outputs[position]
        keys = self._output_keys[index, position] = set(storage_keys(leaf))
        for key in keys:
            if key not in self._writer:
                node = self._add(_OUTPUT, (), (index, position))
                self._own(leaf, node, overwrite=True)
                if leaf.grad_fn is not None:
                    self._makers[leaf.grad_fn.name(), leaf.grad_fn._sequence_nr()] = node
            elif output.kind is OutputKind.KEPT:
                maker = self._nodes[self._writer[key]]
                if maker.kind != _OUTPUT or maker.detail[0] != index:
                    self._declared.add(
                        (index, position)
                    )  # an alias of something captured: only the tape can give it back
            self._origins.setdefault(key, []).append(output)

    def declare(self, tensor: Tensor) -> bool:
        """``recompute_needs_tensor``: persist every output of SAVE regions on the storage of ``tensor``."""
        found = False
        for key in storage_keys(tensor):
            node = self._writer.get(key)
            if node is not None and self._nodes[node].kind == _OUTPUT:
                self._declared.add(self._nodes[node].detail)
                found = True
        return found

    def read_so_far(self) -> set[tuple[int, int]]:
        """(region, leaf) of the SAVE outputs that recomputed code has read by now."""
        reads = {read for node in self._nodes if node.kind == _OP for read in node.reads}
        return {self._nodes[read].detail for read in reads if self._nodes[read].kind == _OUTPUT}

    def host_read(self, tensor: Tensor, method: str) -> None:
        """Recomputed code reads the data of ``tensor`` without the dispatcher.

        What happens inside an operation (another dispatch mode looks at its arguments, say) is no read of the body's.
        """
        if self._in_region is None and not self._operations:
            reads = tuple({self._source(key): None for key in storage_keys(tensor)})
            self._roots.append(self._add(_OP, reads, f"{method}() at {user_line()}"))

    # --- The dispatch mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._operations += 1
        try:
            return self._operation(func, args, kwargs or {})
        finally:
            self._operations -= 1

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = getattr(func, "_schema", None)
        written = written_by(func, args, kwargs)
        if written:
            self._before_write(written, str(func))
        if self._in_region is not None:
            self._region_writes.update(key for tensor in written for key in storage_keys(tensor))
            return func(*args, **kwargs)
        tags = getattr(func, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            result = self._draw(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        self._record(func, schema, tags, args, kwargs, written, result)
        return result

    def _record(
        self, func: Any, schema: Any, tags: Any, args: Any, kwargs: dict[str, Any], written: list[Tensor], result: Any
    ) -> None:
        name = schema.name if schema is not None else str(func)
        read_keys = [key for tensor in tensors_in((args, kwargs)) for key in storage_keys(tensor)]
        results = list(tensors_in((result,)))
        if not written and results:
            made = [key for tensor in results for key in storage_keys(tensor)]
            if made and all(key in read_keys for key in made):
                return  # a view reads nothing
        reads: tuple[int, ...] = ()
        if name not in METADATA_ONLY:
            reads = tuple({self._source(key): None for key in read_keys})
        node = self._add(_OP, reads, f"{name.removeprefix('aten::')} at {user_line()}")
        for tensor in (*results, *written):
            self._own(tensor, node, overwrite=bool(written) or not _shares(tensor, read_keys))
        for tensor in written:
            self._writes.extend((node, key) for key in storage_keys(tensor))
        if (
            written
            or not results
            or torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
            or name.startswith(("c10d", "_c10d"))
            or not runs_without_data(func, results)
        ) and name not in METADATA_ONLY:
            self._roots.append(node)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        def drawn(generator: torch.Generator) -> None:
            where = f"{func._schema.name.removeprefix('aten::')} at {user_line()}"
            self.random = self.random or where
            self._own_generators = self._own_generators or not is_default(generator)
            if covered(self._tape.hooks, generator) is False:
                raise RandomStateError(random_message(self._tape.name, where, generator))

        return drawing(func, args, kwargs, drawn)

    def _check_host_random(self) -> None:
        """Refuse what recomputed code draws from the generators of Python and numpy, which replay would draw anew."""
        source = None if self._tape.hooks else self._host_random.moved()
        if source is not None:
            raise RandomStateError(
                f"Recomputed code of checkpoint {display_name(self._tape.name)} draws random numbers from {source}, "
                f"which replay would "
                f"draw anew: the gradients would be wrong.\n"
                f"To fix: draw before the checkpoint and pass the numbers in, put the draw in a region with "
                f"recompute=False, or pass a "
                f"state hook (recompute_state_hooks=...) whose snapshot() and restore() get and set the state of "
                f"{source}."
            )

    def _before_write(self, written: list[Tensor], name: str) -> None:
        """Copy persisted outputs that are about to be modified; remember writes to what the body did not make."""
        for tensor in written:
            for key in storage_keys(tensor):
                for output in self._origins.pop(key, ()):
                    if output.kind is OutputKind.KEPT and output.unpack is None and not output.cloned:
                        output.data = private_copy(output.data)
                        output.cloned = True
                if key not in self._writer and self._in_region is None and key not in self._external_writes:
                    try:
                        self._external_writes[key] = (tensor, tensor._version, f"{name} at {user_line()}")
                    except RuntimeError:
                        continue

    def _source(self, key: int) -> int:
        node = self._writer.get(key)
        if node is None:
            node = self._add(_EXTERNAL, (), key)
            self._writer[key] = node
        return node

    def _own(self, tensor: Tensor, node: int, *, overwrite: bool) -> None:
        for storage in storages_of(tensor):
            key = storage._cdata
            if overwrite or key not in self._writer:
                self._writer[key] = node
            if key not in self._weak:
                self._weak[key] = WeakStorage(storage)

    def _add(self, kind: int, reads: tuple[int, ...], detail: Any) -> int:
        self._nodes.append(_Node(kind, reads, detail))
        return len(self._nodes) - 1

    # --- What was learned

    def plan(self, function: Any, outputs: list[Any], early_stop: bool) -> Plan:
        """The plan for the path just observed. Raises ``ModifiedError`` for what no replay can reproduce."""
        self._check_host_random()
        alive = [event for event in self._events if event.slot() is not None]
        last = max((event.position for event in alive), default=-1)
        saved = {event.storage for event in alive}
        to_end = any(node >= last and key in saved for node, key in self._writes)
        end = max((event.number for event in alive), default=0)
        if alive and (to_end or not early_stop):
            last, end = len(self._nodes), _NO_END
        starts = [event.node for event in alive if event.node is not None]
        starts += [root for root in self._roots if root < last]
        readers: dict[int, str] = {}
        needed = self._slice(starts, readers)
        self._join_functions(outputs, end, needed, readers)
        self._check(needed)
        keep: dict[int, set[int]] = {}
        inputs: set[int] = set()
        for node in needed:
            kind, _, detail = self._nodes[node]
            if kind == _OUTPUT:
                keep.setdefault(detail[0], set()).add(detail[1])
            elif kind == _INPUT:
                inputs.update(detail)
        for region_index, position in self._declared:
            if not alive and position >= 0:
                continue  # what a region changed is kept all the same: another path after it may read it
            keep.setdefault(region_index, set()).add(position)
        shells = self._shells(needed, keep)
        steps = tuple(
            self._step(index, region, keep.get(index, set()), shells.get(index, set()), readers)
            for index, region in enumerate(self._tape.order)
        )
        wanted = {self._nodes[node].detail for node in needed if self._nodes[node].kind == _EXTERNAL}
        wanted -= set(self._external_writes)  # a counter of the body's own changes with every call
        found = (
            externals.find(function, lambda tensor: any(key in wanted for key in storage_keys(tensor)))
            if wanted
            else ()
        )
        return Plan(
            steps,
            len(self._tape.slots),
            frozenset(inputs),
            to_end,
            self.random,
            self._own_generators,
            found,
        )

    def _shells(self, needed: set[int], keep: dict[int, set[int]]) -> dict[int, set[int]]:
        """Outputs that nobody reads before another SAVE region overwrites them, where that region's version is needed.

        Replay must have a tensor to write into. They share memory with the later version: keeping them is free.
        """
        shells: dict[int, set[int]] = {}
        for after in sorted(self._overwritten, reverse=True):
            before = self._overwritten[after]
            if self._nodes[after].detail[1] in keep.get(self._nodes[after].detail[0], ()) and before not in needed:
                region_index, position = self._nodes[before].detail
                keep.setdefault(region_index, set()).add(position)
                shells.setdefault(region_index, set()).add(position)
        return shells

    def _step(self, index: int, region: Region, keep: set[int], shells: set[int], readers: dict[int, str]) -> Step:
        shared = self._with_siblings(index, region, keep)
        changed = dict(region.changed)
        named = {
            self._nodes[node].detail: label for node, label in readers.items() if self._nodes[node].kind == _OUTPUT
        }
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
            frozenset(changed),
            frozenset(self._free(index, region, shared)),
            frozenset(self._rebuild_arguments.get(index, ())),
            tuple((position, named[index, position]) for position in sorted(keep) if (index, position) in named),
        )

    def _with_siblings(self, index: int, region: Region, keep: set[int]) -> set[int]:
        """``keep`` and the outputs on the same storages, which cost nothing more."""
        wanted = {position for position in keep if position >= 0}
        kept = set().union(*[self._output_keys.get((index, position), ()) for position in wanted])
        siblings = {
            position
            for position, output in enumerate(region.outputs)
            if output.kind is OutputKind.KEPT and not kept.isdisjoint(self._output_keys.get((index, position), ()))
        }
        return keep | siblings

    def _free(self, index: int, region: Region, keep: set[int]) -> set[int]:
        """Outputs in memory that the region's own saves keep."""
        saved = self._kept.get(index, set())
        return {
            position
            for position, output in enumerate(region.outputs)
            if output.kind is OutputKind.KEPT and position not in keep and not output.cloned
            if (keys := self._output_keys.get((index, position))) and saved.issuperset(keys)
        }

    def _slice(self, starts: list[int], readers: dict[int, str]) -> set[int]:
        needed: set[int] = set()
        pending = sorted(set(starts), reverse=True)
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed.add(node)
            for read in self._nodes[node].reads:
                readers.setdefault(read, self._nodes[node].detail)
                pending.append(read)
        return needed

    def _join_functions(self, outputs: list[Any], end: int, needed: set[int], readers: dict[int, str]) -> None:
        """Add what custom autograd Functions of recomputed code read; the dispatcher may not have seen it.

        Those behind ``end``, the last save, are not run again.
        """
        if not self._makers:
            return
        first = self._tape.first_sequence_nr
        seen: set[Any] = set()
        pending = [one.grad_fn for one in outputs if isinstance(one, Tensor) and one.grad_fn is not None]
        while pending:
            function = pending.pop()
            if function in seen or function._sequence_nr() < first or function._sequence_nr() > 1 << 62:
                continue
            seen.add(function)
            following = [edge for edge, _ in function.next_functions if edge is not None]
            number = function._sequence_nr()
            if (
                number < end
                and isinstance(function, torch.autograd.function.BackwardCFunction)
                and not self._in_span(number)
            ):
                for edge in following:
                    maker = self._makers.get((edge.name(), edge._sequence_nr()))
                    if maker is not None and maker not in needed:
                        needed.add(maker)
                        readers.setdefault(maker, type(function).__name__.removesuffix("Backward"))
            pending.extend(following)

    def _in_span(self, number: int) -> bool:
        return any(start <= number < end for start, end in self._spans)

    def _check(self, needed: set[int]) -> None:
        """Refuse what replay could not reproduce."""
        for node in needed:
            kind, _, detail = self._nodes[node]
            if kind == _STALE:
                raise ModifiedError(
                    f"Region {display_name(self._tape.name, detail)} (recompute=False) modifies in place a tensor that "
                    f"it "
                    f"captured, and recomputed code reads that tensor afterwards; replay skips the region, so the "
                    f"change "
                    f"would be missing.\n"
                    f"To fix: pass the tensor to the region as an argument, work on a .clone() inside the region, or "
                    f"mark "
                    f"it recompute=True."
                )
        if self._tape.hooks:
            return  # the user carries state; what is modified outside the body is theirs to restore
        for key, (tensor, version, where) in self._external_writes.items():
            writers = {node for node, written in self._writes if written == key}
            read = any(writers & set(self._nodes[node].reads) and node not in writers for node in needed)
            if read and tensor._version != version:
                raise ModifiedError(
                    f"Recomputed code of checkpoint {display_name(self._tape.name)} modifies a tensor from outside in "
                    f"place "
                    f"({where}) and reads it afterwards; a replay would modify it a second time and compute something "
                    f"else.\n"
                    f"To fix: put that code in a region with recompute=False, or pass a state hook that restores the "
                    f"tensor "
                    f"(recompute_state_hooks=...)."
                )


def private_copy(tensor: Tensor) -> Tensor:
    """A copy with the geometry of ``tensor`` that shares nothing with it."""
    with torch.no_grad():
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return tensor.detach().clone()
        return laid_out(tensor.detach(), tensor.stride())


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of ``tensor`` with these strides. A stride of 0 is an expanded dimension; it is copied once."""
    source = tensor
    for dimension, step in enumerate(stride):
        if step == 0 and tensor.shape[dimension] > 1:
            source = source.narrow(dimension, 0, 1)
    copy = torch.empty_strided(source.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(source)
    return copy if source is tensor else copy.as_strided(tensor.shape, stride)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the operation ``func`` modifies."""
    found: list[Tensor] = []
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found.extend(tensors_in((value,)))
    return found


def _shares(tensor: Tensor, keys: list[int]) -> bool:
    return any(key in keys for key in storage_keys(tensor))
