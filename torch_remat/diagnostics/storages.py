"""Tensors laid out on the storages they share: one row per storage, with what each tensor uses of it.

Rules:
 1. A storage counts with its whole size, once, wherever it is met first. What is resident is the storage.
 2. Values with equal shape, strides, offset and dtype on one storage are one value with several names.
 3. The first value that covers the whole storage names the row, the others are listed below it. A single value that
    covers a part names the row, too. Several that do so have a row without an owner.
 4. Wrapper subclasses (``DTensor``) count with the tensors they are made of: their local bytes. Those that do not say
    what they are made of count with the tensors among their attributes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_remat.diagnostics.graph import unseen
from torch_remat.diagnostics.report import Report, format_bytes
from torch_remat.runtime.placeholder import inner_tensors, is_placeholder

__all__ = ["Annotate", "Bill", "StorageRow", "Value", "ViewRow", "row_lines", "values_of"]

Annotate = Callable[[Tensor], Any]
_MOST_RUNS = 4096


@dataclass(frozen=True)
class ViewRow(Report):
    """One more value on the storage of a row."""

    name: str
    shape: tuple[int, ...]
    span_bytes: int


@dataclass(frozen=True)
class StorageRow(Report):
    """One storage: its size, what names it, and how much of it is used.

    ``shape`` is None where no single value names the storage. ``used_bytes`` counts what all values together address.
    """

    bytes: int
    name: str
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    used_bytes: int
    views: tuple[ViewRow, ...] = ()
    annotation: str | None = None


@dataclass
class Value:
    """A plain tensor with its names; ``outer`` is what it is a part of, for annotators."""

    tensor: Tensor
    names: list[str]
    outputs: list[int] = field(default_factory=list)
    outer: Tensor | None = None

    @property
    def label(self) -> str:
        """The names, and as which outputs the region returned it."""
        text = " = ".join(dict.fromkeys(self.names))
        if not self.outputs:
            return text
        indices = f"output at idx {', '.join(map(str, sorted(set(self.outputs))))}"
        return f"{text} ({indices})" if text else indices


class Bill:
    """Which storages have been counted, and by whom. Those of parameters, ``weights``, never are."""

    def __init__(self, weights: frozenset[int] = frozenset()) -> None:
        self._weights = weights
        self._owners: dict[int, str] = {}
        self._alive: list[Any] = []  # keeps what is counted alive, so that no other storage gets the same identity

    def rows(
        self, values: Iterable[Value], owner: str, annotate: Annotate | None
    ) -> tuple[tuple[StorageRow, ...], dict[str, int]]:
        """Rows for the storages that nobody has been billed for; and how many were, by owner."""
        others: dict[int, str] = {}
        with unseen():
            groups = self._new_groups(values, owner, others)
            made = [_row(_folded(group), size) for group, size in groups if size]
        if annotate is None:
            rows = tuple(row for row, _ in made)
        else:  # the user's code: it runs under the user's modes
            rows = tuple(dataclasses.replace(row, annotation=_label(annotate(tensor))) for row, tensor in made)
        return rows, dict(Counter(others.values()))

    def _new_groups(
        self, values: Iterable[Value], owner: str, others: dict[int, str]
    ) -> Iterable[tuple[list[Value], int]]:
        """The values on storages that nobody has been billed for, with the sizes of these; ``others`` gets the rest."""
        groups: dict[int, tuple[list[Value], int]] = {}
        for value in values:
            storage = value.tensor.untyped_storage()
            key = storage._cdata
            if key in self._weights:
                continue
            if key in self._owners:
                others[key] = self._owners[key]
                continue
            if key not in groups:
                self._alive.append(storage)
                groups[key] = [], storage.nbytes()
            groups[key][0].append(value)
        self._owners.update(dict.fromkeys(groups, owner))
        return groups.values()

    def new_storages(self, values: Iterable[Value], owner: str) -> list[tuple[int, int]]:
        """Identity and size of the storages that nobody has been billed for."""
        found = []
        for value in values:
            storage = value.tensor.untyped_storage()
            key = storage._cdata
            if key not in self._owners and key not in self._weights:
                self._owners[key] = owner
                self._alive.append(storage)
                if storage.nbytes():
                    found.append((key, storage.nbytes()))
        return found


def values_of(tensor: Tensor, name: str) -> Iterator[Value]:
    """The plain tensors under ``tensor``, named; nothing for what has no memory."""
    if is_placeholder(tensor):
        return
    parts = list(_parts(tensor, ""))
    for suffix, part in parts:
        yield Value(part, [name + suffix] if name else [], outer=tensor)


def row_lines(rows: tuple[StorageRow, ...], indent: str = "  ") -> list[str]:
    """The rows as text, columns padded to the widest cell."""
    if not rows:
        return []
    sizes = [format_bytes(row.bytes) for row in rows]
    shapes = ["" if row.shape is None else str(row.shape) for row in rows]
    size_width = max(map(len, sizes))
    name_width = max((len(row.name) for row in rows if row.shape is not None), default=0)
    shape_width = max(map(len, shapes))
    dtype_width = max(len(row.dtype) for row in rows)
    lines = []
    for row, size, shape in zip(rows, sizes, shapes, strict=True):
        line = f"{indent}{size:>{size_width}}  {row.name:<{name_width}}  {shape:<{shape_width}}  "
        line += f"{row.dtype:<{dtype_width}}"
        if row.used_bytes < row.bytes:
            line += f"  ! held for {format_bytes(row.used_bytes)} of {format_bytes(row.bytes)}"
        if row.annotation:
            line += f"  {row.annotation}"
        lines.append(line.rstrip())
        lines += [
            f"{indent}  - {view.name}  view {view.shape}  spans {format_bytes(view.span_bytes)}" for view in row.views
        ]
    return lines


def _parts(tensor: Tensor, suffix: str) -> Iterator[tuple[str, Tensor]]:
    if is_traceable_wrapper_subclass(tensor):
        inner = list(inner_tensors(tensor))
        for name, part in inner:
            yield from _parts(part, suffix if len(inner) == 1 else f"{suffix}.{name.lstrip('_')}")
    elif tensor.layout is torch.sparse_coo:
        yield from ((f"{suffix}.indices", tensor._indices()), (f"{suffix}.values", tensor._values()))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from ((f"{suffix}.crow", tensor.crow_indices()), (f"{suffix}.col", tensor.col_indices()))
        yield f"{suffix}.values", tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from ((f"{suffix}.ccol", tensor.ccol_indices()), (f"{suffix}.row", tensor.row_indices()))
        yield f"{suffix}.values", tensor.values()
    elif tensor.layout is torch.strided:
        if tensor.is_nested:
            yield f"{suffix}.values", tensor.values()
        elif _has_memory(tensor):
            yield suffix, tensor
        else:
            for name, part in vars(tensor).items():
                if isinstance(part, Tensor):
                    yield from _parts(part, f"{suffix}.{name.lstrip('_')}")


def _has_memory(tensor: Tensor) -> bool:
    """False for a wrapper, whose storage has a size and nothing behind it."""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == "meta" or storage.data_ptr() >= 0  # fake tensors have memory in another place
    except RuntimeError:
        return False


def _folded(values: list[Value]) -> list[Value]:
    """Rule 2."""
    found: dict[Any, Value] = {}
    for value in values:
        tensor = value.tensor
        key = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        known = found.get(key)
        if known is None:
            found[key] = value
        else:
            known.names.extend(value.names)
            known.outputs.extend(value.outputs)
    return list(found.values())


def _label(given: Any) -> str | None:
    return str(given) if given else None


def _row(values: list[Value], size: int) -> tuple[StorageRow, Tensor]:
    """Rule 3; and the tensor for an annotator."""
    runs = [_runs(value.tensor) for value in values]
    used = min(size, _length(run for several in runs for run in several))
    owner = next((value for value, own in zip(values, runs, strict=True) if _length(own) >= size), None)
    if owner is None and len(values) == 1:
        owner = values[0]
    others = sorted(
        (value for value in values if value is not owner), key=lambda value: int(value.tensor.storage_offset())
    )
    first = owner or values[0]
    row = StorageRow(
        size,
        owner.label if owner is not None else f"base of {', '.join(value.label for value in others)}",
        tuple(owner.tensor.shape) if owner is not None else None,
        str(first.tensor.dtype).removeprefix("torch."),
        str(first.tensor.device),
        used,
        tuple(ViewRow(value.label, tuple(value.tensor.shape), _span(value.tensor)) for value in others),
    )
    return row, first.tensor if first.outer is None else first.outer


def _span(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(1 + last) * tensor.element_size()


def _runs(tensor: Tensor) -> list[tuple[int, int]]:
    """The bytes of its storage that ``tensor`` addresses, as (start, end); its extent where there are too many."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if tensor.numel() == 0:
        return []
    steps = sorted(
        (int(stride), int(size))
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and stride
    )
    length = 1
    while steps and steps[0][0] == length:
        length *= steps.pop(0)[1]
    count = 1
    for _, size in steps:
        count *= size
    if count > _MOST_RUNS:
        return [(start, start + _span(tensor))]
    starts = [start]
    for stride, size in steps:
        starts = [one + index * stride * width for one in starts for index in range(size)]
    return [(one, one + length * width) for one in starts]


def _length(runs: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of ``runs``."""
    total = reached = 0
    for start, end in sorted(runs):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
