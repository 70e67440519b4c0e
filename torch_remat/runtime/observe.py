"""The first call of a body: a dispatch mode that learns what replay will read.

It records what recomputed code does in a :class:`~torch_remat.runtime.body_graph.BodyGraph`, copies persisted outputs
before they are modified, and refuses random numbers that no state hook carries.

Kernels that the dispatcher does not see inside a custom ``autograd.Function`` are covered by the autograd graph: such a
node reads what its edges lead to. Those outside one meet an error at the placeholder's data pointer in replay.
"""

from __future__ import annotations

import functools
import weakref
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.errors import ModifiedError, RandomStateError, UnsupportedError, display_name
from torch_remat.runtime import externals
from torch_remat.runtime.body_graph import OP, BodyGraph
from torch_remat.runtime.compiled_code import guards_hold
from torch_remat.runtime.generators import HostRandom, covered, drawing, is_default, random_message
from torch_remat.runtime.graft import Seed
from torch_remat.runtime.inner_backward import check_inner_backward, was_there
from torch_remat.runtime.placeholder import METADATA_ONLY, runs_without_data, user_line
from torch_remat.runtime.plan import Plan
from torch_remat.runtime.state_hooks import as_restored, restoring
from torch_remat.runtime.tape import Kept, Output, OutputKind, Region, Slot, Tape
from torch_remat.runtime.tensors import (
    fills_its_memory,
    private_copies,
    share_alike,
    statistics_of,
    storage_keys,
    tensors_in,
    together,
    written_by,
)
from torch_remat.runtime.tree import flatten, unflatten
from torch_remat.runtime.views import extent

__all__ = ["Observer", "output_modified"]

_lift_fresh = torch.ops.aten.lift_fresh.default  # what torch.tensor(...) has just made goes through it


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
        self.graph = BodyGraph(tape)
        self._origins: dict[int, list[tuple[int, Output]]] = {}  # storage -> (region, persisted output on it)
        self._in_region: Region | None = None
        self._region_writes: dict[int, list[_Span]] = {}
        self._region_made: set[int] = set()
        self._region_start = 0
        self._before: externals.Before | None = None
        self._memories: externals.Memories | None = None
        self._operations = 0  # that are running now
        self.runs_compiled_code = False
        self._host_random = HostRandom()

    # --- What forward reports

    def inputs(self, leaves: list[Any]) -> None:
        """The checkpoint's argument leaves."""
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.graph.input(index, leaf)
        root = externals.root_of(self._tape)
        self._before = externals.Before(root)
        self._memories = externals.Memories(root)

    def saved(self, slot: weakref.ref[Slot], tensor: Tensor) -> None:
        """Recomputed code saves ``tensor`` in ``slot``."""
        self.graph.saved(slot, tensor, len(self.graph.nodes))
        if self._memories is not None and not self.graph.swapped:
            self.graph.swapped = self._memories.moved()

    def rebuild(self, slot: weakref.ref[Slot], region_index: int, argument: int | None, tensor: Tensor) -> None:
        """The SAVE region saves a recomputed argument (None: an input of the checkpoint), which replay will rebuild."""
        if argument is not None:
            self.graph.rebuild_arguments.setdefault(region_index, set()).add(argument)
        self.graph.saved(slot, tensor, self._region_start)

    def packed(self, region_index: int, tensor: Tensor) -> None:
        """A hook pair is about to pack what the SAVE region saves for its backward."""
        self.graph.packed.update(storage_keys(tensor))

    def kept(self, region_index: int, tensor: Tensor, payload: weakref.ref[Kept]) -> None:
        """The SAVE region keeps ``tensor`` for its backward, as ``payload``."""
        self.graph.kept.setdefault(region_index, set()).update(storage_keys(tensor))

    def is_recomputed(self, tensor: Tensor) -> bool:
        """Whether recomputed code of this body made ``tensor``."""
        keys = storage_keys(tensor)
        return bool(keys) and all(self.graph.is_operation(key) for key in keys)

    def enter_region(self, region: Region) -> None:
        """A SAVE region starts."""
        self._check_host_random()
        self._in_region = region
        self._region_writes = {}
        self._region_made = set()
        self._region_start = len(self.graph.nodes)
        self.graph.region_starts()

    def leave_region(self, region: Region, leaves: list[Any], arguments: list[Any]) -> None:
        """A SAVE region returned ``leaves`` (or raised); classify what it made and what it modified."""
        self._in_region = None
        self._host_random = HostRandom()
        self.graph.region_ends()
        index = len(self._tape.order) - 1
        claimed: dict[int, list[_Span]] = {}
        for argument, output in region.changed:
            self.graph.changed(index, argument, arguments[argument])
            for key in storage_keys(arguments[argument]):
                self._origins.setdefault(key, []).append((index, output))
                claimed.setdefault(key, []).append(_span(arguments[argument]))
        unclaimed = {
            key
            for key, spans in self._region_writes.items()
            if key in self.graph.writer and not all(_is_within(span, claimed.get(key, [])) for span in spans)
        }
        outside = map(self.graph.is_outside, self._region_writes.keys() - self._region_made)
        self.graph.updates = self.graph.updates or any(outside)
        for key in unclaimed:  # modified, and not as an argument: a captured tensor
            if self.graph.is_saved(key):
                raise ModifiedError(
                    f"Region {display_name(self._tape.name, region.name)} (recompute=False) has modified in place a "
                    f"tensor that recomputed code saved for its backward; replay skips the region and would not see "
                    f"it.\n"
                    f"To fix: work on a .clone() inside the region."
                )
            self.graph.stale(key, region.name)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._region_output(region, index, position, leaf)

    def _region_output(self, region: Region, index: int, position: int, leaf: Tensor) -> None:
        output = region.outputs[position]
        for key in storage_keys(leaf):
            if key not in self._region_made and (
                (output.kind is not OutputKind.KEPT and self.graph.was_made(key)) or self._is_from_outside(key)
            ):
                self.graph.source(key)
        self.graph.returned(index, position, leaf, persisted=output.kind is OutputKind.KEPT)
        for key in storage_keys(leaf):
            self._origins.setdefault(key, []).append((index, output))

    def _is_from_outside(self, key: int) -> bool:
        """Whether a storage that no operation seen so far has made or read can be reached from the body's function."""
        if key in self.graph.writer:
            return False
        return bool(externals.find(externals.root_of(self._tape), lambda tensor: key in storage_keys(tensor)))

    def declare(self, tensor: Tensor) -> None:
        """``recompute_needs_tensor``: persist every output of SAVE regions on the storage of ``tensor``."""
        self.graph.declare(tensor)

    def host_read(self, tensor: Tensor, method: str) -> None:
        """Recomputed code reads the data of ``tensor`` without the dispatcher.

        What happens inside an operation (another dispatch mode looks at its arguments, say) is no read of the body's.
        """
        if self._in_region is None and not self._operations:
            reads = self.graph.sources(storage_keys(tensor))
            self.graph.roots.append(self.graph.add(OP, reads, f"{method}() at {user_line()}"))

    def compiled_code(self, code: CodeType, variables: dict[str, Any]) -> None:
        """Compiled code starts. It runs for tensors only, and for no stand-ins, whether it reads their data or not."""
        if self._in_region is None and not self._operations:
            self.runs_compiled_code = True
            keys = [key for tensor in _asked_for(code, variables) for key in storage_keys(tensor)]
            reads = self.graph.sources([key for key in keys if not self.graph.is_outside(key)])
            self.graph.roots.append(self.graph.add(OP, reads, f"compiled code at {user_line()}"))

    def mode_dependent(self) -> None:
        """A function is called that does something else under a dispatch mode: later calls have to run under one."""
        self.graph.under_mode = self.graph.under_mode or self._in_region is None

    def inner_backward(self, outputs: Any, inputs: Any, accumulates: bool) -> None:
        """Autograd is about to run inside the body."""
        if self._in_region is None:
            check_inner_backward(self._tape, outputs, inputs, accumulates=accumulates)

    def gradient_hook(self, tensor: Tensor) -> None:
        """Recomputed code registers a gradient hook on ``tensor``."""
        if self._in_region is None and not self._tape.guards and was_there(self._tape, tensor, inputs=False):
            raise UnsupportedError(
                f"Recomputed code of checkpoint {display_name(self._tape.name)} registers a gradient hook on a "
                f"{tuple(tensor.shape)} tensor from outside, at {user_line()}: replay would register it a second time, "
                f"before the gradient comes.\n"
                f"To fix: register it before the checkpoint is called, in a region with recompute=False, or under "
                f"`if not remat.is_recomputing():`."
            )

    # --- The dispatch mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and type(args[0]) is Seed:  # no operation of the body's: a replay that runs inside of it
            return func(*args)
        if restoring.get():
            return func(*args, **kwargs or {})
        self._operations += 1
        try:
            result = self._operation(func, args, kwargs or {})
            # Where a dispatch mode is active, torch does not count the changes of operations on lists (torch 2.14).
            for tensor in _written_in_lists(func, args):
                torch.autograd.graph.increment_version(tensor)
            return result
        finally:
            self._operations -= 1

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = getattr(func, "_schema", None)
        written = written_by(func, args, kwargs)
        made = self._fresh_outs(func, args, kwargs) if written else frozenset()
        if made:
            written = [tensor for tensor in written if not made.issuperset(storage_keys(tensor))]
        updated = statistics_of(func, args)
        if written:
            self._before_write(written, str(func))
        if updated:
            self.graph.saved_unread({key for tensor in updated for key in storage_keys(tensor)})
            self._before_write(updated, str(func), counted=False)
        if self._in_region is not None:
            for tensor in (*written, *updated):
                for key in storage_keys(tensor):
                    self._region_writes.setdefault(key, []).append(_span(tensor))
            given = {key for tensor in tensors_in((args, kwargs)) for key in storage_keys(tensor)}
            result = func(*args, **kwargs)
            for tensor in tensors_in((result,)):
                keys = storage_keys(tensor)
                if func is _lift_fresh or given.isdisjoint(keys):
                    self._region_made.update(keys)
                    self.graph.made(tensor, self._in_region.name)
            return result
        tags = getattr(func, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            result = self._draw(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        read_keys = [key for tensor in tensors_in((args, kwargs)) for key in storage_keys(tensor) if key not in made]
        if updated:  # by an operation of its own: the norm itself does not read them
            self._record(func, schema, tags, read_keys, updated, ())
            updated_keys = {key for tensor in updated for key in storage_keys(tensor)}
            read_keys = [key for key in read_keys if key not in updated_keys]
        self._record(func, schema, tags, read_keys, written, result)
        return result

    def _fresh_outs(self, func: Any, args: Any, kwargs: dict[str, Any]) -> frozenset[int]:
        """Memory that nobody has seen and that the operation fills, as ``out=``: as good as made by it.

        So does code that Inductor compiled: its buffers do not come from the dispatcher.
        """
        outs = written_by(func, (), kwargs, only_out=True)
        if not outs:
            return frozenset()
        others = {name: value for name, value in kwargs.items() if not any(value is out for out in outs)}
        read = {key for tensor in tensors_in((args, others)) for key in storage_keys(tensor)}
        keys = [key for tensor in outs if fills_its_memory(tensor) for key in storage_keys(tensor)]
        return frozenset(key for key in keys if key not in read and key not in self.graph.writer)

    def _record(
        self, func: Any, schema: Any, tags: Any, read_keys: list[int], written: list[Tensor], result: Any
    ) -> None:
        name = schema.name if schema is not None else str(func)
        results = list(tensors_in((result,)))
        if not written and results:
            made = [key for tensor in results for key in storage_keys(tensor)]
            if made and all(key in read_keys for key in made):
                return  # a view reads nothing
        reads: tuple[int, ...] = ()
        if name not in METADATA_ONLY:
            reads = self.graph.sources(read_keys)
        node = self.graph.add(OP, reads, f"{name.removeprefix('aten::')} at {user_line()}")
        for tensor in (*results, *written):
            self.graph.own(tensor, node, overwrite=bool(written) or not _shares(tensor, read_keys))
        for tensor in written:
            self.graph.writes.extend((node, key) for key in storage_keys(tensor))
        if (
            written
            or not results
            or torch.Tag.data_dependent_output in tags
            or torch.Tag.dynamic_output_shape in tags
            or name.startswith(("c10d", "_c10d"))
            or not runs_without_data(func, results)
        ) and name not in METADATA_ONLY:
            self.graph.roots.append(node)

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        operation = func._schema.name.removeprefix("aten::")
        return drawing(func, args, kwargs, functools.partial(self._drawn, operation))

    def _drawn(self, operation: str, generator: torch.Generator) -> None:
        where = f"{operation} at {user_line()}"
        self.graph.random = self.graph.random or where
        self.graph.own_generators = self.graph.own_generators or not is_default(generator)
        if covered(self._tape.hooks, generator) is False:
            raise RandomStateError(random_message(self._tape.name, where, generator))

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

    def _before_write(self, written: list[Tensor], name: str, *, counted: bool = True) -> None:
        """Copy persisted outputs that are about to be modified; remember writes to what the body did not make.

        With ``counted`` version counters will tell whether there was something to write.
        """
        for tensor in written:
            for key in storage_keys(tensor):
                if key in self._origins:
                    self._copy_apart(self._origins.pop(key))
                if self._in_region is None:
                    self.graph.external_write(key, tensor, f"{name} at {user_line()}", counted=counted)

    def _copy_apart(self, origins: list[tuple[int, Output]]) -> None:
        """Outputs of one region that share memory do so in the copies, too."""
        by_region: dict[int, list[Output]] = {}
        for region, output in origins:
            if output.kind is not OutputKind.KEPT or output.cloned:
                continue
            if output.unpack is not None and not isinstance(output.unpack, tuple):
                output.version = (None, None)  # a hook has packed it: refused at the end, if replay reads it
            else:
                by_region.setdefault(region, []).append(output)
        for region, outputs in by_region.items():
            record = self._tape.order[region]
            tensors = [output.data for output in outputs]
            waiting = any(output.unpack is not None for output in outputs)
            if not share_alike(tensors) or (waiting and len(together(tensors)) < len(tensors)):
                raise ModifiedError(
                    f"Region {display_name(self._tape.name, record.name)} (recompute=False) has returned tensors in "
                    f"one memory, which is now modified in place; they are of different kinds or go through "
                    f"saved_tensors_hooks one by one, so that replay could not make the change show in each.\n"
                    f"To fix: return a .clone() of one of them, or modify a .clone()."
                )
            record.cloned = True
            for output, copy in zip(outputs, private_copies(tensors), strict=True):
                output.data = copy
                output.cloned = True

    # --- What was learned

    def plan(self, function: Any, outputs: list[Any], early_stop: bool) -> Plan:
        """The plan for the path just observed. Raises our errors for what no replay can reproduce."""
        self._check_host_random()
        replaced = self._replaced()
        elsewhere = frozenset() if self._before is None or not replaced else self._before.still_there()
        aliases = [one for one in replaced if one.before <= elsewhere]
        plan = self.graph.plan(function, outputs, early_stop, [one for one in replaced if one not in aliases])
        self._judge_replaced(self.graph.replaced, aliases)
        return plan

    @property
    def outside(self) -> tuple[externals.Holder, ...]:
        """Where the tensors are that the call leads to, parameters excepted."""
        return () if self._before is None else self._before.holders

    def _replaced(self) -> list[externals.Replaced]:
        """Where replay will find something else than forward did, the state hooks having restored what they do."""
        if self._before is None:
            return []
        replaced = self._before.replaced()
        if not replaced or not self._tape.hooks:
            return replaced
        with as_restored(self._tape.hooks, self._tape.states):
            still = {one.name for one in self._before.replaced()}
        return [one for one in replaced if one.name in still]

    def _judge_replaced(self, replaced: list[externals.Replaced], aliases: list[externals.Replaced]) -> None:
        """Whether replay can do with what is there now: not where forward read what was there.

        Where it read only what it put there (``self.mask = self.mask.to(dtype)``), replay may find that and leave it.
        Of ``aliases`` something else still has the old memory, and that may have been read: replay will tell
        (``spectral_norm`` puts the weight that it has computed where an alias of a parameter was).
        """
        tape = self._tape
        for one in replaced:
            if self.graph.reads_old(one):
                raise externals.changed_again(tape.name, one.name)
            tape.changes = tape.to_end = True
        for one in aliases:
            if self.graph.reads_old(one):
                tape.suspects.append(one.now)
                tape.to_end = True

    def check_replay(self, replaced: list[externals.Replaced]) -> None:
        """Refuse what a replay, observed to its end, should not have read or drawn. ``replaced`` has it replaced."""
        self._check_host_random()
        changed = [found for seen in self._tape.externals for found in seen.all_changed()]
        slots = [slot for slot in self._tape.living_slots() if slot.tensor is not None]
        self.graph.check_replay(slots, changed, self._tape.suspects, replaced)


def output_modified(tape: Tape, record: Region) -> ModifiedError:
    """The error for a persisted output that was modified and that replay has to read as it was."""
    return ModifiedError(
        f"An output of region {display_name(tape.name, record.name)} was modified in-place after the region returned "
        f"it, and replay has to read it as it was.\n"
        f"To fix: modify a .clone() of it, or move the in-place operation into the region."
    )


def _written_in_lists(func: Any, args: Any) -> list[Tensor]:
    if not any(isinstance(one, (list, tuple)) for one in args):
        return []
    written = written_by(func, [one if isinstance(one, (list, tuple)) else None for one in args], {})
    return [tensor for tensor in written if not torch.is_inference(tensor)]  # those have no counter


_Span = tuple[int, int] | None


def _span(tensor: Tensor) -> _Span:
    """The bytes of its storage between which ``tensor`` lies; None where it is no plain tensor."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + extent(tensor)) * tensor.itemsize


def _is_within(span: _Span, spans: list[_Span]) -> bool:
    """Whether one of ``spans`` covers ``span``, as far as one can tell."""
    return any(one is None or span is None or (one[0] <= span[0] and span[1] <= one[1]) for one in spans)


def _asked_for(code: CodeType, variables: dict[str, Any]) -> list[Tensor]:
    """The tensors in ``variables`` without which compiled ``code`` would not run; it may use a part of a container."""
    leaves: list[Any] = []
    try:
        spec = flatten(variables, leaves)
    except RecursionError:  # a container that holds itself
        return [value for value in variables.values() if isinstance(value, Tensor)]
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if guards_hold(code, unflatten(spec, leaves)):
        without = {index: [*leaves[:index], None, *leaves[index + 1 :]] for index in tensors}
        tensors = [index for index in tensors if not guards_hold(code, unflatten(spec, without[index]))]
    return [leaves[index] for index in tensors]


def _shares(tensor: Tensor, keys: list[int]) -> bool:
    return any(key in keys for key in storage_keys(tensor))
