"""Is one tensor a view inside another's memory, and how to make it again from a copy of that other one.

Two tensors share elements when they are on one storage with the same dtype, conjugate and negative bits and their
address ranges overlap. A wrapper subclass (``DTensor``) is a view of another one of its type when each tensor in it is
one of its counterpart, and of a plain tensor when each is one of that: tensor parallel modules wrap what they get.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["SAME", "Layout", "Recipe", "extent", "layout_of", "make", "unmodified", "within"]

_STRIDED = (Tensor, torch.nn.Parameter, FakeTensor)  # lie in one memory, which a fake one only says

Recipe = Any
SAME: Recipe = ()
"""The recipe of a tensor with the geometry of the other one."""


class Layout(NamedTuple):
    """Where a plain tensor lies.

    ``memory`` must be equal for two to share elements; ``start`` is the first of its own and ``end`` one past the last.
    Sizes, strides and positions are in elements.
    """

    memory: tuple[Any, ...]
    start: int
    end: int
    size: torch.Size
    stride: tuple[int, ...]


class _Constant(NamedTuple):
    """What a wrapper subclass names among its tensors and is none: a device mesh, say."""

    value: Any


class _Wrapped(NamedTuple):
    """The layouts of the tensors inside a wrapper subclass."""

    kind: type
    inner: tuple[tuple[str, Any], ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class _Strided(NamedTuple):
    """Recipe: ``as_strided`` on a tensor that must have ``base_stride``, ``start`` elements into it."""

    size: torch.Size
    stride: tuple[int, ...]
    start: int
    base_stride: tuple[int, ...]


class _Rewrapped(NamedTuple):
    """Recipe: a wrapper subclass around what the recipes inside make."""

    layout: _Wrapped
    inner: tuple[tuple[str, Recipe], ...]


def layout_of(tensor: Tensor) -> Any:
    """Where ``tensor`` lies; None for what has no plain memory."""
    if type(tensor) in _STRIDED:
        if tensor.layout is not torch.strided:
            return None
        start = int(tensor.storage_offset())
        memory = (tensor.untyped_storage()._cdata, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        return Layout(memory, start, start + extent(tensor), tensor.shape, tensor.stride())
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    inner = []
    for name in names:
        value = getattr(tensor, name)
        found = layout_of(value) if isinstance(value, Tensor) else _Constant(value)
        if found is None:
            return None
        inner.append((name, found))
    return _Wrapped(type(tensor), tuple(inner), context, tensor.shape, tensor.stride())


def within(mine: Any, base: Any) -> Recipe | None:
    """How to make a tensor with layout ``mine`` from one with layout ``base``; None if it is no view inside it."""
    if type(mine) is _Wrapped and type(base) is Layout:
        return _rewrapped(mine, [base] * len(mine.inner))
    if type(mine) is not type(base):
        return None
    if type(mine) is Layout:
        if mine.memory != base.memory:
            return None
        start = mine.start - base.start
        if start == 0 and mine.size == base.size and mine.stride == base.stride:
            return SAME
        if start >= 0 and mine.start < mine.end <= base.end:
            return _Strided(mine.size, mine.stride, start, base.stride)
        return None
    if mine.kind is not base.kind or [name for name, _ in mine.inner] != [name for name, _ in base.inner]:
        return None
    return _rewrapped(mine, [whole for _, whole in base.inner])


def _rewrapped(mine: _Wrapped, bases: list[Any]) -> Recipe | None:
    inner = []
    for (name, part), base in zip(mine.inner, bases, strict=True):
        recipe = part if type(part) is _Constant else within(part, base)
        if recipe is None:
            return None
        inner.append((name, recipe))
    return _Rewrapped(mine, tuple(inner))


def unmodified(tensor: Tensor, mine: Any, base: Any, version: int) -> bool:
    """Whether ``tensor`` is at ``version``, which the one with layout ``base`` was at. A new wrapper counts anew."""
    if type(mine) is _Wrapped and type(base) is Layout:
        return all(getattr(tensor, name)._version == version for name, part in mine.inner if type(part) is Layout)
    return tensor._version == version


def make(base: Tensor, recipe: Recipe) -> Tensor | None:
    """The tensor that ``recipe`` makes from the detached ``base``; None if ``base`` has other strides than then."""
    if type(recipe) is _Strided:
        if base.stride() != recipe.base_stride:
            return None
        return base.as_strided(recipe.size, recipe.stride, base.storage_offset() + recipe.start)
    if type(recipe) is not _Rewrapped:
        return base
    wrapped = is_traceable_wrapper_subclass(base)
    parts: dict[str, Any] = {}
    for name, inner in recipe.inner:
        part = inner.value if type(inner) is _Constant else make(getattr(base, name) if wrapped else base, inner)
        if part is None:
            return None
        parts[name] = part
    layout: Any = recipe.layout
    return layout.kind.__tensor_unflatten__(parts, layout.context, layout.size, layout.stride).detach()


def extent(tensor: Tensor) -> int:
    """Elements from the first to one past the last that ``tensor`` addresses."""
    count = int(tensor.numel())
    if count == 0 or tensor.is_contiguous():
        return count
    return int(1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
