"""The first run of a body and of its regions: fills the tape.

Rules:
 1. Saves of recomputed code become slots. The exceptions are parameters and other leaves that the body did not get as
    arguments: they are held as eager holds them, and checked at unpack.
 2. A SAVE region saves natively, with the checkpoint's hooks lifted, unless it saves an argument that replay can make
    (then the save is a slot, too) or a user's hook pair applies.
 3. A SAVE output is persisted only if the plan says that replay reads it. Without a plan that fits everything is
    persisted.
 4. The first call of a body is observed: everything is persisted while it runs and what the new plan does not need is
    dropped at its end.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_remat.errors import ModifiedError, display_name
from torch_remat.runtime import events, externals
from torch_remat.runtime.compiled_code import compiles, what_saves
from torch_remat.runtime.dynamo import eager_only, live
from torch_remat.runtime.frame import Frame, current_frame, scopes
from torch_remat.runtime.hooks import (
    HookPair,
    SavedTensorKind,
    call_pack,
    can_lift,
    inner_pair,
    native_pair,
    pop_hooks,
    push_hooks,
    recomputes,
    top_hooks,
    unpack_within,
)
from torch_remat.runtime.host_reads import HostReads
from torch_remat.runtime.labels import profiling, wrapped
from torch_remat.runtime.observe import Observer
from torch_remat.runtime.plan import Plan, Step, merged, registry, widened
from torch_remat.runtime.region_outputs import SaveOutputs
from torch_remat.runtime.region_saves import RegionSaves
from torch_remat.runtime.region_writes import CapturedVersions, unobserved_writes
from torch_remat.runtime.settle import drop_unneeded, locate, persisted, plan_of, settle
from torch_remat.runtime.state import SameOperations
from torch_remat.runtime.state_hooks import snapshots
from torch_remat.runtime.tape import (
    Kept,
    Output,
    OutputKind,
    Packed,
    Region,
    Slot,
    Span,
    Tape,
    gradient_of,
    stride_of,
    version_of,
    version_probe,
    without_frames,
)
from torch_remat.runtime.tensors import private_copies, storage_keys
from torch_remat.runtime.tree import flatten, is_container
from torch_remat.runtime.views import SAME

__all__ = ["ForwardFrame", "run_forward"]


_reference = weakref.ref
_nobody: Any = lambda: None
"""In place of the reference to a slot: for a save that takes a position and needs no replay."""
_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None) or int


class ForwardFrame(Frame):
    """The pass that fills the tape."""

    def __init__(
        self, tape: Tape, key: Any, leaves: list[Any], pair: HookPair | None, check: bool, unpack: Any
    ) -> None:
        super().__init__(tape)
        self.key = key
        self.leaves = leaves
        self.pair = pair
        self.hook: Any = self.pack  # one object, to be recognised on the stack of hooks
        self.unpack = unpack
        self.check = check
        self.slots = tape.slots
        self.versions = [version_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        self.input_ids = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        self.open_saves: list[RegionSaves] = []
        self.hooks = tape.hooks
        self.loose: list[weakref.ref[Slot]] = []  # state hooks may restore, and so write to, what these have saved
        self.lost: str | None = None  # a SAVE region whose change of a tensor replay could not repeat
        self.captures: str | None = (
            None  # a SAVE region that changed what it captured, which the plan says nobody reads
        )
        self.known = registry.known(key)
        if pair is not None and recomputes((pair.pack, pair.unpack)):
            # It runs this call twice, and tells what is packed by its position: nothing may be learned in between.
            self.known = self.known.unlearned()
        self.layouts = self.known.layouts
        self.plans: list[Plan] = []
        self.located: list[tuple[Plan, list[externals.Seen]]] = []
        self.everything: list[externals.Seen] = []
        self.observer: Observer | None = None
        self.under_mode = False
        tape.under_mode = bool(torch._C._len_torch_dispatch_stack())
        if self.known.wants_observing():
            tape.under_mode = True
            self.observer = Observer(tape)
            self.observer.inputs(leaves)
        else:
            self.plans = self.known.plans
            self.under_mode = self.known.under_mode
            tape.under_mode = tape.under_mode or self.under_mode
            locate(self)
        self.wraps = bool(events.region_called.listeners) or profiling()
        self.codes: list[Any] | None = None
        self.held: list[Any] = []  # what compiled code may get from SAVE regions, until the path of the call is known
        if tape.check is not None:
            self.hook = tape.check.forward_hook(self)
        if compiles():
            self.codes = tape.codes = []

    # --- Saves of recomputed code (rule 1)

    def pack(self, tensor: Tensor) -> Any:
        """Pack hook of recomputed code. The hottest function here: one call for each save."""
        slots = self.slots
        if tensor.is_leaf and tensor.requires_grad and id(tensor) not in self.input_ids:
            slots.append(_nobody)
            if self.check and len(self.layouts) < len(slots):
                self.layouts.append(None)
            if self.codes is not None:
                self.codes.append(what_saves())
            return Kept(tensor, (self.tape.name, None, 0))
        expected = None
        if self.check:
            expected = (tensor.shape, tensor.dtype, tensor.device)
            layouts = self.layouts
            position = len(slots)
            if position == len(layouts):
                layouts.append(expected)
            elif layouts[position] == expected:
                expected = layouts[position]  # one object less for each save, which the garbage collector would count
            else:
                layouts[position] = expected
        slot = Slot(expected, tensor)
        reference = _reference(slot)
        slots.append(reference)
        if self.codes is not None:
            self.codes.append(what_saves())
        if self.hooks and not tensor.requires_grad:
            self.loose.append(reference)
        if self.observer is not None:
            self.observer.saved(reference, tensor)
        return slot

    # --- Regions

    @eager_only("a region of a torch_remat.checkpoint that runs eagerly is no part of a graph.")
    def call_region(self, function: Any, name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
        """Run one region call and record it."""
        tape = self.tape
        name = self.claim(name)
        record = Region(name, recompute, len(self.slots))
        step = self._next_step(record)
        tape.regions[name] = record
        tape.order.append(record)
        if events.region_started.listeners:
            events.region_started(tape, record)
        run = wrapped(function, tape, record, False) if self.wraps else function
        if recompute:
            if self.observer is not None and self.pair is not None:
                self._pack_arguments(args, kwargs)
            return run(*args, **kwargs)
        return self._call_save(function, run, record, step, args, kwargs)

    def _next_step(self, record: Region) -> Step | None:
        """What the plans say about the region starting now; None when none fits."""
        plans = self.plans
        if not plans:
            return None
        index = len(self.tape.order)
        fitting = [plan for plan in plans if index < len(plan.steps) and plan.steps[index].starts(record)]
        if len(fitting) < len(plans):
            self.plans = fitting
            if not fitting:
                self.deviated()
                return None
        step = fitting[0].steps[index]
        if len(fitting) > 1:
            step = merged([plan.steps[index] for plan in fitting])
        rare = self.known.rare.get(record.name) if self.known.rare else None
        return step if rare is None else widened(step, rare)

    def _narrow(self, record: Region) -> None:
        """A SAVE region has returned: a plan fits no more that says that it does something else with its arguments.

        That is, hands back others, or changes one which it did not change: what is read may be what it would have
        overwritten.
        """
        index = len(self.tape.order) - 1
        changed = {leaf for leaf, *_ in (*record.changed, *record.dropped)}
        steps = [plan.steps[index] for plan in self.plans]
        fits = [step.given == record.given and step.changed <= changed for step in steps]
        if not all(fits):
            self.plans = [plan for plan, one in zip(self.plans, fits, strict=True) if one]
            if not self.plans:
                self.deviated()

    def deviated(self) -> None:
        """No plan fits this call: keep what was dropped so far and is still alive."""
        self.plans = []
        self.lost = self.lost or self.captures
        for record in self.tape.order:
            for index, reference, version in record.dropped:
                tensor = reference()
                if tensor is None or version_of(tensor) != version:
                    self.lost = record.name
                else:
                    SaveOutputs(self, record, None, None, None).keep_changed(index, tensor)
            record.dropped = []
            for _, output in record.changed:
                output.shell = False
            copies: list[tuple[Output, Tensor]] = []
            for position, output in enumerate(record.outputs):
                output.shell = False
                if output.kind is OutputKind.PLACEHOLDER and output.data is not None:
                    reference, version = output.data
                    tensor = reference()
                    if tensor is not None and version_of(tensor) == version:
                        output.kind, output.data, output.version = OutputKind.KEPT, tensor.detach(), version
                        output.meta = gradient_of(tensor)
                        if (record.name, position) in self.known.clones:
                            copies.append((output, tensor))
            for (output, _), copy in zip(copies, private_copies([tensor for _, tensor in copies]), strict=True):
                output.data = copy
                output.cloned = record.cloned = True

    def _call_save(self, function: Any, run: Any, record: Region, step: Step | None, args: Any, kwargs: Any) -> Any:
        observer = self.observer
        top = top_hooks()
        ours_on_top = top is not None and top[0] is self.hook
        theirs = not ours_on_top and recomputes(top)  # will run the region again and needs its saves as they come
        pair = None if theirs else inner_pair(self.pair) if ours_on_top or top is None else native_pair(top)
        saves: RegionSaves | None = None
        arguments = _leaves_of(args, kwargs)
        versions = [version_of(leaf) if isinstance(leaf, Tensor) else -1 for leaf in arguments]
        gradients = (
            [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments] if observer is not None else []
        )
        hooked = pair is not None or observer is not None or (step is not None and step.rebuild) or not can_lift
        if hooked and not theirs:
            saves = RegionSaves(self, record, step, pair, arguments, versions)
        captured: CapturedVersions | None = None
        if self.tape.reruns is not None:
            root = externals.Root(function, [])
            record.outside = externals.locate(root, externals.find(root, lambda tensor: True))
        if observer is not None:
            observer.enter_region(record)
        elif step is not None:
            self.captures = record.name if step.captures else self.captures
            captured = None if step.captures else CapturedVersions(function)
        else:
            run = unobserved_writes(self.tape, record.name, arguments, self.forget).around(run)
        if ours_on_top:
            pop_hooks()
        if saves is not None:
            push_hooks(saves.pack, self.unpack)
        span = record.span = Span(record.name, _sequence_nr())
        self.tape.spans.items.append(span)
        self.inert += 1
        self.phase.inside = False
        try:
            try:
                result = run(*args, **kwargs)
            finally:
                self.inert -= 1
                self.phase.inside = self.inert == 0
                span.end = _sequence_nr()
                if saves is not None:
                    pop_hooks()
                if ours_on_top:
                    push_hooks(self.hook, self.unpack)
        except BaseException as error:
            if isinstance(error, Exception):  # the body may catch it: replay raises it again, after what came before it
                record.error = without_frames(error)
                self._note_effects(SaveOutputs(self, record, step, pair, saves), arguments, versions)
            if saves is not None:
                saves.close()
            if observer is not None:
                observer.leave_region(record, [], arguments)
            raise
        if captured is not None:
            captured.check(self.tape, record.name, arguments, self.forget)
        outputs = SaveOutputs(self, record, step, pair, saves)
        self._note_effects(outputs, arguments, versions)
        leaves = outputs.add_result(result, arguments)
        if self.plans:
            self._narrow(record)
        if self.plans and self.known.compiled:
            # The code that reads them may be compiled again in this very call, and save what it did not save before.
            self.held.append(leaves)
        if observer is not None:
            self._check_gradients(record, arguments, versions, gradients)
            observer.leave_region(record, leaves, arguments)
        if saves is not None:
            saves.close()
            if pair is not None:
                self.open_saves.append(saves)
        return result

    def _check_gradients(self, record: Region, arguments: list[Any], versions: list[int], before: list[bool]) -> None:
        for leaf, version, required in zip(arguments, versions, before, strict=True):
            if version >= 0 and leaf._version == version and leaf.requires_grad is not required:
                raise ModifiedError(
                    f"Region {display_name(self.tape.name, record.name)} (recompute=False) changes whether its "
                    f"argument requires a gradient; replay skips the region and would not.\n"
                    f"To fix: return t.detach() from the region, or call requires_grad_() outside of it."
                )

    def _note_effects(self, outputs: SaveOutputs, arguments: list[Any], versions: list[int]) -> None:
        """What a SAVE region did besides returning: the state it left, the arguments it modified."""
        record = outputs.record
        if self.hooks:
            record.exit_states = list(zip(self.hooks, snapshots(self.hooks), strict=True))
        for index, leaf in enumerate(arguments):
            changed = versions[index] >= 0 and leaf._version != versions[index]
            if changed and not any(arguments[other] is leaf for other, _ in record.changed):
                outputs.add_changed(index, leaf)

    def forget(self) -> None:
        """The next call of this body is to be observed again."""
        self.known.stay_observed()

    # --- Outputs of SAVE regions (rule 3)

    def pack_output(self, output: Output) -> None:
        """Hand a persisted output to its hook pair, once."""
        waiting = output.unpack
        if not isinstance(waiting, tuple):
            return
        pair, context, saves = waiting
        tensor = output.data
        output.stride = stride_of(tensor)
        found = None if output.cloned or saves is None else saves.packed_around(tensor)
        if found is None:
            payload = call_pack(pair, tensor, SavedTensorKind.SAVE_OUTPUT, context)
            packed = Packed(payload, pair.unpack, None, (self.tape.name, None, 0))
            packed.is_output = True
            if saves is not None and not output.cloned:
                saves.add_packed(tensor, packed)
            found = packed, SAME
        output.data, recipe = found
        output.unpack = functools.partial(unpack_within, recipe)
        output.version = (output.version, None if output.cloned else version_probe(tensor))

    def pack_outputs(self, outputs: list[Output]) -> None:
        """Hand persisted outputs of one region to their hook pair; what contains others first, and those not at all."""
        waiting = [output for output in outputs if isinstance(output.unpack, tuple)]
        for output in sorted(waiting, key=lambda output: -output.data.numel()) if len(waiting) > 1 else waiting:
            self.pack_output(output)

    def enter_checkpoint(self, hooks: tuple[Any, ...]) -> tuple[Any, ...]:
        """A checkpoint with these state hooks starts inside this body; returns what :meth:`leave_checkpoint` gets."""
        before = self.hooks
        if hooks:
            self.tape.inner_states.append(snapshots(hooks))
            self.hooks = (*before, *hooks)
        return before

    def leave_checkpoint(self, before: tuple[Any, ...]) -> None:
        """The checkpoint inside has ended."""
        self.hooks = before

    def _pack_arguments(self, args: Any, kwargs: Any) -> None:
        """A recomputed region is about to read these: pack those that SAVE regions made, in the order of the calls."""
        wanted = {key for leaf in _leaves_of(args, kwargs) if isinstance(leaf, Tensor) for key in storage_keys(leaf)}
        for region in self.tape.order:
            waiting = [output for output in persisted(region) if isinstance(output.unpack, tuple)]
            self.pack_outputs([one for one in waiting if any(key in wanted for key in storage_keys(one.data))])

    def declare(self, tensors: tuple[Tensor, ...]) -> None:
        """``recompute_needs_tensor`` in forward; a plan that fits has learned it."""
        if self.observer is not None:
            for tensor in tensors:
                self.observer.declare(tensor)

    def name_saves(self, ctx: Any, saved: Mapping[str, Tensor | None]) -> None:
        """``save_for_backward`` in a SAVE region: names for reports."""
        number = getattr(ctx, "_sequence_nr", None)
        if self.inert and number is not None:
            span = self.tape.spans.items[-1]
            span.names = {**(span.names or {}), number(): tuple(saved)}

    def finish(self, outputs: list[Any]) -> None:
        """Settle what is kept, check what was modified, complete the tape (rule 4)."""
        settle(self, outputs)

    def drop_unneeded(self, record: Region, step: Step) -> None:
        """Let go of the outputs of a SAVE region that its step of the plan does not keep."""
        drop_unneeded(self, record, step)

    def plan_of(self, outputs: list[Any]) -> Plan | None:
        """The plan of the path that this call took."""
        return plan_of(self, outputs)

    def close(self) -> None:
        """The pass is over. Autograd keeps the pack hook beside what it packed: let it hold no tensor."""
        for saves in self.open_saves:
            saves.forget()
        self.open_saves = []
        self.held = []
        self.hook = None
        self.leaves = []
        self.plans = []
        self.located = []
        self.everything = []
        self.observer = None


def run_forward(frame: ForwardFrame, function: Any, args: Any, kwargs: Any) -> Any:
    """Run the body under ``frame``; leaves no trace when it raises."""
    token = current_frame.set(frame)
    outer = live.phase
    live.phase = frame.phase
    frame.tape.scopes = scopes.get()
    try:
        push_hooks(frame.hook, frame.unpack)
        try:
            observer = frame.observer
            if observer is not None:
                with (
                    HostReads(
                        observer.host_read,
                        observer.mode_dependent,
                        observer.inner_backward,
                        observer.gradient_hook,
                        None if frame.codes is None else observer.compiled_code,
                    ),
                    observer,
                ):
                    return function(*args, **kwargs)
            if frame.under_mode:
                with SameOperations():
                    return function(*args, **kwargs)
            return function(*args, **kwargs)
        finally:
            pop_hooks()
    finally:
        live.phase = outer
        current_frame.reset(token)


def _leaves_of(args: Any, kwargs: Any) -> list[Any]:
    for arg in args:
        if is_container(arg):
            break
    else:
        if not kwargs:
            return list(args)
    leaves: list[Any] = []
    for arg in args:
        flatten(arg, leaves)
    for value in kwargs.values():
        flatten(value, leaves)
    return leaves
