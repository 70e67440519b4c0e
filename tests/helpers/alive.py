"""Which storages are alive, counted without the garbage collector and without device counters."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.trees import tensors_of


class StorageTracker(TorchDispatchMode):
    """Remembers, weakly, every storage that an operation under it created.

    Storages that exist before (inputs, parameters) are only counted when they are handed to :meth:`watch`.
    """

    def __init__(self) -> None:
        super().__init__()
        # A weak reference keeps the address of a dead storage from being used again.
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: dict[int, StorageWeakRef] = {}

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Never count the storages of ``tensors``."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage)

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count the storages of ``tensors`` as if an operation had created them now."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in self._refs:
                self._refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.ignore_new(args, kwargs)
        result = func(*args, **kwargs)
        self.watch(*(tensor for tensor in tensors_of(result) if tensor.layout == torch.strided))
        return result

    def ignore_new(self, *trees: Any) -> None:
        """Arguments seen for the first time were made outside: never count them."""
        for tensor in tensors_of(trees):
            if tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in self._refs:
                self.ignore(tensor)

    def alive_bytes(self, *, without: Any = ()) -> int:
        """Bytes of the storages still alive, each once, except those of the tensors in ``without``."""
        return sum(self.alive_sizes(without=without))

    def alive_sizes(self, *, without: Any = ()) -> list[int]:
        """Sizes of the storages still alive, sorted, except those of the tensors in ``without``."""
        excluded = {tensor.untyped_storage()._cdata for tensor in tensors_of(without)}
        return sorted(nbytes for key, (ref, nbytes) in self._refs.items() if key not in excluded and not ref.expired())


@contextlib.contextmanager
def gc_off() -> Iterator[None]:
    """Collect once, then keep the garbage collector off: whatever goes must go by reference counting alone."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def live_tensors() -> int:
    """How many tensors the interpreter can reach; only differences mean anything."""
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
