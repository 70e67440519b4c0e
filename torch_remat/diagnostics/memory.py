"""The memory reports: what the running checkpoint keeps, and what the whole model keeps.

Each report is data (:func:`current_memory_report`, :func:`saved_tensors_report`), with a text form and a printing one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TextIO

from torch import Tensor

from torch_remat.diagnostics.checkpoints import (
    CheckpointMemory,
    Draft,
    PackedMemory,
    native_values,
    survey_of,
)
from torch_remat.diagnostics.graph import Live, find_live, nodes_of, unseen, walk
from torch_remat.diagnostics.report import Report, count_of, format_bytes, print_text
from torch_remat.diagnostics.storages import Annotate, Bill
from torch_remat.diagnostics.text import compressed, sort_key
from torch_remat.errors import UsageError, display_name
from torch_remat.runtime.frame import current_frame
from torch_remat.runtime.tape import Span

__all__ = [
    "OutsideRow",
    "SavedTensorsReport",
    "current_memory_report",
    "format_current_memory_report",
    "format_saved_tensors_report",
    "kept_bytes_by_span",
    "print_current_memory_report",
    "print_saved_tensors_report",
    "saved_tensors_report",
]


def current_memory_report(annotate: Annotate | None = None) -> CheckpointMemory:
    """What the checkpoint whose body is running keeps at this moment, in forward or in replay.

    Args:
        annotate: called with the tensor of each row; what it returns stands behind the row.

    Raises:
        RuntimeError: no checkpoint's body is running.
    """
    frame = current_frame.get()
    if frame is None:
        raise UsageError(
            "No active torch_remat checkpoint region. To fix: call it inside the body of a checkpoint; outside, "
            "saved_tensors_report() covers every living checkpoint."
        )
    spans = frame.tape.spans
    live = find_live()
    survey = survey_of([spans], walk(live.nodes))
    return Draft(spans, frame.tape, frame, survey, Bill(live.weights), annotate).finished()


def format_current_memory_report(annotate: Annotate | None = None) -> str:
    """:func:`current_memory_report` as text."""
    return current_memory_report(annotate).format()


def print_current_memory_report(file: TextIO | None = None, annotate: Annotate | None = None) -> None:
    """Print :func:`current_memory_report` to ``file``, by default the standard output."""
    print_text(format_current_memory_report(annotate), file)


@dataclass(frozen=True)
class OutsideRow(Report):
    """What nodes of these types, outside every SAVE region, keep: bytes, in ``count`` storages."""

    bytes: int
    node_types: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class SavedTensorsReport(Report):
    """What every living checkpoint keeps, and what autograd saves outside of SAVE regions.

    ``outside`` is None where no roots were given and so nothing outside was looked at. ``checkpoints`` are sorted by
    name; a checkpoint is listed while something that its regions saved or replay will rebuild is alive.
    """

    checkpoints: tuple[CheckpointMemory, ...]
    outside: tuple[OutsideRow, ...] | None

    @property
    def bytes(self) -> int:
        """The whole: regions and outside."""
        return self.region_bytes + self.outside_bytes

    @property
    def region_bytes(self) -> int:
        """What SAVE regions keep."""
        return sum(one.bytes for one in self.checkpoints)

    @property
    def outside_bytes(self) -> int:
        """What is saved outside of SAVE regions."""
        return sum(row.bytes for row in self.outside or ())

    @property
    def input_bytes(self) -> int:
        """Inputs that checkpoints keep for replay, where nobody else is billed for them."""
        return sum(row.bytes for one in self.checkpoints for row in one.inputs)

    @property
    def rebuilt_bytes(self) -> int:
        """What replays have made and backward has not used yet."""
        return sum(one.rebuilt_bytes for one in self.checkpoints)

    def format(self) -> str:
        """The report as text."""
        live = [one for one in self.checkpoints if _has_regions(one)]
        text = [
            f"saved for backward: {format_bytes(self.bytes)} resident -- {len(live)} region(s) "
            f"{format_bytes(self.region_bytes)}, "
            + ("outside regions not walked" if self.outside is None else "outside regions ")
            + ("" if self.outside is None else format_bytes(self.outside_bytes))
        ]
        groups = _grouped(live)
        if groups:
            text += ["", "regions:", *(_group_line(group) for group in groups), *_footers(live)]
        text += ["", *_outside_lines(self.outside)]
        if groups:
            text += ["", "region detail:"]
            for group in groups:
                if len(group) > 1:
                    text.append(f"[x{len(group)}: {_names(group)}]")
                text.append(group[0].format(with_rest=False))
                if not group[0].storages and any(region.billed_elsewhere for region in group[0].regions):
                    text.append("  its storages are billed to regions above")
        return "\n".join([*text, *self._rest()])

    def _rest(self) -> list[str]:
        rest = []
        for size, count, what in (
            (self.input_bytes, sum(len(one.inputs) for one in self.checkpoints), "checkpoint inputs"),
            (self.rebuilt_bytes, sum(one.rebuilt_storages for one in self.checkpoints), "rebuilt by replay"),
        ):
            if size:
                rest.append(f"  {format_bytes(size):>9}  {what}, in {count_of(count, 'storage')}")
        packed = self.packed
        if packed.tensors:
            rest.append(f"  {packed.text()}")
        return ["", "also held:", *rest] if rest else []

    @property
    def packed(self) -> PackedMemory:
        """What hook pairs have packed."""
        sizes: dict[str, int] = {}
        for one in self.checkpoints:
            for device, size in one.packed.bytes_by_device:
                sizes[device] = sizes.get(device, 0) + size
        return PackedMemory(sum(one.packed.tensors for one in self.checkpoints), tuple(sorted(sizes.items())))

    def as_dict(self) -> dict[str, Any]:
        """The report as nested dicts, with its totals."""
        totals = {
            name: getattr(self, name)
            for name in ("bytes", "region_bytes", "outside_bytes", "input_bytes", "rebuilt_bytes")
        }
        return {**totals, **super().as_dict()}


def saved_tensors_report(
    roots: Tensor | Iterable[Any] | None = None, annotate: Annotate | None = None
) -> SavedTensorsReport:
    """What all living checkpoints keep for backward; with ``roots`` also what is saved outside of SAVE regions.

    Made for the moment between forward and backward, and right at any other: during either, and after.

    Args:
        roots: the loss, or whatever backward will start from; other things among several are passed over.
        annotate: called with the tensor of each row; what it returns stands behind the row.
    """
    given = [roots] if isinstance(roots, Tensor) else [one for one in roots or () if isinstance(one, Tensor)]
    live = find_live()
    bill = Bill(live.weights)
    drafts = _drafts(live, given, bill, annotate)
    with unseen():
        outside = _outside(live, given, bill)
    checkpoints = [draft.finished() for draft in drafts]
    return SavedTensorsReport(tuple(one for one in checkpoints if _holds_something(one)), outside)


def format_saved_tensors_report(roots: Tensor | Iterable[Any] | None = None, annotate: Annotate | None = None) -> str:
    """:func:`saved_tensors_report` as text."""
    return saved_tensors_report(roots, annotate).format()


def print_saved_tensors_report(
    roots: Tensor | Iterable[Any] | None = None, file: TextIO | None = None, annotate: Annotate | None = None
) -> None:
    """Print :func:`saved_tensors_report` to ``file``, by default the standard output."""
    print_text(format_saved_tensors_report(roots, annotate), file)


def kept_bytes_by_span(wanted: Iterable[Span], nodes: Iterable[Any] = ()) -> dict[int, int]:
    """What SAVE region calls keep, by identity of their spans, whatever other checkpoints hold of it.

    A storage that several of them hold is counted for the first. ``nodes`` are looked at as well.
    """
    known = {id(span) for span in wanted}
    found = find_live()
    live = replace(
        found,
        spans=tuple(spans for spans in found.spans if any(id(span) in known for span in spans.items)),
        nodes=(*found.nodes, *nodes),
    )
    return {
        id(span): region.bytes
        for draft in _drafts(live, [], Bill(live.weights), None)
        for span, region in zip(draft.spans.items, draft.regions, strict=True)
    }


def _drafts(live: Live, roots: list[Tensor], bill: Bill, annotate: Annotate | None) -> list[Draft]:
    """Every checkpoint, sorted by name, with its regions billed."""
    survey = survey_of(live.spans, walk([*nodes_of(roots), *live.nodes]))
    tapes = {id(tape.spans): tape for tape in live.tapes}
    frame = current_frame.get()
    ordered = sorted(
        live.spans, key=lambda spans: (*sort_key(display_name(spans.checkpoint)), _first_number(spans.items))
    )
    drafts = []
    for spans in ordered:
        tape = tapes.get(id(spans))
        running = frame if frame is not None and frame.tape is tape else None
        drafts.append(Draft(spans, tape, running, survey, bill, annotate))
    return drafts


def _first_number(spans: list[Any]) -> int:
    return spans[0].start if spans else 0


def _holds_something(one: CheckpointMemory) -> bool:
    return _has_regions(one) or bool(one.inputs or one.packed.tensors or one.rebuilt_bytes or one.observed_bytes)


def _has_regions(one: CheckpointMemory) -> bool:
    return any(
        region.rows or region.rebuilt_saves or region.offloaded_outputs or region.billed_elsewhere
        for region in one.regions
    )


def _outside(live: Live, roots: list[Tensor], bill: Bill) -> tuple[OutsideRow, ...] | None:
    if not roots:
        return None
    types: dict[int, set[str]] = {}
    values = []
    for node in survey_of(live.spans, walk(nodes_of(roots))).outside:
        for _, value in native_values(node):
            key = value.tensor.untyped_storage()._cdata
            types.setdefault(key, set()).add(node.name)
            values.append(value)
    sizes: dict[tuple[str, ...], list[int]] = {}
    for key, size in bill.new_storages(values, "outside regions"):
        sizes.setdefault(tuple(sorted(types[key])), []).append(size)
    rows = [OutsideRow(sum(several), names, len(several)) for names, several in sizes.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.node_types)))


def _outside_lines(outside: tuple[OutsideRow, ...] | None) -> list[str]:
    if outside is None:
        return ["outside regions: not walked; pass the loss as roots to see what is saved there"]
    total, count = sum(row.bytes for row in outside), sum(row.count for row in outside)
    return [
        f"outside regions: {format_bytes(total)} in {count_of(count, 'storage')}",
        *(f"  {format_bytes(row.bytes):>9}  {' / '.join(row.node_types)} (x{row.count})" for row in outside),
    ]


def _grouped(checkpoints: list[CheckpointMemory]) -> list[list[CheckpointMemory]]:
    """Checkpoints of equal structure together: the same regions with storages of the same sizes."""
    groups: dict[Any, list[CheckpointMemory]] = {}
    for one in checkpoints:
        key = tuple(
            (region.name, tuple(row.bytes for row in region.rows)) for region in one.regions if region.lines(None)
        )
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _group_line(group: list[CheckpointMemory]) -> str:
    first = group[0]
    times, each = (f"x{len(group)}  ", " each") if len(group) > 1 else ("", "")
    return f"  {format_bytes(first.bytes)}  {times}{_names(group)}  ({count_of(first.storages, 'storage')}{each})"


def _names(group: list[CheckpointMemory]) -> str:
    return compressed(display_name(one.name) for one in group)


def _footers(live: list[CheckpointMemory]) -> list[str]:
    rebuilt = sum(region.rebuilt_saves for one in live for region in one.regions)
    offloaded = sum(region.offloaded_outputs for one in live for region in one.regions)
    text = []
    if rebuilt:
        text.append(f"  + {count_of(rebuilt, 'save')} rebuilt on recompute, not resident")
    if offloaded:
        text.append(f"  + {count_of(offloaded, 'output')} offloaded, not resident on device")
    return text
