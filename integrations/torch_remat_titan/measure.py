"""Two figures of a model's blocks, taken the same way with and without checkpointing.

**Bytes kept after forward.** The storages that stay alive from the forward of the blocks to their backward: every
storage that an operation inside a block's forward created, and every storage of a block's differentiable input, that
still lives when the model's forward returns. Each storage counts once and whole, however many tensors view it.
Parameters (also the gathered ones of FSDP2), buffers and the model's own inputs are created outside the blocks and do
not count. What lives at that moment lives because autograd or the checkpoint holds it, except the model's output.

**Replays.** How often a block's body ran again inside backward: calls of the block's probe module, which the body
calls once, while `torch_remat.is_recomputing()`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

import torch_remat as remat


class BlockMeter:
    """Measures the blocks of one model; attach it after checkpointing and FSDP were applied.

    Attributes:
        kept_bytes: bytes kept after the last armed forward, None before.
        replays: block name -> replays since `reset_counts`.
        forwards: block name -> first runs of the body since `reset_counts`.
    """

    def __init__(self, model: nn.Module, *, blocks: str = "layers", probe: str = "attention_norm") -> None:
        """Attach to `model`.

        Args:
            model: the model whose forward is one forward of the step.
            blocks: path of the container of blocks.
            probe: path, relative to a block, of a module that the block's body calls exactly once, outside regions.
        """
        self.kept_bytes: int | None = None
        self.replays: Counter[str] = Counter()
        self.forwards: Counter[str] = Counter()
        self._recorder: _StorageRecorder | None = None
        self._blocks = [(f"{blocks}.{name}", block) for name, block in model.get_submodule(blocks).named_children()]
        for name, block in self._blocks:
            block.forward = functools.partial(self._measured, block, block.forward)
            block.get_submodule(probe).register_forward_pre_hook(functools.partial(self._count, name))
        model.register_forward_hook(self._forward_ended)

    @property
    def block_count(self) -> int:
        """How many blocks the model has on this rank."""
        return len(self._blocks)

    def reset_counts(self) -> None:
        """Start counting runs from zero."""
        self.replays.clear()
        self.forwards.clear()

    def arm(self) -> None:
        """Measure `kept_bytes` in the next forward of the model (which that forward pays for in time)."""
        self._recorder = _StorageRecorder()

    def _count(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        (self.replays if remat.is_recomputing() else self.forwards)[name] += 1

    def _measured(self, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, under the recorder when the meter is armed."""
        recorder = self._recorder
        if recorder is None:
            return forward(*args, **kwargs)
        for tensor in (*block.parameters(), *block.buffers()):
            recorder.leave_out(tensor)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                recorder.record(leaf)
            elif isinstance(leaf, torch.Tensor):
                recorder.leave_out(leaf)
        with recorder:
            return forward(*args, **kwargs)

    def _forward_ended(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._recorder is not None:
            self.kept_bytes = self._recorder.live_bytes()
            self._recorder = None


class _StorageRecorder(TorchDispatchMode):
    """Remembers, weakly, every storage that an operation under it returns."""

    def __init__(self) -> None:
        super().__init__()
        # Address of the storage -> (weak reference, bytes). The reference keeps the address from being reused.
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._left_out: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.record(leaf)
        return output

    def record(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor` if it is alive in the end."""
        for plain in _plain_tensors(tensor):
            storage = plain.untyped_storage()
            reference = StorageWeakRef(storage)
            self._seen.setdefault(reference.cdata, (reference, storage.nbytes()))

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Never count the storage of `tensor`."""
        for plain in _plain_tensors(tensor):
            reference = StorageWeakRef(plain.untyped_storage())
            self._left_out.setdefault(reference.cdata, reference)

    def live_bytes(self) -> int:
        """Bytes of the recorded storages that are alive now."""
        return sum(
            size
            for address, (reference, size) in self._seen.items()
            if address not in self._left_out and not reference.expired()
        )


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with real storage behind `tensor`: itself, or the parts of a wrapper subclass such as DTensor."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor
