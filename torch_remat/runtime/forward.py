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
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_remat.errors import ModifiedError, RandomStateError, display_name
from torch_remat.runtime import events, externals
from torch_remat.runtime.captured import captured
from torch_remat.runtime.compiled_code import compiles, what_saves
from torch_remat.runtime.dynamo import eager_only, live
from torch_remat.runtime.frame import Frame, current_frame, scopes
from torch_remat.runtime.generators import random_message
from torch_remat.runtime.handed_on import HandedOn
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
from torch_remat.runtime.observe import Observer, output_modified
from torch_remat.runtime.placeholder import can_stand_in, meta_of
from torch_remat.runtime.plan import Plan, Step, merged, path_of, registry
from torch_remat.runtime.region_outputs import SaveOutputs, note_address
from torch_remat.runtime.region_saves import RegionSaves
from torch_remat.runtime.region_writes import unobserved_writes
from torch_remat.runtime.state import SameOperations
from torch_remat.runtime.state_hooks import carry_state
from torch_remat.runtime.tape import (
    BASE_GRADIENT,
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
from torch_remat.runtime.tensors import private_copy, storage_keys
from torch_remat.runtime.tree import flatten, is_container
from torch_remat.runtime.views import SAME

__all__ = ["ForwardFrame", "run_forward"]


_reference = weakref.ref
_nobody: Any = lambda: None
"""In place of the reference to a slot: for a save that takes a position and needs no replay."""
_PATHS_TO_LOCATE = 4  # of a body that takes more, what it has begun to change is not looked for
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
        self.lost: str | None = None  # a SAVE region whose change of an argument replay could not repeat
        self.known = registry.known(key)
        self.layouts = self.known.layouts
        self.plans: list[Plan] = []
        self.located: list[tuple[Plan, list[externals.Seen]]] = []
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
            self._locate()
        self.wraps = bool(events.region_called.listeners) or profiling()
        self.codes: list[Any] | None = None
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
        if self.wraps:
            function = wrapped(function, tape, record, False)
        if recompute:
            if self.observer is not None and self.pair is not None:
                self._pack_arguments(args, kwargs)
            return function(*args, **kwargs)
        return self._call_save(function, record, step, args, kwargs)

    def _next_step(self, record: Region) -> Step | None:
        """What the plans say about the region starting now; None when none fits."""
        plans = self.plans
        if not plans:
            return None
        index = len(self.tape.order)
        if len(plans) == 1:
            steps = plans[0].steps
            if index < len(steps):
                step = steps[index]
                if step.starts(record):
                    return step
            self._deviated()
            return None
        fitting = [plan for plan in plans if index < len(plan.steps) and plan.steps[index].starts(record)]
        self.plans = fitting
        if not fitting:
            self._deviated()
            return None
        steps_here = [plan.steps[index] for plan in fitting]
        return merged(steps_here)

    def _deviated(self) -> None:
        """No plan fits this call: keep what was dropped so far and is still alive."""
        self.plans = []
        for record in self.tape.order:
            for index, reference, version in record.dropped:
                tensor = reference()
                if tensor is None or version_of(tensor) != version:
                    self.lost = record.name
                else:
                    SaveOutputs(self, record, None, None, None).keep_changed(index, tensor)
            record.dropped = []
            for position, output in enumerate(record.outputs):
                output.shell = False
                if output.kind is OutputKind.PLACEHOLDER and output.data is not None:
                    reference, version = output.data
                    tensor = reference()
                    if tensor is not None and version_of(tensor) == version:
                        output.kind, output.data, output.version = OutputKind.KEPT, tensor.detach(), version
                        output.meta = gradient_of(tensor)
                        if (record.name, position) in self.known.clones:
                            output.data = private_copy(tensor)
                            output.cloned = record.cloned = True

    def _call_save(self, function: Any, record: Region, step: Step | None, args: Any, kwargs: Any) -> Any:
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
        if self.tape.reruns is not None:
            root = externals.Root(function, [])
            record.outside = externals.locate(root, externals.find(root, lambda tensor: True))
        if observer is not None:
            observer.enter_region(record)
        elif step is None:
            function = unobserved_writes(self.tape, record.name, arguments, self._forget).around(function)
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
                result = function(*args, **kwargs)
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
        outputs = SaveOutputs(self, record, step, pair, saves)
        self._note_effects(outputs, arguments, versions)
        leaves = outputs.add_result(result, arguments)
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
            record.exit_states = [(hook, hook.snapshot()) for hook in self.hooks]
        for index, leaf in enumerate(arguments):
            changed = versions[index] >= 0 and leaf._version != versions[index]
            if changed and not any(arguments[other] is leaf for other, _ in record.changed):
                outputs.add_changed(index, leaf)

    def _forget(self) -> None:
        self.known.stay_observed()  # the next call of this body is observed again

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
            self.tape.inner_states.append([hook.snapshot() for hook in hooks])
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

    def close(self) -> None:
        """The pass is over. Autograd keeps the pack hook beside what it packed: let it hold no tensor."""
        for saves in self.open_saves:
            saves.forget()
        self.open_saves = []
        self.hook = None
        self.leaves = []
        self.plans = []
        self.located = []
        self.observer = None

    # --- The end of the body (rule 4)

    def finish(self, outputs: list[Any]) -> None:
        """Settle what is kept, check what was modified, complete the tape."""
        tape = self.tape
        for reference in self.loose:
            slot = reference()
            if slot is not None and not slot.is_modified():
                slot.probe = None
        plan = self._settle(outputs)
        tape.fits = plan is not None
        if plan is not None:
            tape.to_end = tape.to_end or plan.to_end
            if plan.random is not None and not tape.hooks:
                raise RandomStateError(random_message(tape.name, plan.random, torch.default_generator))
            tape.watch_draws = plan.own_generators or self.known.suspect
            self.known.suspect = False
            if plan.externals:
                self._settle_externals(plan)
        else:
            tape.to_end = True
            # Nobody has looked at this path; replay will, and then has to know what is as it was.
            tape.root = externals.root_of(tape)
            tape.externals = externals.locate(tape.root, externals.find(tape.root, lambda tensor: True))
        tape.to_end = tape.to_end or not early_stop_allowed()
        if tape.captured is not None:  # what the body's own calls assign is theirs to assign again
            tape.captured = tape.captured.without(captured(tape.function))
        for record in tape.order:
            for output in record.outputs:
                if output.kind is OutputKind.PLACEHOLDER:
                    output.data = None
        self._keep_inputs(plan)
        if any(True for _ in tape.living_slots()):
            self._check_versions()
        tape.complete = True

    def _locate(self) -> None:
        """Note what replay will read from outside before the body can change it."""
        reading = [plan for plan in self.plans if plan.externals]
        if reading:
            root = self.tape.root = externals.root_of(self.tape)
            self.located = [(plan, externals.locate(root, plan.externals)) for plan in reading[:_PATHS_TO_LOCATE]]

    def _settle_externals(self, plan: Plan) -> None:
        """What replay will read from outside, as it is now.

        What the body has changed of it would have been refused where the body was observed, if it did so then. Whether
        forward read the old value or the new one nobody knows: replay may read neither.
        """
        tape = self.tape
        tape.externals = next((before for one, before in self.located if one is plan), [])
        changed = any(seen.changed() is not None for seen in tape.externals)
        if changed:
            lost = externals.overwritten(tape.externals, replaced=plan.replaces, updated=plan.updates)
            carried = carry_state(tape.hooks)
            tape.suspects = [one.name for one in (externals.unrestored(tape, lost) if carried else lost)]
            tape.changes = not carried or bool(tape.suspects)
            if tape.suspects:
                self._forget()
        if changed or not tape.externals:
            tape.root = tape.root or externals.root_of(tape)
            tape.externals = externals.locate(tape.root, plan.externals)
        tape.to_end = tape.to_end or changed

    def _settle(self, outputs: list[Any]) -> Plan | None:
        tape = self.tape
        if self.observer is not None:
            plan = self.observer.plan(tape.function, outputs, early_stop_allowed())
            for record, step in zip(tape.order, plan.steps, strict=True):
                self._drop_unneeded(record, step)
            readings = self.observer.graph.readings()
            if readings:
                out_of_reach = self.observer.graph.out_of_reach
                if out_of_reach:
                    self.known.stay_observed()
                tape.handed_on = HandedOn(readings, self.known, None if out_of_reach else plan)
            else:
                self.known.learn(plan)
            if events.body_learned.listeners:
                events.body_learned(tape, plan)
            return plan
        count, regions = len(self.slots), len(tape.order)
        for plan in self.plans:
            if plan.slots == count and len(plan.steps) == regions:
                if len(self.known.plans) > 1:  # some may be kept for a path that this call could have taken
                    for record, step in zip(tape.order, plan.steps, strict=True):
                        self._drop_unneeded(record, step)
                return plan
        self._deviated()
        self.known.missed(path_of(tape.order, count))
        return None

    def _drop_unneeded(self, record: Region, step: Step) -> None:
        for position, output in enumerate(record.outputs):
            if output.kind is not OutputKind.KEPT:
                continue
            tensor = output.data
            if position in step.keep or (isinstance(tensor, Tensor) and not _can_stand_in(tensor, output.meta)):
                output.shell = position in step.shells
            elif isinstance(tensor, Tensor) and (output.unpack is None or isinstance(output.unpack, tuple)):
                meta = meta_of(tensor)._replace(requires_grad=bool(output.meta))
                if position in step.free:
                    note_address(record, position, tensor)
                output.kind, output.data, output.meta, output.unpack = OutputKind.PLACEHOLDER, None, meta, None
        self.pack_outputs(persisted(record))

    def _keep_inputs(self, plan: Plan | None) -> None:
        tape = self.tape
        for index, output in enumerate(tape.inputs):
            if output.kind is not OutputKind.KEPT or output.unpack is not None or plan is None or index in plan.inputs:
                continue
            if tape.reruns is not None:
                continue  # a region that runs again reads more than the plan knows
            tensor = output.data
            if can_stand_in(tensor) and not (tensor.is_leaf and tensor.requires_grad):
                output.kind, output.data, output.meta = OutputKind.PLACEHOLDER, None, meta_of(tensor)

    def _check_versions(self) -> None:
        """What replay will read must still be what it was when the body got or made it."""
        tape = self.tape
        if self.lost is not None:
            raise ModifiedError(
                f"Region {display_name(tape.name, self.lost)} modified an argument in place, and the body then took a "
                f"path that "
                f"it had not taken before, on which replay may read that argument; its value is gone.\n"
                f"To fix: call the checkpoint again, the path is known now; or work on a .clone() inside the region."
            )
        for index, output in enumerate(tape.inputs):
            if (
                output.kind is OutputKind.KEPT
                and output.unpack is None
                and version_of(output.data) != self.versions[index]
            ):
                raise ModifiedError(
                    f"The body of checkpoint {display_name(tape.name)} modifies its input {index} in place, and replay "
                    f"has to read "
                    f"the input as it was.\nTo fix: work on a copy (x = x.clone()) inside the body."
                )
        for record in tape.order:
            for leaf, output in persisted_by_leaf(record):
                if not output.cloned and _modified(output):
                    self.known.teach(path_of(tape.order, len(self.slots)), record.name, leaf, clone=True)
                    raise output_modified(tape, record)


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
                        observer.host_read, observer.mode_dependent, observer.inner_backward, observer.gradient_hook
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


def early_stop_allowed() -> bool:
    """False inside ``torch.utils.checkpoint.set_checkpoint_early_stop(False)``."""
    module = sys.modules.get("torch.utils.checkpoint")
    return getattr(module, "_enable_checkpoint_early_stop", None) is not False


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


def _can_stand_in(tensor: Tensor, gradient: int) -> bool:
    return gradient != BASE_GRADIENT and can_stand_in(tensor)


def _modified(output: Output) -> bool:
    if output.shell:
        return False
    if isinstance(output.version, tuple):
        version, probe = output.version
        return version is None or (probe is not None and probe._version != version)
    return version_of(output.data) != output.version


def persisted(record: Region) -> list[Output]:
    """The outputs of a SAVE region whose data is kept, and its arguments kept as it left them."""
    return [output for _, output in persisted_by_leaf(record)]


def persisted_by_leaf(record: Region) -> list[tuple[int, Output]]:
    """As :func:`persisted`, with the leaf of each; of argument ``i``, ``-1 - i``."""
    found = [(leaf, output) for leaf, output in enumerate(record.outputs) if output.kind is OutputKind.KEPT]
    return found + [(-1 - index, output) for index, output in record.changed] if record.changed else found
