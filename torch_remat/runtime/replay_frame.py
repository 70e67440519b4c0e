"""The pass that fills slots: what it takes from recomputed code and what it hands out instead of running SAVE regions.

1. A recomputed save fills the slot of the same position. Before each region the position must be the one of forward.
2. A SAVE region is not entered. Its rebuilt saves are filled from the call's arguments, its outputs come from the
   tape, what it raised is raised again, and the state hooks are set to its exit.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from torch_remat.errors import (
    InvalidTypeError,
    ModifiedError,
    PolicyDriftError,
    SavesDriftError,
    UsageError,
    display_name,
)
from torch_remat.runtime import events, placeholder
from torch_remat.runtime.bitwise import maker_of, operation_of
from torch_remat.runtime.compiled_code import globals_of, is_compiled, is_same_program, what_saves
from torch_remat.runtime.dynamo import eager_only
from torch_remat.runtime.frame import Frame
from torch_remat.runtime.graft import as_result
from torch_remat.runtime.labels import profiling, wrapped
from torch_remat.runtime.placeholder import Meta, Origin, is_placeholder
from torch_remat.runtime.rerun import rerun
from torch_remat.runtime.state_hooks import restore, snapshots
from torch_remat.runtime.tape import (
    BASE_GRADIENT,
    LEAF_GRADIENT,
    Output,
    OutputKind,
    Packed,
    Region,
    Slot,
    Tape,
    can_set_versions,
    set_version,
    version_of,
    without_frames,
)
from torch_remat.runtime.tensors import copied_as_one, laid_out, private_copy, together, views_like
from torch_remat.runtime.tree import LEAF, flatten, unflatten
from torch_remat.runtime.views import layout_of, make

__all__ = ["CheckedReplayFrame", "ReplayFrame", "Stop", "stand_in", "taken"]


class Stop(BaseException):
    """Unwinds the body when every living slot is filled."""


class ReplayFrame(Frame):
    """The pass that fills slots."""

    replaying = True

    def __init__(self, tape: Tape, unfilled: int) -> None:
        super().__init__(tape)
        self._position = 0
        self._codes = tape.codes
        self._remaining = unfilled
        self._stops = not tape.to_end
        # Copies count from 0; a state hook may write to what it restores; under a dispatch mode some operations (the
        # gathers of c10d) do not count.
        self._trusted = (
            can_set_versions
            and not tape.hooks
            and not tape.under_mode
            and not torch._C._len_torch_dispatch_stack()
            and not tape.watch_draws
            and tape.fits
        )
        self._copies: dict[int, Tensor] = {}  # of outputs that the body modifies in place, by identity
        self._unpacked: list[Packed] = []  # for the outputs of the region that is being skipped
        # What the graph of this pass saves. User state may hold a tensor of it, and with that the graph.
        self._holders: list[list[Tensor]] = []
        self.refused: Exception | None = None  # why a save was refused
        self.drew = False  # a watched replay has drawn random numbers
        self._inner = 0
        self._wraps = bool(events.region_called.listeners) or profiling()
        self._undo: list[
            tuple[Any, Any]
        ] = []  # state hooks of checkpoints inside this one, and what they were before replay

    # --- Saves of recomputed code (rule 1)

    def pack(self, tensor: Tensor) -> Any:
        """Pack hook of recomputed code in replay."""
        position = self._position
        self._position = position + 1
        slots = self.tape.slots
        if position >= len(slots):
            raise self._refuse(SavesDriftError(self._drift(f"it saves more than the {len(slots)} tensors of forward")))
        if self._codes is not None:
            code = what_saves()
            if code is not self._codes[position]:
                self._other_code(self._codes[position], code)
        slot = slots[position]()
        if slot is None and tensor.is_leaf:
            return tensor
        kept = tensor.detach() if tensor.requires_grad else tensor
        holder = [kept]
        self._holders.append(holder)
        if slot is not None and slot.tensor is None:
            if slot.expected is not None and (tensor.shape, tensor.dtype, tensor.device) != slot.expected:
                found = (tensor.shape, tensor.dtype, tensor.device)
                raise self._refuse(SavesDriftError(self._metadata(position, slot.expected, found, tensor)))
            if type(tensor) is not Tensor and is_placeholder(tensor):
                raise self._refuse(placeholder.missing(tensor, "backward needs what is computed from it"))
            # The tensor that compiled code makes of a number counts on its own in each pass.
            self._fill(slot, kept, trusted=self._codes is None or not is_compiled(self._codes[position]))
        return holder

    def _refuse(self, error: Exception) -> Exception:
        """``error``, also for the case that what calls the pack hook (TorchScript) raises another one in its place."""
        self.refused = error
        return error

    def _fill(self, slot: Slot, tensor: Tensor, *, trusted: bool = True) -> None:
        slot.fill(tensor, tensor._version, self._trusted and trusted)
        self._remaining -= 1
        if self._remaining == 0 and self._stops:
            raise Stop

    # --- Regions (rule 2)

    @eager_only("a region of a torch_remat.checkpoint that runs eagerly is no part of a graph.")
    def call_region(self, function: Any, name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
        """Run or skip one region call."""
        tape = self.tape
        name = self.claim(name)
        record = tape.regions.get(name)
        if record is None:
            raise PolicyDriftError(
                f"No save record for region {display_name(tape.name, name)}: replay calls it and forward did not.\n"
                f"To fix: the body must take the same path in both passes; what decides the path has to come from its "
                f"arguments, "
                f"from a region with recompute=False, or from a state hook."
                if not recompute
                else f"Conflicting recompute settings for region {display_name(tape.name, name)}: "
                f"replay calls it with recompute=True "
                f"and forward did not call it.\nTo fix: the body must take the same path in both passes."
            )
        if record.recompute is not recompute:
            raise PolicyDriftError(
                f"Conflicting recompute settings for region {display_name(tape.name, name)}: forward had "
                f"recompute={record.recompute}, "
                f"replay has recompute={recompute}.\nTo fix: decide the policy once, before the checkpoint is called."
            )
        if self._position != record.slots_before:
            raise SavesDriftError(
                self._drift(
                    f"before region {display_name(tape.name, name)} it saves {self._position} tensors, in forward it "
                    f"saved "
                    f"{record.slots_before}"
                )
            )
        if not recompute:
            return self._skip(record, function, args, kwargs)
        if self._wraps:
            function = wrapped(function, tape, record, True)
        return function(*args, **kwargs)

    def _skip(self, record: Region, function: Any, args: Any, kwargs: Any) -> Any:
        arguments: list[Any] = []
        again: dict[int, Tensor] = {}
        if self.tape.reruns and record.name in self.tape.reruns and record.error is None:
            self.inert += 1
            try:
                again = rerun(self.tape, record, (self.pack, taken), function, args, kwargs)
            finally:
                self.inert -= 1
        if record.rebuilds or record.changed or any(output.kind in _OF_ARGUMENTS for output in record.outputs):
            for value in (*args, *kwargs.values()):
                flatten(value, arguments)
            for reference, index, recipe in record.rebuilds:
                slot = reference()
                if slot is not None and slot.tensor is None:
                    self._rebuild(record, slot, index, recipe, arguments)
            for index, output in record.changed:
                arguments[index] = self._change_again(record, index, output, arguments)
        if record.exit_states:
            restore(record.exit_states)
        if record.error is not None:
            raise without_frames(record.error)
        if record.cloned:
            self._copy_together([one for one in record.outputs if one.cloned and one.unpack is None])
        leaves: list[Any] = []
        for position, output in enumerate(record.outputs):
            made = again.get(position) if again else None
            leaf = self._serve(record, position, output, arguments, leaves) if made is None else made
            if output.attributes is not None:
                leaf.__dict__.update(output.attributes)
            leaves.append(leaf)
        if self._unpacked:
            for packed in self._unpacked:
                packed.ready = None
            self._unpacked.clear()
        return unflatten(record.spec, leaves)

    def _change_again(self, record: Region, index: int, output: Output, arguments: list[Any]) -> Tensor:
        """Give argument ``index`` the value that the region left in it; returns the tensor that holds it."""
        argument = self._argument(record, index, arguments)
        value = self.data(output, f"argument {index} for {display_name(self.tape.name, record.name)}")
        if type(argument) is not Tensor and is_placeholder(argument):
            return value  # nobody reads the argument under its old name, or the placeholder will say so
        if _is_same_memory(argument, value):
            return argument
        with torch.set_grad_enabled(value.requires_grad and not argument.requires_grad):
            argument.copy_(value)
        _restore_version(argument, output)
        return argument

    def _argument(self, record: Region, index: int, arguments: list[Any]) -> Tensor:
        argument = arguments[index] if index < len(arguments) else None
        if not isinstance(argument, Tensor):
            raise PolicyDriftError(
                f"Region {display_name(self.tape.name, record.name)} is called with other arguments in replay: leaf "
                f"{index} of its "
                f"arguments is {type(argument).__name__}, in forward it was a tensor.\n"
                f"To fix: call the region in the same way in both passes."
            )
        return argument

    def _rebuild(self, record: Region, slot: Slot, index: int, recipe: Any, arguments: list[Any]) -> None:
        name = display_name(self.tape.name, record.name)
        argument = self._argument(record, index, arguments)
        found = (argument.shape, argument.dtype, argument.device)
        if slot.expected is not None and found != slot.expected:
            raise SavesDriftError(
                f"Argument leaf {index} of region {name} has a different layout in replay: {_described(found)}, in "
                f"forward "
                f"{_described(slot.expected)}.\nTo fix: make recomputed code deterministic, or keep what drifts (a "
                f"router's choice, "
                f"say) in a region with recompute=False."
            )
        if type(argument) is not Tensor and is_placeholder(argument):
            raise placeholder.missing(argument, f"region {name} saves it for its backward")
        kept = make(argument.detach(), recipe)
        if kept is None:
            raise SavesDriftError(
                f"Argument leaf {index} of region {name} has a different layout in replay: its strides are now "
                f"{argument.stride()}, and the region saved a view of it.\n"
                f"To fix: make recomputed code deterministic in its memory layout, or keep the tensor in a region with "
                f"recompute=False."
            )
        self._fill(slot, kept, trusted=type(kept) is Tensor)  # one that is wrapped anew counts anew

    def _serve(self, record: Region, position: int, output: Output, arguments: list[Any], leaves: list[Any]) -> Any:
        kind = output.kind
        if kind is OutputKind.PLACEHOLDER:
            kept = None if output.free is None else output.free()
            if kept is not None and version_of(kept.tensor) == kept.version:
                tensor = kept.tensor.detach()
                return as_result(tensor) if output.meta.requires_grad else tensor
            name = display_name(self.tape.name)
            what = f"output {_label(record, position)} of region {display_name(self.tape.name, record.name)}"
            return stand_in(output.meta, Origin(name, what, record.name, position))
        if kind is OutputKind.KEPT:
            return self.data(output, f"output.{position} for {display_name(self.tape.name, record.name)}")
        if kind is OutputKind.OBJECT:
            return output.data
        if kind is OutputKind.REPEAT:
            return leaves[output.data]
        argument = self._argument(record, output.data, arguments)
        if kind is OutputKind.ARGUMENT:
            return argument
        (size, stride, start), shape, argument_stride = output.meta
        if argument.shape != shape or argument.stride() != argument_stride:
            raise SavesDriftError(
                f"Argument leaf {output.data} of region {display_name(self.tape.name, record.name)} has a different "
                f"layout in replay, and "
                f"the region returned a view of it.\nTo fix: make recomputed code deterministic."
            )
        return argument.as_strided(size, stride, argument.storage_offset() + start)

    # --- What is handed to the body

    def _copy_together(self, outputs: list[Output]) -> None:
        """Make those of one region that lie in one memory, which the body modifies, as views of one copy."""
        tensors = [output.data for output in outputs]
        for members in together(tensors):
            if len(members) == 1:
                continue
            parts = [tensors[index] for index in members]
            whole = copied_as_one(parts)
            if any(outputs[index].meta for index in members):
                whole = as_result(whole)
            for index, view in zip(members, views_like(parts, whole), strict=True):
                self._copies[id(outputs[index])] = view if outputs[index].meta else view.detach()
                _restore_version(view, outputs[index])

    def data(self, output: Output, what: str) -> Tensor:
        """The tensor of a persisted output or input, checked against later modification."""
        ready = self._copies.pop(id(output), None) if self._copies else None
        if ready is not None:
            return ready
        running = None if output.pending is None else output.pending()
        if running is not None:
            running.trigger_wait()  # nothing to do where forward has used it
        if output.unpack is not None:
            tensor = output.unpack(output.data)
            if type(output.data) is Packed and output.data.is_output:
                self._unpacked.append(output.data)
            if not isinstance(tensor, Tensor):
                raise InvalidTypeError(
                    f"the unpack hook returned {type(tensor).__name__} for {what}, expected the tensor."
                )
            version, probe = output.version
            if not output.shell and probe is not None and version_of(probe) != version:
                raise _modified(what, self.tape)
            tensor = private_copy(tensor) if output.cloned else tensor.detach()
            if output.stride is not None and tensor.stride() != output.stride and tensor.layout is torch.strided:
                tensor = laid_out(tensor, output.stride)
            _restore_version(tensor, output)
        elif output.cloned:
            tensor = private_copy(output.data)
            _restore_version(tensor, output)
        else:
            tensor = output.data
            if not output.shell and version_of(tensor) != output.version:
                raise _modified(what, self.tape)
            if tensor.is_leaf and tensor.requires_grad:
                # An alias, so that a hook which the body registers is not registered a second time. Parameters are
                # told apart by identity too often.
                return tensor.detach().requires_grad_() if type(tensor) is Tensor else tensor
            tensor = tensor.detach()
        if not output.meta:
            return tensor
        if output.meta == LEAF_GRADIENT:
            return tensor.requires_grad_()
        tensor = as_result(tensor)
        if output.meta == BASE_GRADIENT:
            with torch.no_grad():
                return tensor.view_as(tensor)
        return tensor

    # --- Checkpoints inside this one

    def enter_checkpoint(self, hooks: tuple[Any, ...]) -> tuple[Any, ...]:
        """Set the state hooks of a checkpoint inside this one as they were at its entry."""
        if hooks:
            states = self.tape.inner_states[self._inner]
            self._inner += 1
            self._undo.extend(zip(hooks, snapshots(hooks), strict=True))
            restore(zip(hooks, states, strict=True))
        return ()

    def undo(self) -> None:
        """Set the state hooks of inner checkpoints as they were before replay."""
        if self._undo:
            restore(reversed(self._undo))
            self._undo = []

    # --- The end

    def close(self) -> None:
        """The pass is over, and nothing needs a backward of its own graph any more.

        Where the body has stored a tensor of that graph, autograd keeps the pack hook: it holds nothing of the tape.
        """
        for holder in self._holders:
            holder.clear()
        self._holders = []
        self._copies = {}
        del self.tape

    @property
    def done(self) -> bool:
        """Replay has all that it came for, and the body goes on because it swallowed :class:`Stop`."""
        return self._remaining == 0 and self._stops

    def finished(self) -> None:
        """The body has returned: everything must be filled (rule 3)."""
        if self._remaining > 0 and self.tape.unfilled():
            raise SavesDriftError(
                self._drift(
                    f"it saves {self._position} tensors, in forward it saved {len(self.tape.slots)}, and backward "
                    f"needs the rest"
                )
            )

    def _drift(self, how: str) -> str:
        return (
            f"Recomputed code of checkpoint {display_name(self.tape.name)} does not do in replay what it did in "
            f"forward: {how}.\n"
            f"To fix: make the body deterministic. Usual causes: a branch on data that drifts (keep the choice in a "
            f"region with "
            f"recompute=False), a module switched between train() and eval(), a cache or container that grew, autocast "
            f"or another "
            f"context that is no longer active (carry it with a state hook)."
        )

    def _other_code(self, forward: Any, replay: Any) -> None:
        """Compiled and plain code save other tensors, of which some may have the same layout.

        Of two compiled codes that of forward would run if its guards held: the function asks what differs in replay.
        """
        compiled = is_compiled(forward)
        if compiled is is_compiled(replay):
            if not compiled or is_same_program(forward, replay, globals_of(replay)):
                return
            raise SavesDriftError(
                f"Recomputed code of checkpoint {display_name(self.tape.name)} was compiled once more for replay, at "
                f"{placeholder.user_line()}: the two graphs need not save the same tensors. The compiled function does "
                f"in replay what it did not do in forward, or depends on what has changed since: "
                f"remat.is_recomputing(), a counter, a container that grows, lengths that vary.\n"
                f"To fix: do that outside of the compiled function, or compile around the checkpoint."
            )
        there, here = ("compiled", "as plain Python") if compiled else ("as plain Python", "compiled")
        raise SavesDriftError(
            f"Recomputed code of checkpoint {display_name(self.tape.name)} ran {there} in forward and runs {here} in "
            f"replay, at {placeholder.user_line()}: the two save other tensors.\n"
            f"To fix: run forward and backward under the same torch.compiler.set_stance and the same torch dispatch "
            f"modes (a FLOP counter, say, around both or around neither). If an error was raised here in an earlier "
            f"replay, Dynamo may have given up the function: call torch._dynamo.reset() and run the step again."
        )

    def _metadata(self, position: int, expected: Any, found: Any, tensor: Tensor) -> str:
        before = [record for record in self.tape.order if record.slots_before <= position]
        where = self._open_region() or (f"after region {before[-1].name}" if before else "before the first region")
        roots = () if self.tape.check is None else self.tape.check.roots
        operation, made_by = operation_of(id(self.tape.slots[position]()), roots), maker_of(tensor)
        saved_by = "" if operation is None else f" by {operation}"
        if saved_by and made_by and not saved_by.startswith(f" by {made_by} "):  # its own result, otherwise
            saved_by += f", made by {made_by},"
        what, cause = "shapes", "keep a choice that drifts (routing, say) in a region with recompute=False"
        if len(found[0]) == len(expected[0]) and sum(found[0]) > sum(expected[0]):
            cause = (
                "if the body adds to a cache or a list (keys and values of a language model, say), replay finds what "
                "forward has added: switch that off (use_cache=False); " + cause
            )
        if found[0] == expected[0]:
            what = "dtypes" if found[1] != expected[1] else "devices"
            cause = "carry autocast, or whatever else is not active in replay, with a state hook"
        return (
            f"Recomputed values for the following tensors have different metadata than during the forward pass.\n"
            f"checkpoint {display_name(self.tape.name)}, saved tensor {position} ({where}), saved{saved_by} at "
            f"{placeholder.user_line()}:\n"
            f"  forward: {_described(expected)}\n"
            f"  replay:  {_described(found)} (recomputed {what} differ)\n"
            f"To fix: make the body deterministic; {cause}, or "
            f'pass determinism_check="none" if only the metadata differs and the values are right.'
        )

    def _open_region(self) -> str | None:
        """The RECOMPUTE region that is running, read off the stack: for errors."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is ReplayFrame.call_region.__code__ and frame.f_locals["self"] is self:
                return f"in region {frame.f_locals['name']}"
            frame = frame.f_back
        return None


class CheckedReplayFrame(ReplayFrame):
    """The pass that fills slots and shows every value to the check on its tape."""

    def __init__(self, tape: Tape, unfilled: int) -> None:
        super().__init__(tape, unfilled)
        self._wraps = True
        tape.check.replay_starts()

    def _fill(self, slot: Slot, tensor: Tensor, *, trusted: bool = True) -> None:
        self.tape.check.seen(slot, tensor)
        super()._fill(slot, tensor, trusted=trusted)

    def data(self, output: Output, what: str) -> Tensor:
        """The tensor of a persisted output or input."""
        tensor = super().data(output, what)
        self.tape.check.seen(output, tensor)
        return tensor


def _restore_version(tensor: Tensor, output: Output) -> None:
    """Give a copy the version counter that the original had, so that versions compare between the passes."""
    version = output.version[0] if isinstance(output.version, tuple) else output.version
    set_version(tensor, version)


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    layout = layout_of(a)
    return layout is not None and layout == layout_of(b)


def stand_in(meta: Meta, origin: Origin) -> Tensor:
    """A placeholder, as an operation's result where gradients flow."""
    if not meta.requires_grad:
        return placeholder.make(meta, origin)
    return as_result(placeholder.make(meta._replace(requires_grad=False), origin))


_OF_ARGUMENTS = (OutputKind.ARGUMENT, OutputKind.ARGUMENT_VIEW)


def taken(payload: Any) -> Tensor:
    """The unpack hook of a replay."""
    if type(payload) is not list:
        return payload
    if not payload:
        raise UsageError(
            "A backward has reached the graph that replay made of a checkpoint's body: replay stored a tensor again "
            "that the body stores outside of itself (self.aux_loss = ..., say), and that was used for another "
            "backward.\nTo fix: return the tensor from the checkpoint, or use it before backward."
        )
    return payload[0]


def _modified(what: str, tape: Tape) -> ModifiedError:
    """The error for a kept tensor that changed before replay reads it."""
    return ModifiedError(
        f"Saved tensor {what} (checkpoint {display_name(tape.name)}) was modified in-place after it was saved, and "
        f"replay has to read "
        f"it as it was.\nTo fix: modify a .clone() of it, or call backward first."
    )


def _label(record: Region, position: int) -> str:
    return ".out" if record.spec is LEAF else str(position)


def _described(metadata: Any) -> str:
    shape, dtype, device = metadata
    return f"shape {tuple(shape)}, dtype {str(dtype).removeprefix('torch.')}, device {device}"
