"""Saved-tensor hooks of the user (offloading and the like): which pair applies, and what a pack function may ask.

One pair applies to a tensor: the one given to the checkpoint, else the innermost pair active when the checkpoint is
called (native or ours), replaced inside the body by a pair entered there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_remat.errors import InvalidTypeError, UsageError
from torch_remat.runtime.frame import current_frame
from torch_remat.runtime.tensors import laid_out
from torch_remat.runtime.views import SAME, make

__all__ = [
    "HookPair",
    "SavedTensorInfo",
    "SavedTensorKind",
    "call_pack",
    "call_unpack",
    "can_lift",
    "current_saved_tensor_info",
    "inner_pair",
    "native_pair",
    "pop_hooks",
    "push_hooks",
    "recomputes",
    "saved_tensors_hooks",
    "top_hooks",
    "unpack_within",
]

push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
can_lift = _top is not None
"""Whether hooks can be taken off the stack for a while. Without it SAVE regions keep their saves through a hook of
their own, and a
native pair around a checkpoint is not seen."""


class SavedTensorKind(enum.Enum):
    """Why a tensor is packed."""

    CHECKPOINT_INPUT = enum.auto()
    """An input of a checkpoint, packed once at entry, before the body runs. The live tensor: do not free it."""
    BACKWARD = enum.auto()
    """A tensor that a SAVE region saves for its backward, packed while the region runs."""
    SAVE_OUTPUT = enum.auto()
    """An output of a SAVE region that replay reads."""


@dataclass(frozen=True)
class SavedTensorInfo:
    """What a pack function can know about its tensor: ``kind``, and ``context`` as ``capture_context`` returned it."""

    kind: SavedTensorKind
    context: object = None


@dataclass(frozen=True)
class HookPair:
    """A pack and an unpack function that belong together."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    capture_context: Callable[[], object] | None = None

    def capture(self) -> object:
        """The context for a later pack; None where nothing captures."""
        return None if self.capture_context is None else self.capture_context()


_info: ContextVar[SavedTensorInfo | None] = ContextVar("torch_remat_saved_tensor_info", default=None)
_inner_pair: ContextVar[HookPair | None] = ContextVar("torch_remat_inner_pair", default=None)


def current_saved_tensor_info() -> SavedTensorInfo:
    """What is known about the tensor being packed. Only inside a pack function; ``RuntimeError`` elsewhere."""
    info = _info.get()
    if info is None:
        raise UsageError(
            "current_saved_tensor_info() may only be called from a saved-tensor pack hook while it packs. "
            "To fix: call it inside the pack function and keep what you need in the payload."
        )
    return info


def call_pack(pair: HookPair, tensor: Tensor, kind: SavedTensorKind, context: object) -> Any:
    """``pair.pack(tensor)`` with :func:`current_saved_tensor_info` answering."""
    token = _info.set(SavedTensorInfo(kind, context))
    try:
        return pair.pack(tensor)
    finally:
        _info.reset(token)


def unpack_within(recipe: Any, packed: Any) -> Any:
    """Unpack for replay a tensor of which an output is a view, made by ``recipe``; once for all that ask."""
    if packed.ready is None:
        packed.ready = packed.unpack(packed.payload)
    whole = packed.ready
    if recipe is SAME or not isinstance(whole, Tensor):
        return whole
    whole = whole.detach()
    return make(whole if whole.stride() == recipe.base_stride else laid_out(whole, recipe.base_stride), recipe)


def call_unpack(pair: HookPair, payload: Any, what: str) -> Tensor:
    """``pair.unpack(payload)``, which must be a tensor; ``what`` names it in the error."""
    tensor = pair.unpack(payload)
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(
            f"the unpack hook returned {type(tensor).__name__} for {what}. To fix: return the tensor that was packed."
        )
    return tensor


class _Bound:
    """The native form of one of our pairs; ``pair`` lets a checkpoint recognise it."""

    def __init__(self, pair: HookPair, in_region: bool) -> None:
        self.pair = pair
        self._in_region = in_region

    def __call__(self, tensor: Tensor) -> Any:
        if not self._in_region:
            return call_pack(self.pair, tensor, SavedTensorKind.BACKWARD, None)
        return call_pack(self.pair, tensor.detach(), SavedTensorKind.BACKWARD, self.pair.capture())


class saved_tensors_hooks:  # noqa: N801 - named like torch.autograd.graph.saved_tensors_hooks
    """Context manager: pack and unpack the tensors that checkpoints keep.

    Args:
        pack_hook: takes a tensor, returns any payload.
        unpack_hook: takes the payload, returns the tensor. May be called several times, in any order.
        capture_context: called when a tensor is known to be a candidate; its value reaches the pack function through
            :func:`current_saved_tensor_info`, also when the pack happens later.

    Around a checkpoint it sees the checkpoint's inputs, the saves of SAVE regions and the persisted outputs; inside a
    body it replaces the pair for the SAVE regions called within. Outside any checkpoint it is
    ``torch.autograd.graph.saved_tensors_hooks``.

    Raises:
        TypeError: a hook is not callable.
    """

    def __init__(
        self,
        pack_hook: Callable[[Tensor], Any],
        unpack_hook: Callable[[Any], Tensor],
        *,
        capture_context: Callable[[], object] | None = None,
    ) -> None:
        for name, hook in (("pack_hook", pack_hook), ("unpack_hook", unpack_hook)):
            if not callable(hook):
                raise InvalidTypeError(f"saved_tensors_hooks expects {name} to be callable, got {type(hook).__name__}.")
        if capture_context is not None and not callable(capture_context):
            raise InvalidTypeError(
                f"saved_tensors_hooks expects capture_context to be callable, got {type(capture_context).__name__}."
            )
        self._pair = HookPair(pack_hook, unpack_hook, capture_context)
        self._tokens: list[Token[HookPair | None] | None] = []

    def __enter__(self) -> None:
        frame = current_frame.get()
        if frame is not None and not frame.inert:
            self._tokens.append(_inner_pair.set(self._pair))
            return
        push_hooks(_Bound(self._pair, frame is not None), self._pair.unpack)
        self._tokens.append(None)

    def __exit__(self, *exc_info: object) -> None:
        token = self._tokens.pop()
        if token is None:
            pop_hooks()
        else:
            _inner_pair.reset(token)


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost native (pack, unpack) of this thread; None without one, or where torch cannot tell."""
    return _top(True) if _top is not None else None


def inner_pair(default: HookPair | None) -> HookPair | None:
    """The pair of ours that the body has entered, else ``default``."""
    return _inner_pair.get() or default


def recomputes(top: tuple[Any, Any] | None) -> bool:
    """Whether what :func:`top_hooks` returned belongs to a ``torch.utils.checkpoint``, which keeps nothing."""
    return top is not None and getattr(top[0], "__module__", None) == "torch.utils.checkpoint"


def native_pair(top: tuple[Any, Any] | None) -> HookPair | None:
    """A pair for what :func:`top_hooks` returned."""
    if top is None:
        return None
    return top[0].pair if isinstance(top[0], _Bound) else HookPair(top[0], top[1])
