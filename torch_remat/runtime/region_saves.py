"""What a SAVE region saves for its backward, where that is not left to autograd: rebuilt arguments and packed saves.

Rules, in this order, for a tensor that the region saves:
 1. It is an argument that replay can make, unmodified since the region was entered: dropped, rebuilt from replay's
    argument.
 2. It is a view inside such an argument's memory (same dtype, same conjugate and negative bits): dropped, rebuilt with
    the same geometry. Whatever is not exactly that is kept. See ``views.py``.
 3. It is a parameter or a view of one: held as eager holds it. Hook pairs do not see weights.
 4. A hook pair applies: packed by it.
 5. Kept.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_remat.runtime.hooks import HookPair, SavedTensorKind, call_pack
from torch_remat.runtime.plan import Step
from torch_remat.runtime.tape import Kept, Packed, Region, Slot, WeakStorage, version_of, version_probe
from torch_remat.runtime.views import SAME, Layout, Recipe, layout_of, unmodified, within

if TYPE_CHECKING:
    from torch_remat.runtime.forward import ForwardFrame

__all__ = ["RegionSaves"]

_PLAIN = (Tensor, torch.nn.Parameter)


class RegionSaves:
    """The pack hook of one SAVE region call."""

    def __init__(
        self,
        frame: ForwardFrame,
        record: Region,
        step: Step | None,
        pair: HookPair | None,
        leaves: list[Any],
        versions: list[int],
    ) -> None:
        self._frame: Any = frame  # these two until the region returns: see close()
        self._record: Any = record
        self._pair = pair
        self._observer = frame.observer
        self._index = len(frame.tape.order) - 1
        self._saved = 0
        self._checkpoint = frame.tape.name
        self._record_name = record.name
        self._packed: list[
            tuple[Any, int, Packed, WeakStorage]
        ] = []  # layout, version, payload, the storage's identity
        self._targets = [
            (index, leaf, versions[index])
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and self._replay_makes(index, leaf, step)
        ]
        self._by_id = {id(target[1]): target for target in self._targets}
        self._memories: set[int] = set()
        self.kept: list[weakref.ref[Kept]] = []  # what the region's nodes keep through this hook
        self._layouts: list[Any] | None = None  # of the targets, once a save is not one of them

    def _replay_makes(self, index: int, leaf: Tensor, step: Step | None) -> bool:
        if self._pair is not None and id(leaf) in self._frame.input_ids:
            return True  # the pair has packed the input: hold no second copy
        if self._observer is not None:
            return id(leaf) not in self._frame.input_ids and self._observer.is_recomputed(leaf)
        return step is not None and index in step.rebuild

    def pack(self, tensor: Tensor) -> Any:
        """Apply the rules to one saved tensor."""
        position = self._saved  # counts what is dropped, too, as reports do
        self._saved = position + 1
        target = self._by_id.get(id(tensor))
        if target is not None and tensor._version == target[2]:
            return self._slot(target[0], target[1], tensor, SAME)
        base = tensor._base
        if base is None:
            base = tensor
        is_weight = base.is_leaf and base.requires_grad
        if not is_weight or self._pair is not None:
            found = self._find(tensor) if self._targets else None
            if found is not None:
                index, argument, recipe = found
                return self._slot(index, argument, tensor, recipe)
        label = (self._checkpoint, self._record_name, position)
        if is_weight:
            return Kept(tensor if tensor is base else tensor.detach(), label)
        if self._pair is None:
            kept = Kept(tensor.detach() if tensor.requires_grad else tensor, label)
            reference = weakref.ref(kept)
            self.kept.append(reference)
            if self._observer is not None:
                self._observer.kept(self._index, tensor, reference)
            return kept
        if self._observer is not None:
            self._observer.packed(self._index, tensor)
        detached = tensor.detach()
        payload = call_pack(self._pair, detached, SavedTensorKind.BACKWARD, self._pair.capture())
        packed = Packed(payload, self._pair.unpack, version_probe(tensor), label)
        self.add_packed(detached, packed)
        return packed

    def close(self) -> None:
        """The region has returned. Autograd keeps the pack hook beside what it packed: let it hold no tensor."""
        self._targets = []
        self.kept = []
        self._by_id = {}
        self._layouts = None
        self._observer = None
        self._frame = None
        self._record = None

    def forget(self) -> None:
        """No output of the region can be packed any more."""
        self._packed = []

    def kept_twin(self, tensor: Tensor) -> weakref.ref[Kept] | None:
        """The payload that keeps a plain tensor with the same memory and geometry, if the region's saves have one."""
        if type(tensor) is not Tensor:
            return None
        where = tensor.data_ptr()
        for reference in self.kept:
            kept = reference()
            if kept is None or type(kept.tensor) is not Tensor or kept.tensor.data_ptr() != where:
                continue
            if kept.tensor.shape == tensor.shape and kept.tensor.stride() == tensor.stride():
                return reference if kept.tensor.dtype is tensor.dtype else None
        return None

    def add_packed(self, tensor: Tensor, packed: Packed) -> None:
        """``packed`` is the payload for ``tensor``; outputs in its memory need none of their own."""
        layout = layout_of(tensor) if type(tensor) in _PLAIN else None
        if layout is not None:
            self._packed.append((layout, version_of(tensor), packed, WeakStorage(tensor.untyped_storage())))

    def packed_around(self, tensor: Tensor) -> tuple[Packed, Recipe] | None:
        """The payload of a tensor in whose memory ``tensor`` lies, and how to make it from that; None without one."""
        mine = layout_of(tensor) if type(tensor) in _PLAIN else None
        for layout, version, packed, _ in self._packed if mine is not None else ():
            recipe = within(mine, layout) if version == version_of(tensor) else None
            if recipe is not None:
                return packed, recipe
        return None

    def _find(self, tensor: Tensor) -> tuple[int, Tensor, Any] | None:
        """The argument whose memory ``tensor`` lies in, and how to make it from that: rule 2."""
        if self._layouts is None:
            self._layouts = [layout_of(argument) for _, argument, _ in self._targets]
            self._memories = {layout.memory[0] for layout in self._layouts if type(layout) is Layout}
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            if tensor.untyped_storage()._cdata not in self._memories:
                return None
        elif type(tensor) in _PLAIN:
            return None
        mine = layout_of(tensor)
        for (index, argument, version), layout in zip(self._targets, self._layouts, strict=True):
            if layout is not None and unmodified(tensor, mine, layout, version):
                recipe = within(mine, layout)
                if recipe is not None:
                    return index, argument, recipe
        return None

    def _slot(self, index: int, argument: Tensor, tensor: Tensor, recipe: Any) -> Slot:
        expected = (argument.shape, argument.dtype, argument.device)
        slot = Slot(expected, tensor)
        reference = weakref.ref(slot)
        self._record.rebuilds.append((reference, index, recipe))
        if self._frame.tape.check is not None:
            self._frame.tape.check.saved(slot, tensor, self._record)
        if self._observer is not None:
            made = id(argument) not in self._frame.input_ids
            self._observer.rebuild(reference, self._index, index if made else None, argument)
        return slot
