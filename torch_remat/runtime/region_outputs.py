"""What a SAVE region returned and what it changed: how replay will get each of it without running the region.

Rules for a tensor that the region returned, in this order:
 1. It is an argument: replay returns its own argument.
 2. It is a view inside an argument's memory: rebuilt from replay's argument.
 3. The plan says that replay reads it, or there is no plan, or no placeholder can stand for it: persisted.
 4. A placeholder stands for it.

An argument that the region modified in place is kept as the region left it, and replay writes that into its own
argument: the region is skipped, its effect on arguments is not. Where the argument came from another SAVE region or is
the checkpoint's input, and the plan says that nobody reads it, nothing is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_remat.errors import InvalidTypeError, display_name
from torch_remat.runtime.hooks import HookPair
from torch_remat.runtime.placeholder import can_stand_in, is_under_way, meta_of
from torch_remat.runtime.plan import Step
from torch_remat.runtime.region_saves import RegionSaves
from torch_remat.runtime.tape import (
    BASE_GRADIENT,
    Output,
    OutputKind,
    Region,
    gradient_of,
    plain_attributes,
    version_of,
)
from torch_remat.runtime.tensors import private_copies, private_copy
from torch_remat.runtime.tree import LEAF, flatten, is_container, is_iterator
from torch_remat.runtime.views import extent

if TYPE_CHECKING:
    from torch_remat.runtime.forward import ForwardFrame

__all__ = ["SaveOutputs", "note_address"]

_PLAIN = (Tensor, torch.nn.Parameter)


class SaveOutputs:
    """Fills the outputs of one region's record."""

    __slots__ = ("_context", "_copies", "_frame", "_pair", "_saves", "_step", "record")

    def __init__(
        self, frame: ForwardFrame, record: Region, step: Step | None, pair: HookPair | None, saves: RegionSaves | None
    ) -> None:
        self._frame = frame
        self.record = record
        self._step = step
        self._pair = pair
        self._saves = saves
        self._copies: dict[int, Tensor] = {}
        self._context = None if pair is None else pair.capture()

    def add_changed(self, index: int, argument: Tensor) -> None:
        """The region modified leaf ``index`` of its arguments in place."""
        step = self._step
        if self._frame.observer is None and (step is None or index not in step.changed):
            self._frame.tape.to_end = (
                True  # replay must come past here, to notice what was saved before and changed now
            )
        if step is None or -1 - index in step.keep or index not in step.changed:
            self.keep_changed(index, argument)
        else:
            self.record.dropped.append((index, weakref.ref(argument), version_of(argument)))

    def keep_changed(self, index: int, argument: Tensor) -> None:
        """Persist what the region left in leaf ``index`` of its arguments."""
        output = self._kept(argument, -1 - index)
        self.record.changed.append((index, output))
        if self._frame.observer is None:
            self._frame.pack_output(output)

    def add_result(self, result: Any, arguments: list[Any]) -> list[Any]:
        """Record what the region returned; returns the leaves of ``result``."""
        record = self.record
        leaves: list[Any] = []
        if is_container(result):
            record.spec = flatten(result, leaves)
        else:
            leaves.append(result)
            record.spec = LEAF
        copied = self._copied()
        if copied:
            modified = {one: leaves[one] for one in copied if 0 <= one < len(leaves)}
            modified = {one: leaf for one, leaf in modified.items() if isinstance(leaf, Tensor)}
            self._copies = dict(zip(modified, private_copies([*modified.values()]), strict=True))
        seen: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                if is_iterator(leaf):
                    raise InvalidTypeError(
                        f"Region {display_name(self._frame.tape.name, record.name)} (recompute=False) returned a "
                        f"{type(leaf).__name__}: forward would use it up, and replay, which does not run the region "
                        f"again, find nothing in it.\nTo fix: return a list or a tuple."
                    )
                record.outputs.append(Output(OutputKind.OBJECT, leaf))
                continue
            first = seen.setdefault(id(leaf), position)
            if first != position:
                record.given += ((position, OutputKind.REPEAT, first),)
                record.outputs.append(Output(OutputKind.REPEAT, first))
            else:
                record.outputs.append(self._output(position, leaf, arguments))
        if self._pair is not None and self._frame.observer is None:
            self._frame.pack_outputs(record.outputs)
        return leaves

    def _output(self, position: int, leaf: Tensor, arguments: list[Any]) -> Output:
        output = _from_argument(leaf, arguments)
        if output is not None:
            self.record.given += ((position, output.kind, output.data),)
            return output
        step = self._step
        if step is None or position in step.keep or not can_stand_in(leaf) or gradient_of(leaf) == BASE_GRADIENT:
            return self._kept(leaf, position)
        output = Output(OutputKind.PLACEHOLDER, (weakref.ref(leaf), version_of(leaf)), meta_of(leaf))
        output.attributes = plain_attributes(leaf)
        if position in step.free:
            note_address(self.record, position, leaf)
            if self._saves is not None:
                output.free = self._saves.kept_twin(leaf)
        return output

    def _copied(self) -> Collection[int]:
        """What is kept as a copy, since the body may modify it; where no plan fits, what is so on any known path."""
        if self._step is not None:
            return self._step.clone
        known = self._frame.known.clones if self._frame.observer is None else ()
        return [position for name, position in known if name == self.record.name]

    def _kept(self, tensor: Tensor, position: int) -> Output:
        output = Output(OutputKind.KEPT, None, gradient_of(tensor))
        output.attributes = plain_attributes(tensor)
        step = self._step
        if position in self._copied():
            copy = self._copies.get(position)
            output.data = private_copy(tensor) if copy is None else copy
            output.cloned = self.record.cloned = True
        elif is_under_way(tensor):
            # What lies in it is plain; whoever uses it first in forward waits.
            output.data = tensor.elem.detach()  # type: ignore[attr-defined]
            output.pending = weakref.ref(tensor)
        else:
            output.data = tensor.detach()
        output.version = version_of(tensor if output.cloned else output.data)
        output.shell = step is not None and position in step.shells
        if self._frame.tape.check is not None:
            self._frame.tape.check.persisted(self.record, position, output, tensor)
        if self._pair is not None:
            # type: ignore[assignment] - packed when a reader is known
            output.unpack = (self._pair, self._context, self._saves)
        return output


def note_address(record: Region, position: int, leaf: Tensor) -> None:
    """Let reports recognise an output that is not persisted among the region's saves."""
    if record.span is not None and type(leaf) is Tensor:
        record.span.outputs += ((position, leaf.data_ptr()),)


def _from_argument(leaf: Tensor, arguments: list[Any]) -> Output | None:
    """The record for an output that is an argument or a plain view of one."""
    for index, argument in enumerate(arguments):
        if argument is leaf:
            return Output(OutputKind.ARGUMENT, index)
    base = leaf._base if type(leaf) is Tensor else None
    if base is None:
        return None
    for index, argument in enumerate(arguments):
        if (
            type(argument) in _PLAIN
            and (argument is base or argument._base is base)
            and argument.dtype is leaf.dtype
            and argument.is_conj() == leaf.is_conj()
            and argument.is_neg() == leaf.is_neg()
            and argument._version == leaf._version
            and gradient_of(leaf) == argument.requires_grad  # a view made under no_grad is a leaf of its own
        ):
            start = leaf.storage_offset() - argument.storage_offset()
            if start < 0 or start + extent(leaf) > extent(argument):
                continue  # another part of the memory, which replay's argument need not have
            geometry = (leaf.shape, leaf.stride(), start)
            return Output(OutputKind.ARGUMENT_VIEW, index, (geometry, argument.shape, argument.stride()))
    return None
