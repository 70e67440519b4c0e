"""The end of a forward pass: what is kept of it, and whether it is still what replay has to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_remat.errors import ModifiedError, RandomStateError, display_name
from torch_remat.runtime import events, externals
from torch_remat.runtime.captured import captured_by_call
from torch_remat.runtime.compiled_code import is_compiled
from torch_remat.runtime.generators import random_message
from torch_remat.runtime.handed_on import HandedOn
from torch_remat.runtime.observe import output_modified
from torch_remat.runtime.placeholder import can_stand_in, meta_of
from torch_remat.runtime.plan import Plan, Step, path_of
from torch_remat.runtime.region_outputs import note_address
from torch_remat.runtime.state import early_stop_allowed
from torch_remat.runtime.state_hooks import carry_state
from torch_remat.runtime.tape import BASE_GRADIENT, Output, OutputKind, Region, version_of

if TYPE_CHECKING:
    from torch_remat.runtime.forward import ForwardFrame

__all__ = ["drop_unneeded", "locate", "persisted", "plan_of", "settle"]

_PATHS_TO_LOCATE = 16  # of a body that takes more, what it has begun to change is not looked for


def settle(frame: ForwardFrame, outputs: list[Any]) -> None:
    """Settle what is kept, check what was modified, complete the tape. ``outputs`` are the leaves that came out."""
    tape = frame.tape
    for reference in frame.loose:
        slot = reference()
        if slot is not None and not slot.is_modified():
            slot.probe = None
    plan = frame.plan_of(outputs)
    tape.fits = plan is not None
    if plan is not None:
        tape.to_end = tape.to_end or plan.to_end
        if plan.random is not None and not tape.hooks:
            raise RandomStateError(random_message(tape.name, plan.random, torch.default_generator))
        tape.watch_draws = plan.own_generators or frame.known.suspect
        frame.known.suspect = False
        if plan.externals:
            _settle_externals(frame, plan)
    else:
        tape.to_end = True
        # Nobody has looked at this path; replay will, and then has to know what is as it was.
        tape.root = externals.root_of(tape)
        lost = externals.overwritten(frame.everything, replaced=False, updated=False)
        if lost and carry_state(tape.hooks):
            lost = externals.unrestored(tape, lost)
        tape.suspects = [externals.Suspect(one.name, one.now) for one in lost]
        tape.externals = externals.locate(tape.root, externals.find(tape.root, lambda tensor: True))
    tape.to_end = tape.to_end or not early_stop_allowed()
    if tape.captured is not None:  # what the body's own calls assign is theirs to assign again
        tape.captured = tape.captured.without(captured_by_call(tape.function, frame.leaves))
    for record in tape.order:
        for output in record.outputs:
            if output.kind is OutputKind.PLACEHOLDER:
                output.data = None
    _keep_inputs(frame, plan)
    if any(True for _ in tape.living_slots()):
        _check_versions(frame)
    tape.complete = True


def locate(frame: ForwardFrame) -> None:
    """Note what replay will read from outside before the body can change it."""
    reading = [plan for plan in frame.plans if plan.externals]
    if reading or frame.known.outside:
        root = frame.tape.root = externals.root_of(frame.tape)
        frame.everything = externals.locate(root, frame.known.outside)
        frame.located = [(plan, externals.locate(root, plan.externals)) for plan in reading[:_PATHS_TO_LOCATE]]


def _settle_externals(frame: ForwardFrame, plan: Plan) -> None:
    """What replay will read from outside, as it is now.

    What the body has changed of it would have been refused where the body was observed, if it did so then. Whether
    forward read the old value or the new one nobody knows: replay may read neither.
    """
    tape = frame.tape
    tape.externals = next((before for one, before in frame.located if one is plan), [])
    changed = any(seen.changed() is not None for seen in tape.externals)
    if changed:
        lost = externals.overwritten(tape.externals, replaced=plan.replaces, updated=plan.updates)
        carried = carry_state(tape.hooks)
        lost = externals.unrestored(tape, lost) if carried else lost
        tape.suspects = [externals.Suspect(one.name, one.now) for one in lost]
        tape.changes = not carried or bool(tape.suspects)
        if tape.suspects:
            frame.forget()
    if changed or not tape.externals:
        tape.root = tape.root or externals.root_of(tape)
        tape.externals = externals.locate(tape.root, plan.externals)
    tape.to_end = tape.to_end or changed


def plan_of(frame: ForwardFrame, outputs: list[Any]) -> Plan | None:
    """The plan of the path that this call took, learned now where it was observed; None where nobody knows it."""
    tape = frame.tape
    if frame.observer is not None:
        plan = frame.observer.plan(tape.function, outputs, early_stop_allowed())
        frame.known.outside = frame.observer.outside
        if frame.codes is not None:
            codes = {id(code): code for code in frame.codes}  # those that Dynamo makes cannot be hashed
            compiled = frame.observer.runs_compiled_code or any(map(is_compiled, codes.values()))
            frame.known.compiled = frame.known.compiled or compiled
        for record, step in zip(tape.order, plan.steps, strict=True):
            frame.drop_unneeded(record, step)
        readings = frame.observer.graph.readings()
        if readings:
            out_of_reach = frame.observer.graph.out_of_reach
            if out_of_reach:
                frame.known.stay_observed()
            tape.handed_on = HandedOn(readings, frame.known, None if out_of_reach else plan)
        else:
            frame.known.learn(plan)
        if events.body_learned.listeners:
            events.body_learned(tape, plan)
        return plan
    count, regions = len(frame.slots), len(tape.order)
    for plan in frame.plans:
        if plan.slots == count and len(plan.steps) == regions and all(frame.slots[one]() is None for one in plan.dead):
            if len(frame.known.plans) > 1 or frame.known.rare:  # some may be kept for another path
                for record, step in zip(tape.order, plan.steps, strict=True):
                    frame.drop_unneeded(record, step)
            return plan
    frame.deviated()
    frame.known.missed(path_of(tape.order, count))
    return None


def drop_unneeded(frame: ForwardFrame, record: Region, step: Step) -> None:
    """Let go of the outputs of a SAVE region that its step of the plan does not keep."""
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
    frame.pack_outputs(persisted(record))


def _keep_inputs(frame: ForwardFrame, plan: Plan | None) -> None:
    tape = frame.tape
    wanted = () if plan is None else {_first(tape.inputs, index) for index in plan.inputs}
    for index, output in enumerate(tape.inputs):
        if output.kind is not OutputKind.KEPT or output.unpack is not None or plan is None or index in wanted:
            continue
        if tape.reruns is not None:
            continue  # a region that runs again reads more than the plan knows
        tensor = output.data
        if can_stand_in(tensor) and not (tensor.is_leaf and tensor.requires_grad):
            output.kind, output.data, output.meta = OutputKind.PLACEHOLDER, None, meta_of(tensor)


def _check_versions(frame: ForwardFrame) -> None:
    """What replay will read must still be what it was when the body got or made it."""
    tape = frame.tape
    if frame.lost is not None:
        raise ModifiedError(
            f"Region {display_name(tape.name, frame.lost)} (recompute=False) modified a tensor in place, and the body "
            f"then took a path that it had not taken before, on which replay may read that tensor; replay skips the "
            f"region.\n"
            f"To fix: call the checkpoint again, the path is known now; or work on a .clone() inside the region."
        )
    for index, output in enumerate(tape.inputs):
        if (
            output.kind is OutputKind.KEPT
            and output.unpack is None
            and version_of(output.data) != frame.versions[index]
        ):
            raise ModifiedError(
                f"The body of checkpoint {display_name(tape.name)} modifies its input {index} in place, and replay "
                f"has to read "
                f"the input as it was.\nTo fix: work on a copy (x = x.clone()) inside the body."
            )
    for record in tape.order:
        for leaf, output in persisted_by_leaf(record):
            if not output.cloned and _modified(output):
                frame.known.teach(path_of(tape.order, len(frame.slots)), record.name, leaf, clone=True)
                raise output_modified(tape, record)


def _first(outputs: list[Output], index: int) -> int:
    """``index``, or the leaf that leaf ``index`` repeats."""
    return outputs[index].data if outputs[index].kind is OutputKind.REPEAT else index


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
