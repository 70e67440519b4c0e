"""What a SAVE region modifies in place, where replay could not make up for it.

Replay skips the region. A buffer that the region updates is updated once, as without checkpointing; but a tensor that
recomputed code made would be read unmodified. On observed paths ``observe.py`` knows who reads it, and version counters
tell whether a later call does more; on others the region runs under this mode, which refuses. A region that replay has
to run again must not modify anything a second time.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.errors import ModifiedError, display_name
from torch_remat.runtime import externals
from torch_remat.runtime.tape import Tape, version_of
from torch_remat.runtime.tensors import storage_keys, tensors_in, written_by

__all__ = ["CapturedVersions", "RegionWrites", "no_writes", "unobserved_writes"]


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

    def refusal() -> Exception:
        forget()
        return ModifiedError(
            f"Region {display_name(tape.name, region)} (recompute=False) modifies in place a tensor that it captured, "
            f"on a path through the body that was not taken before; replay skips the region, so the change would be "
            f"missing.\n{_REMEDY}"
        )

    return RegionWrites(functools.partial(_may_write, tape, arguments), refusal)


_REMEDY = (
    "To fix: pass the tensor to the region as an argument or work on a .clone() inside it; or call the checkpoint "
    "again, the path will be looked at then."
)


class CapturedVersions:
    """The version counters of the tensors in the variables of a region's function, on a path that is known.

    The region did not write to them when the path was observed; that it begins to is noticed here. Tensors that it
    reaches in other ways are not looked at: that would cost more than the region.
    """

    __slots__ = ("_tensors", "_versions")

    def __init__(self, function: Any) -> None:
        self._tensors: list[Tensor] = []
        if type(function) is types.MethodType:
            function = function.__func__
        if type(function) is types.FunctionType and function.__closure__ is not None:
            self._tensors = [one for one in map(_content, function.__closure__) if isinstance(one, Tensor)]
        self._versions = list(map(version_of, self._tensors))

    def check(self, tape: Tape, region: str, arguments: list[Any], forget: Callable[[], None]) -> None:
        """Raises ``ModifiedError`` where one has changed that recomputed code of the body made."""
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if version_of(tensor) != version and not _may_write(tape, arguments, tensor):
                forget()
                raise ModifiedError(
                    f"Region {display_name(tape.name, region)} (recompute=False) modifies in place a tensor that it "
                    f"captured, which it did not do before; replay skips the region, so the change would be missing.\n"
                    f"{_REMEDY}"
                )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # its variable is not assigned yet
        return None


def _may_write(tape: Tape, arguments: list[Any], tensor: Tensor) -> bool:
    own = {key for one in tensors_in(arguments) for key in storage_keys(one)}
    return own.issuperset(storage_keys(tensor)) or _is_from_outside(tape, tensor)


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
