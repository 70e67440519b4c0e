"""Which storages are those of parameters: autograd saves them, and they would be there anyway."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from torch_remat_tensorboard.storages import storages_of

__all__ = ["Weights"]


class Weights:
    """The storages of the parameters of this process, held weakly.

    Parameters that require a gradient are met in the graph; the others are looked for among the objects of the process.
    """

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def __contains__(self, address: int) -> bool:
        reference = self._storages.get(address)
        return reference is not None and not reference.expired()

    def note_if_parameter(self, tensor: Tensor) -> None:
        """Note the storages of `tensor`, if it is a parameter."""
        if type(tensor) is Parameter or getattr(tensor, "_is_param", False):
            for storage in storages_of(tensor):
                if storage._cdata not in self:
                    self._storages[storage._cdata] = StorageWeakRef(storage)

    def look_for_all(self) -> None:
        """Note every parameter of the process: one pass over the objects of the garbage collector."""
        things: list[Any] = gc.get_objects()
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
        for thing in things:
            if type(thing) in kinds:
                self.note_if_parameter(thing)
