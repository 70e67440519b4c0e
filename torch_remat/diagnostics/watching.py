"""An observed run that remembers more than a plan needs: who saved and read what, on which line.

The run is the observed one of the runtime (``runtime/observe.py``), with a subclass of its observer and a forward frame
that has no knowledge of the body and hands on none: later calls of the body do what they would have done without.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_remat.diagnostics.explanation import RandomOperation
from torch_remat.errors import UsageError
from torch_remat.runtime.dynamo import eager_only
from torch_remat.runtime.forward import ForwardFrame
from torch_remat.runtime.frame import Frame, current_frame, scopes
from torch_remat.runtime.generators import GeneratorHook, HostRandom, covered
from torch_remat.runtime.observe import Observer
from torch_remat.runtime.placeholder import user_line
from torch_remat.runtime.plan import Known, Plan
from torch_remat.runtime.tape import Kept, Region, Slot, Tape
from torch_remat.runtime.tensors import storage_keys, storages_of, tensors_in

__all__ = ["Generators", "Metadata", "RunsCheckpoints", "Save", "WatchedForward", "Watching", "WatchingRoot", "meta_of"]

_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None)

Metadata = tuple[tuple[int, ...], str]
"""Shape, and dtype as people write it."""


class RunsCheckpoints(BaseException):
    """Unwinds a function taken for a body: it runs checkpoints of its own."""


class Generators:
    """The states of all random generators when made, and of others when first seen."""

    def __init__(self) -> None:
        devices = ["cpu"]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        hook = GeneratorHook(*devices)
        self._hooks: list[tuple[GeneratorHook, Any]] = [(hook, hook.snapshot())]
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else (numpy, numpy.get_state())

    def see(self, values: Any) -> None:
        """Remember the generators among ``values`` as they are, unless they were seen before."""
        for value in values:
            if isinstance(value, torch.Generator) and not any(covered((hook,), value) for hook, _ in self._hooks):
                hook = GeneratorHook(value)
                self._hooks.append((hook, hook.snapshot()))

    def put_back(self) -> None:
        """Set every generator to where it was."""
        for hook, state in self._hooks:
            hook.restore(state)
        random.setstate(self._python)
        if self._numpy is not None:
            module, state = self._numpy
            module.set_state(state)


class WatchingRoot(Frame):
    """Active around the call: checkpoints under it are watched ones, regions outside of them plain calls.

    ``on_finish(frame, observer, plan)`` is called when a checkpoint's forward has ended and before anything is let go.
    Without ``takes_checkpoints`` the function is the body of a checkpoint, and one that it runs itself unwinds it.
    """

    def __init__(
        self, generators: Generators, on_finish: Callable[[ForwardFrame, Watching, Plan], None], takes_checkpoints: bool
    ) -> None:
        super().__init__(Tape(None, _nothing))
        self.inert = 1
        self.checkpoint_frame = WatchedForward
        self.generators = generators
        self.on_finish = on_finish
        self.takes_checkpoints = takes_checkpoints

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Call the function; what it returns, and the graph behind it, is dropped."""
        token = current_frame.set(self)
        scope_token = scopes.set(scopes.get())
        try:
            with torch.enable_grad():
                function(*args, **kwargs)
        finally:
            scopes.reset(scope_token)
            current_frame.reset(token)


def _nothing() -> None:
    """The body of the root's tape, which is never run."""


class Save(NamedTuple):
    """A slot that was filled in forward: a save of recomputed code, or an argument that a SAVE region saves."""

    slot: weakref.ref[Slot]
    nodes: tuple[int, ...]  # that made it
    position: int  # nodes there were
    line: str
    region: str | None
    argument: int | None
    started: int  # region calls so far
    meta: Metadata
    bytes: int
    keys: tuple[int, ...]
    is_output: bool


class Watching(Observer):
    """The observer, remembering more than a plan needs."""

    def __init__(self, tape: Tape, generators: Generators) -> None:
        super().__init__(tape)
        self._generators = generators
        self.inside: list[str] = []  # RECOMPUTE regions that are open
        self.saves: list[Save] = []
        self.draws: list[RandomOperation] = []
        self.kept_saves: list[
            tuple[int, Metadata, str, Any]
        ] = []  # region, metadata, line, payload (None: packed by hooks)
        self.declarations: dict[Any, str] = {}
        self._made: set[int] = set()  # storages that operations of the body made
        self.outputs: dict[tuple[int, int], Metadata] = {}  # metadata by region and position

    def saved(self, slot: weakref.ref[Slot], tensor: Tensor) -> None:
        """Also remember line and metadata."""
        super().saved(slot, tensor)
        self._note(slot, tensor, self.inside[-1] if self.inside else None, None, len(self.graph.nodes))

    def rebuild(self, slot: weakref.ref[Slot], region_index: int, argument: int | None, tensor: Tensor) -> None:
        """Also remember line and metadata."""
        super().rebuild(slot, region_index, argument, tensor)
        region = self._tape.order[region_index].name
        index = self._tape.order[region_index].rebuilds[-1][1]
        self._note(slot, tensor, region, index, self._region_start)

    def _note(
        self, slot: weakref.ref[Slot], tensor: Tensor, region: str | None, argument: int | None, position: int
    ) -> None:
        keys = tuple(storage_keys(tensor))
        nodes = tuple(self.graph.writer[key] for key in keys if key in self.graph.writer)
        total = sum(storage.nbytes() for storage in storages_of(tensor))
        if tensor.grad_fn is not None and _sequence_nr is not None:
            is_output = tensor.grad_fn._sequence_nr() == _sequence_nr() - 1  # the node that saves is the newest one
        else:
            is_output = bool(nodes) and max(nodes) == position - 1
        self.saves.append(
            Save(
                *(slot, nodes, position, user_line(), region, argument, len(self._tape.order), meta_of(tensor), total),
                *(keys, is_output),
            )
        )

    def kept(self, region_index: int, tensor: Tensor, payload: weakref.ref[Kept]) -> None:
        """Also remember payload, line and metadata."""
        super().kept(region_index, tensor, payload)
        self.kept_saves.append((region_index, meta_of(tensor), user_line(), payload))

    def packed(self, region_index: int, tensor: Tensor) -> None:
        """Remember line and metadata."""
        super().packed(region_index, tensor)
        self.kept_saves.append((region_index, meta_of(tensor), user_line(), None))

    def _region_output(self, region: Region, index: int, position: int, leaf: Tensor) -> None:
        super()._region_output(region, index, position, leaf)
        self.outputs[index, position] = meta_of(leaf)

    def declare(self, tensor: Tensor) -> None:
        """Also remember the line."""
        for key in storage_keys(tensor):
            node = self.graph.writer.get(key)
            if node is not None and self._is_output(node):
                self.declarations.setdefault(self.graph.nodes[node].detail, user_line())
        super().declare(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self._generators.see((*args, *(kwargs or {}).values()))
        given = {key for tensor in tensors_in((args, kwargs)) for key in storage_keys(tensor)}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._made.update(key for tensor in tensors_in((result,)) for key in storage_keys(tensor) if key not in given)
        return result

    def _drawn(self, operation: str, generator: torch.Generator) -> None:
        self._add_draw(operation, user_line(), covered(self._tape.hooks, generator))

    def _check_host_random(self) -> None:
        source = self._host_random.moved()
        if source is not None:
            self._add_draw(source, "recomputed code", None if self._tape.hooks else False)
            self._host_random = HostRandom()

    def _add_draw(self, operation: str, where: str, carried: bool | None) -> None:
        self.draws.append(RandomOperation(operation, where, self.inside[-1] if self.inside else None, carried))

    # --- What was found

    def living_saves(self) -> list[Save]:
        """Those that backward can ask for, in the order in which replay makes them."""
        return [save for save in self.saves if save.slot() is not None]

    def operation(self, save: Save) -> str:
        """`` `silu` at model.py:88`` for the operation that saved it; only the line where the operation is unknown."""
        candidates = (save.position, save.position - 1)
        for index in reversed(candidates) if save.is_output else candidates:
            if 0 <= index < len(self.graph.nodes) and isinstance(self.graph.nodes[index].detail, str):
                name, _, line = self.graph.nodes[index].detail.partition(" at ")
                if line == save.line:
                    return f"`{name}` at {line}"
        return f"code at {save.line}"

    def reason(self, detail: Any) -> str | None:
        """Who in recomputed code needs the source with this ``detail``."""
        nodes = {index for index, node in enumerate(self.graph.nodes) if node.detail == detail}
        for save in self.living_saves():
            if nodes.intersection(save.nodes):
                if save.argument is not None:
                    return f"saved by region {save.region} for its backward"
                return f"read by {self.operation(save)}"
        for index in sorted(nodes):
            if index in self.graph.readers:
                name, at, line = self.graph.readers[index].partition(" at ")
                return f"read by `{name}`{at}{line}"
        return None

    def input_node(self, index: int) -> Any:
        """The detail of the node for leaf ``index`` of the arguments."""
        return next(node.detail for node in self.graph.nodes if isinstance(node.detail, list) and index in node.detail)

    def is_captured(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in memory that was there before the body ran and is no argument's."""
        keys = storage_keys(tensor)
        nodes = [self.graph.nodes[self.graph.writer[key]] for key in keys if key in self.graph.writer]
        return not any(key in self._made for key in keys) and not any(isinstance(one.detail, list) for one in nodes)

    def is_made_again(self, save: Save) -> bool:
        """Whether replay computes it: it is no input, SAVE output or captured tensor."""
        return any(isinstance(self.graph.nodes[node].detail, str) and not self._is_stale(node) for node in save.nodes)

    def _is_output(self, node: int) -> bool:
        return isinstance(self.graph.nodes[node].detail, tuple)

    def _is_stale(self, node: int) -> bool:
        return bool(self.graph.nodes[node].reads) and self.graph.nodes[node].detail in self._tape.regions


class WatchedForward(ForwardFrame):
    """A forward that is always observed, by a :class:`Watching`, and explained at its end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        root = current_frame.get()
        if not isinstance(root, WatchingRoot):
            raise UsageError("a watched checkpoint needs explain() around it.")
        self._root = root
        self._plan: Plan | None = None
        self.known = Known()
        self.plans = []
        self._watcher = self.observer = Watching(self.tape, root.generators)
        self._watcher.inputs(self.leaves)

    def enter_checkpoint(self, hooks: tuple[Any, ...]) -> tuple[Any, ...]:
        """A function that runs a checkpoint is no body; see the root."""
        if not self._root.takes_checkpoints:
            raise RunsCheckpoints
        return super().enter_checkpoint(hooks)

    @eager_only("a region of a torch_remat.checkpoint that runs eagerly is no part of a graph.")
    def call_region(self, function: Any, name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
        """Run the region, and let the observer know which one recomputed code is in."""
        observer = self._watcher
        if not recompute:
            return super().call_region(function, name, recompute, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            observer.inside.append(self.tape.order[-1].name)
            try:
                return function(*args, **kwargs)
            finally:
                observer.inside.pop()

        return super().call_region(run, name, recompute, args, kwargs)

    def plan_of(self, outputs: list[Any]) -> Plan | None:
        """As ever; random numbers without a state hook are reported."""
        plan = super().plan_of(outputs)
        if plan is not None:
            self._plan = plan = dataclasses.replace(plan, random=None)  # reported, not refused
        return plan

    def finish(self, outputs: list[Any]) -> None:
        """Settle as ever, then tell the root."""
        super().finish(outputs)
        if self._plan is not None:
            self._root.on_finish(self, self._watcher, self._plan)

    def close(self) -> None:
        """Autograd keeps the pack hook, and so this frame, beside what it packed: let it hold nothing."""
        super().close()
        del self._watcher, self._root


def meta_of(tensor: Tensor) -> Metadata:
    """Shape, and dtype as people write it."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
