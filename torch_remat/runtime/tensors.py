"""Which memory a tensor lies in, private copies of it, and what an operation reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_remat.runtime.placeholder import inner_tensors
from torch_remat.runtime.views import extent

__all__ = [
    "copied_as_one",
    "fills_its_memory",
    "is_leaf_node",
    "laid_out",
    "private_copies",
    "private_copy",
    "share_alike",
    "storage_keys",
    "statistics_of",
    "storages_of",
    "tensors_in",
    "together",
    "views_like",
    "written_by",
]


def is_leaf_node(node: Any) -> bool:
    """Whether an autograd node adds to the ``.grad`` of a leaf. A number does not tell: error nodes have the same."""
    return node.name() == "torch::autograd::AccumulateGrad"


def storage_keys(tensor: Tensor) -> list[int]:
    """Identities of the storages under ``tensor`` (several for a wrapper subclass, none for what has no storage)."""
    if is_traceable_wrapper_subclass(tensor):
        return [key for _, inner in inner_tensors(tensor) for key in storage_keys(inner)]
    try:
        return [tensor.untyped_storage()._cdata]
    except (NotImplementedError, RuntimeError, ValueError):  # the last of what is not initialised yet
        return []


def storages_of(tensor: Tensor) -> Iterator[Any]:
    """The storages under ``tensor``, as :func:`storage_keys`."""
    if is_traceable_wrapper_subclass(tensor):
        for _, inner in inner_tensors(tensor):
            yield from storages_of(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether a plain tensor addresses every element of its storage, each once."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    dense = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != dense:
            return False
        dense *= size
    return tensor.untyped_storage().nbytes() == dense * tensor.element_size()


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among ``values`` and in the lists and tuples there."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def private_copy(tensor: Tensor) -> Tensor:
    """A copy with the geometry of ``tensor`` that shares nothing with it."""
    with torch.no_grad():
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return tensor.detach().clone()
        return laid_out(tensor.detach(), tensor.stride())


def share_alike(tensors: list[Tensor]) -> bool:
    """Whether those in one memory are plain tensors of one dtype, which can be copied together."""
    kinds: dict[int, Any] = {}
    for tensor in tensors:
        kind = _kind(tensor)
        for key in storage_keys(tensor):
            if key in kinds and (kind is None or kinds[key] != kind):
                return False
            kinds[key] = kind
    return True


def private_copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that share memory with each other where the tensors do, see :func:`together`, and with nothing else."""
    copies: dict[int, Tensor] = {}
    for members in together(tensors):
        parts = [tensors[index] for index in members]
        if len(parts) == 1:
            copies[members[0]] = private_copy(parts[0])
        else:
            with torch.no_grad():
                copies.update(zip(members, views_like(parts, copied_as_one(parts)), strict=True))
    return [copies[index] for index in range(len(tensors))]


def together(tensors: list[Tensor]) -> list[list[int]]:
    """Indices of ``tensors``, grouped by the memory that plain tensors of one dtype lie in; others are alone."""
    groups: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        kind = _kind(tensor)
        groups.setdefault(index if kind is None else (tensor.untyped_storage()._cdata, kind), []).append(index)
    return list(groups.values())


def copied_as_one(parts: list[Tensor]) -> Tensor:
    """A flat copy of the memory that ``parts``, one group of :func:`together`, span."""
    start, end = _span(parts)
    with torch.no_grad():
        return parts[0].detach().as_strided((end - start,), (1,), start).clone()


def views_like(parts: list[Tensor], whole: Tensor) -> list[Tensor]:
    """Views of ``whole``, which :func:`copied_as_one` made of ``parts``, with their geometries."""
    start, _ = _span(parts)
    return [whole.as_strided(part.shape, part.stride(), part.storage_offset() - start) for part in parts]


def _span(parts: list[Tensor]) -> tuple[int, int]:
    starts = [int(part.storage_offset()) for part in parts]
    return min(starts), max(start + extent(part) for start, part in zip(starts, parts, strict=True))


def _kind(tensor: Tensor) -> Any:
    """What plain tensors must have in common to be views of one; None for others."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of ``tensor`` with these strides. A stride of 0 is an expanded dimension; it is copied once."""
    source = tensor
    for dimension, step in enumerate(stride):
        if step == 0 and tensor.shape[dimension] > 1:
            source = source.narrow(dimension, 0, 1)
    copy = torch.empty_strided(source.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(source)
    return copy if source is tensor else copy.as_strided(tensor.shape, stride)


_aten = torch.ops.aten
_NORMS = frozenset(
    getattr(_aten, name).default for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)


def statistics_of(func: Any, args: Any) -> list[Tensor]:
    """The running statistics that ``func`` updates where it is a batch norm in training: its schema does not say so."""
    if func not in _NORMS or len(args) < 6 or not args[5]:
        return []
    return [one for one in args[3:5] if isinstance(one, Tensor)]


def written_by(func: Any, args: Any, kwargs: dict[str, Any], *, only_out: bool = False) -> list[Tensor]:
    """The tensors that the operation ``func`` modifies; with ``only_out`` those that it got as ``out=``."""
    found: list[Tensor] = []
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return found
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write or (only_out and not argument.is_out):
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found.extend(tensors_in((value,)))
    return found
