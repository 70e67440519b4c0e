"""What a SAVE region modifies in place, where replay could not make up for it.

Replay skips the region. A buffer that the region updates is updated once, as without checkpointing; but a tensor that
recomputed code made would be read unmodified. On observed paths ``observe.py`` knows who reads it; on others the region
runs under this mode, which refuses. A region that replay has to run again must not modify anything a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.errors import ModifiedError, display_name
from torch_remat.runtime import externals
from torch_remat.runtime.tape import Tape
from torch_remat.runtime.tensors import storage_keys, tensors_in, written_by

__all__ = ["RegionWrites", "no_writes", "unobserved_writes"]


class RegionWrites(TorchDispatchMode):
    """Raises what ``refusal`` makes where the code would write into memory that is neither its own nor ``allowed``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled while we look."""
        return True

    def __init__(self, allowed: Callable[[Tensor], bool], refusal: Callable[[], Exception]) -> None:
        super().__init__()
        self._allowed = allowed
        self._refusal = refusal
        self._own: set[int] = set()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, run under this mode."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            if not self._own.issuperset(storage_keys(tensor)) and not self._allowed(tensor):
                raise self._refusal()
        result = func(*args, **kwargs)
        read = {key for tensor in tensors_in((args, kwargs)) for key in storage_keys(tensor)}
        for tensor in tensors_in((result,)):
            self._own.update(key for key in storage_keys(tensor) if key not in read)
        return result


def unobserved_writes(tape: Tape, region: str, arguments: list[Any], forget: Callable[[], None]) -> RegionWrites:
    """For a SAVE region on a path that nobody has observed: it may write to its arguments and outside the body."""
    own = {key for tensor in tensors_in(arguments) for key in storage_keys(tensor)}

    def allowed(tensor: Tensor) -> bool:
        return own.issuperset(storage_keys(tensor)) or _is_from_outside(tape, tensor)

    def refusal() -> Exception:
        forget()
        return ModifiedError(
            f"Region {display_name(tape.name, region)} (recompute=False) modifies in place a tensor that it captured, "
            f"on a path through the body that was not taken before; replay skips the region, so the change would be "
            f"missing.\n"
            f"To fix: pass the tensor to the region as an argument or work on a .clone() inside it; or call the "
            f"checkpoint again, the path will be looked at then."
        )

    return RegionWrites(allowed, refusal)


def no_writes(tape: Tape, region: str) -> RegionWrites:
    """For a SAVE region that replay runs again."""

    def refusal() -> Exception:
        return ModifiedError(
            f"Region {display_name(tape.name, region)} (recompute=False) cannot be run again for an output that replay "
            f'needs (on_missing="rerun"): it modifies in place a tensor that it did not make.\n'
            f"To fix: call remat.recompute_needs_tensor on the output, so that it is kept."
        )

    return RegionWrites(lambda tensor: False, refusal)


def _is_from_outside(tape: Tape, tensor: Tensor) -> bool:
    """Whether ``tensor`` was there before the body: a parameter, a buffer, a tensor that the function captured."""
    base = tensor if tensor._base is None else tensor._base
    for one in (tensor, base):
        if one.grad_fn is not None:
            return one.grad_fn._sequence_nr() < tape.first_sequence_nr
    if base.requires_grad or torch.is_inference(base):
        return True
    keys = storage_keys(tensor)
    return bool(externals.find(externals.root_of(tape), lambda one: any(key in keys for key in storage_keys(one))))
