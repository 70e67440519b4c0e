"""Stand-ins that replay serves for tensors whose data was not kept.

A placeholder has the shape, stride, offset, dtype, device and ``requires_grad`` of the tensor it stands for, and no
data. It is a wrapper subclass, so it needs no private binding and works on every torch build.

Rules:
 1. An operation on a placeholder gives placeholders: dead code in replay costs nothing and needs nothing kept.
 2. Whatever would turn missing data into a number, a branch, a shape, a write to a real tensor, or a saved tensor that
    backward needs raises :class:`PlaceholderError`, which names the region output, the reading line and the fix.
 3. Operations that read metadata only (``zeros_like``) give real tensors.
 4. Kernels that bypass the dispatcher meet an error at ``data_ptr()``, ``numpy()``, ``tolist()`` and the like, never a
    null pointer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_remat.errors import InvalidTypeError, PlaceholderError

__all__ = [
    "METADATA_ONLY",
    "Meta",
    "Origin",
    "can_stand_in",
    "inner_tensors",
    "is_under_way",
    "is_placeholder",
    "make",
    "meta_of",
    "missing",
    "unseen",
    "runs_without_data",
    "user_line",
]

_has_fake_kernel: Any = getattr(getattr(torch._library, "utils", None), "has_fake_kernel", None)
_throw_on_data_ptr = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)

METADATA_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
        *(
            "sym_size",
            "sym_stride",
            "sym_numel",
            "sym_storage_offset",
            "size",
            "stride",
            "is_contiguous",
            "dim",
            "numel",
        ),
    )
)
"""Operations that look at the shape, dtype and device of their tensor arguments and never at the data."""


class Origin(NamedTuple):
    """Where the data of a placeholder got lost, for errors."""

    checkpoint: str
    what: str
    region: str | None = None
    leaf: int | None = None
    reader: str | None = None


class Meta(NamedTuple):
    """What a placeholder copies from the tensor it stands for. Shapes and strides in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    subclass: tuple[Any, ...] | None = None  # (type, inner names, inner metas, context) of a wrapper subclass


class Placeholder(Tensor):
    """A tensor without data; see the rules at the top of this file."""

    _origin: Origin

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Placeholder], meta: Meta, origin: Origin) -> Placeholder:
        made = Tensor._make_wrapper_subclass(
            cls,
            meta.size,
            meta.stride,
            storage_offset=meta.offset,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad and not torch.is_inference_mode_enabled(),
        )
        made._origin = origin
        if _throw_on_data_ptr is not None:
            _throw_on_data_ptr(made)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _propagate(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Placeholder({self._origin.what}, size={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise missing(self, "its data is read outside of torch's dispatcher")

    data_ptr = numpy = tolist = untyped_storage = storage = _refuse
    __array__ = __dlpack__ = __deepcopy__ = __reduce_ex__ = share_memory_ = _refuse
    __cuda_array_interface__ = property(_refuse)  # type: ignore[assignment]


def missing(tensor: Tensor, use: str) -> PlaceholderError:
    """The error for a placeholder whose data is needed; ``use`` says by what."""
    origin = _find(tensor)._origin
    reader = origin.reader or user_line()
    return PlaceholderError(
        f"{origin.what} is a placeholder for a tensor that was not kept for replay (checkpoint {origin.checkpoint}), "
        f"and {use}.\n"
        f"It is read by recomputed code at {reader}.\n"
        f"The runtime learned what replay reads when it first ran this body, and this read was not among it.\n"
        f"To fix: call remat.recompute_needs_tensor(tensor) before the read, or mark the region that makes the tensor "
        f"recompute=True (its output is skipped during recompute only because it is recompute=False).",
        origin.region,
        origin.leaf,
    )


def unseen(where: str) -> PlaceholderError:
    """The error for a kernel that asked torch for the memory of a placeholder: torch refused, and cannot say whose."""
    return PlaceholderError(
        f"A kernel that torch's dispatcher does not see asked for the memory of a tensor that was not kept for replay, "
        f"{where}.\n"
        f"To fix: call remat.recompute_needs_tensor(tensor) on what the kernel reads, before the call; or mark the "
        f"region that makes the tensor recompute=True."
    )


def is_placeholder(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a stand-in that replay served for data that was not kept, or was computed from one.

    False for every tensor of an ordinary forward, for tensors that were kept, and for empty, meta and fake tensors. A
    wrapper subclass (``DTensor``) is a placeholder when one of its inner tensors is. Reads no data and never
    synchronises. Raises ``TypeError`` when ``tensor`` is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidTypeError(f"is_placeholder expects Tensor arguments, got {type(tensor).__name__}")
    return _find(tensor) is not None


def _find(tensor: Tensor) -> Any:
    """The placeholder that ``tensor`` is or wraps, or None."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return None
    if kind is Placeholder:
        return tensor
    if is_traceable_wrapper_subclass(tensor):
        for _, inner in inner_tensors(tensor):
            found = _find(inner)
            if found is not None:
                return found
    return None


def can_stand_in(tensor: Tensor) -> bool:
    """Whether a placeholder can be made for ``tensor``. What it says no to is kept instead."""
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    if kind is Placeholder:
        return True
    if not is_traceable_wrapper_subclass(tensor) or tensor.is_nested or tensor.layout is not torch.strided:
        return False
    return all(can_stand_in(inner) for _, inner in inner_tensors(tensor))


def is_under_way(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for the result of a functional collective that nobody may have waited for yet."""
    if type(tensor) is Tensor:
        return False
    module = sys.modules.get("torch.distributed._functional_collectives")  # torch may come without distributed
    return module is not None and type(tensor) is module.AsyncCollectiveTensor


def meta_of(tensor: Tensor) -> Meta:
    """The metadata of ``tensor``, which :func:`can_stand_in` accepts."""
    subclass = None
    kind = type(tensor)
    if is_under_way(tensor):  # in replay nothing is
        return meta_of(tensor.elem)._replace(requires_grad=tensor.requires_grad)  # type: ignore[attr-defined]
    if kind is not Tensor and kind is not torch.nn.Parameter and kind is not Placeholder:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [getattr(tensor, name) for name in names]
        subclass = (kind, names, [meta_of(one) if isinstance(one, Tensor) else one for one in inner], context)
    return Meta(
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()) if subclass is None else 0,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        subclass,
    )


def make(meta: Meta, origin: Origin) -> Tensor:
    """A placeholder with ``meta``: a plain one, or the original subclass around placeholders."""
    if meta.subclass is None:
        return Placeholder(meta, origin)
    kind, names, inner, context = meta.subclass
    tensors = {
        name: make(part._replace(requires_grad=False), origin) if isinstance(part, Meta) else part
        for name, part in zip(names, inner, strict=True)
    }
    made = kind.__tensor_unflatten__(tensors, context, torch.Size(meta.size), meta.stride)
    if meta.requires_grad != made.requires_grad:
        made.requires_grad_(meta.requires_grad)
    return made


def inner_tensors(tensor: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the tensors that a traceable wrapper subclass is made of."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # DTensor lists its mesh among them
            yield name, inner


def user_line() -> str:
    """``file.py:line in name`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch_remat/" not in path and "/torch/" not in path and not path.startswith("<"):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def runs_without_data(func: Any, results: list[Tensor]) -> bool:
    """Whether ``func``, which has given ``results``, can follow rule 1."""
    plain = all(one.layout is torch.strided and not (one.is_quantized or one.is_nested) for one in results)
    return plain and (_has_fake_kernel is None or not hasattr(func, "_schema") or _has_rule(func))


@functools.cache
def _has_rule(func: Any) -> bool:
    return bool(_has_fake_kernel(func))


def _propagate(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rule 1: run ``func`` on metadata and wrap what it returns; rules 2 and 3 for what that cannot do."""
    source = _first((args, list(kwargs.values())))
    origin = source._origin
    if origin.reader is None:
        origin = origin._replace(reader=f"{user_line()} ({func._schema.name.removeprefix('aten::')})")
    name = func._schema.name
    if name in METADATA_ONLY:
        return _metadata_only(func, args, kwargs)
    if name == "_c10d_functional::wait_tensor":
        return source  # nothing is under way
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        raise missing(source, f"{name} turns its data into a Python value or a shape")
    if name.startswith(("c10d", "_c10d")):
        raise missing(source, f"the collective {name} would send it")
    written = [
        value
        for schema, value in _bound(func, args, kwargs)
        if schema.alias_info is not None and schema.alias_info.is_write and isinstance(value, Tensor)
    ]
    if any(_find(value) is None for value in written):
        raise missing(source, f"{name} would write it into a tensor that has data")
    try:
        result = func(*_to_meta(args), **_to_meta(kwargs))
    except NotImplementedError as error:
        raise missing(source, f"{name} has no rule for tensors without data") from error
    if written and isinstance(result, Tensor):
        return written[0]
    return _to_placeholder(result, source.device, origin)


def _bound(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    pairs = list(zip(func._schema.arguments, args, strict=False))
    pairs += [(schema, kwargs[schema.name]) for schema in func._schema.arguments if schema.name in kwargs]
    return pairs


def _first(values: Any) -> Any:
    for value in values:
        if isinstance(value, Placeholder):
            return value
        if isinstance(value, (list, tuple)):
            found = _first(value)
            if found is not None:
                return found
    return None


def _metadata_only(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rule 3: the same call on an empty tensor with the placeholder's geometry."""

    def real(value: Any) -> Any:
        if isinstance(value, Placeholder):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return value

    return func(*[real(value) for value in args], **{key: real(value) for key, value in kwargs.items()})


def _to_meta(value: Any) -> Any:
    if isinstance(value, Placeholder):
        base = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if value.storage_offset():
            span = 1 + sum(
                (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True) if size
            )
            base = torch.empty(span + value.storage_offset(), dtype=value.dtype, device="meta")
            base = base.as_strided(value.shape, value.stride(), value.storage_offset())
        return base
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return "meta" if isinstance(value, torch.device) else value


def _to_placeholder(value: Any, device: torch.device, origin: Origin) -> Any:
    if isinstance(value, Tensor):
        meta = Meta(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, device, False)
        return Placeholder(meta, origin)
    if isinstance(value, (list, tuple)):
        return type(value)(_to_placeholder(item, device, origin) for item in value)
    return value
