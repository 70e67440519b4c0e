"""Make a tensor look like the result of an operation, without running one.

What replay hands to the body must not be a leaf where forward's tensor was none: in-place operations and ``is_leaf``
would differ. Torch has no call for that. An operation on a wrapper subclass goes through autograd first and then to
``__torch_dispatch__``, which may return any tensor; autograd makes that tensor the operation's result.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

__all__ = ["Seed", "as_result"]


class _Next(threading.local):
    tensor: Tensor | None = None


_next = _Next()


class Seed(Tensor):
    """A tensor whose negation is whatever :func:`as_result` was given."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Seed]) -> Seed:
        """The one instance."""
        return Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _next.tensor


_seed = Seed()
_neg = torch._C._VariableFunctions.neg


def as_result(tensor: Tensor) -> Tensor:
    """``tensor``, which must not require a gradient, as a tensor that does and is no leaf. No copy."""
    kind: Any = type(tensor)
    if kind is not Tensor and tensor._is_view() and kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        # A plain subclass, which torch functions have made as a view that nobody may change.
        tensor = Tensor._make_subclass(kind, tensor)
    _next.tensor = tensor
    try:
        if torch.is_grad_enabled():
            return _neg(_seed)
        with torch.enable_grad():
            return _neg(_seed)
    finally:
        _next.tensor = None
