"""What each living checkpoint keeps, region by region, as plain values.

Rules:
 1. A region's rows are what the autograd nodes that it made save, and its persisted outputs. Weights are left out.
 2. A storage that two regions hold is billed to the first; the other says so. Rows add up to their header.
 3. What is not a region's own stands behind, and is billed when all regions are, and what is outside of them: inputs,
    what hook pairs packed, what a replay has rebuilt. So it changes nothing in the part that 0.2 has, too.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torch_remat.diagnostics.graph import NodeSaves, Save, is_weight, unseen
from torch_remat.diagnostics.report import Report, count_of, format_bytes
from torch_remat.diagnostics.storages import Annotate, Bill, StorageRow, Value, row_lines, values_of
from torch_remat.errors import display_name
from torch_remat.runtime.frame import Frame
from torch_remat.runtime.tape import Output, OutputKind, Packed, Region, Span, Spans, Tape

__all__ = ["CheckpointMemory", "Draft", "PackedMemory", "RegionMemory", "Survey", "native_values", "survey_of"]

_MOST_SECTIONS = 100  # of one checkpoint that are all shown


@dataclass(frozen=True)
class RegionMemory(Report):
    """What one SAVE region call keeps.

    ``alive`` is False when the region saved something and its graph is gone. ``billed_elsewhere`` counts storages that
    an earlier region was billed for, by that region's name.
    """

    name: str
    bytes: int
    rows: tuple[StorageRow, ...]
    rebuilt_saves: int = 0
    offloaded_outputs: int = 0
    billed_elsewhere: tuple[tuple[str, int], ...] = ()
    alive: bool = True

    def lines(self, checkpoint: str | None) -> list[str]:
        """The region's section; empty where there is nothing to say."""
        title = display_name(checkpoint, self.name)
        if not self.alive:
            return [f"{title}: none of its saved tensors is alive any more: its output is gone"]
        if not self.rows:
            return []
        text = [f"{title}: {format_bytes(self.bytes)}", *row_lines(self.rows)]
        if self.rebuilt_saves:
            text.append(f"  + {count_of(self.rebuilt_saves, 'save')} rebuilt on recompute, not resident")
        if self.offloaded_outputs:
            text.append(f"  + {count_of(self.offloaded_outputs, 'output')} offloaded, not resident on device")
        for owner, count in self.billed_elsewhere:
            text.append(f"  + {count_of(count, 'storage')} billed to {owner}")
        return text


@dataclass(frozen=True)
class PackedMemory(Report):
    """What hook pairs have packed: how many tensors, and the bytes of the tensors in their payloads, per device."""

    tensors: int = 0
    bytes_by_device: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """In one line."""
        sizes = ", ".join(f"{format_bytes(size)} on {device}" for device, size in self.bytes_by_device)
        return f"{count_of(self.tensors, 'tensor')} packed by hooks ({sizes or 'size unknown'})"


@dataclass(frozen=True)
class CheckpointMemory(Report):
    """What one checkpoint keeps.

    ``bytes`` and ``storages`` count the rows of the regions. ``inputs`` are the checkpoint's own; ``rebuilt`` is what
    replay has made and backward not used yet. ``observed_bytes`` is held only while the first call of a body is
    observed; the text leaves it out, since the running body mostly holds it as well.
    """

    name: str | None
    bytes: int
    storages: int
    regions: tuple[RegionMemory, ...]
    inputs: tuple[StorageRow, ...] = ()
    packed: PackedMemory = field(default_factory=PackedMemory)
    rebuilt_bytes: int = 0
    rebuilt_storages: int = 0
    observed_bytes: int = 0
    observed_outputs: int = 0

    def format(self, *, with_rest: bool = True) -> str:
        """The report as text. ``with_rest`` adds inputs, packed and rebuilt tensors, where there are any."""
        text = [f"{display_name(self.name)}: {format_bytes(self.bytes)} resident in {self.storages} storage(s)"]
        sections = [(region, lines) for region in self.regions if (lines := region.lines(self.name))]
        if len(sections) <= _MOST_SECTIONS:
            text += [line for _, lines in sections for line in lines]
        else:
            text += self._grouped(sections)
        rest = self._rest() if with_rest else []
        return "\n".join([*text, *(["", "also held:", *rest] if rest else [])])

    def _grouped(self, sections: list[tuple[RegionMemory, list[str]]]) -> list[str]:
        """Sections that differ by the numbers in their names only are shown once: those of experts, say."""
        groups: dict[Any, list[list[str]]] = {}
        for region, lines in sections:
            pattern = re.sub(r"\d+", "*", region.name)
            groups.setdefault((pattern, region.bytes, *lines[1:]), []).append(lines)
        text: list[str] = []
        for (pattern, *_), members in groups.items():
            if len(members) > 1:
                text.append(f"[x{len(members)}: {display_name(self.name, pattern)}]")
            text += members[0]
        return text

    def _rest(self) -> list[str]:
        rest = row_lines(self.inputs)
        if self.packed.tensors:
            rest.append(f"  {self.packed.text()}")
        if self.rebuilt_bytes:
            rest.append(f"  {format_bytes(self.rebuilt_bytes)} rebuilt by replay in {self.rebuilt_storages} storage(s)")
        return rest


@dataclass
class _Found:
    """The saves of one region call, in order."""

    span: Span
    nodes: list[NodeSaves] = field(default_factory=list)


@dataclass
class Survey:
    """The nodes of the graph, sorted by the region that made them; ``outside`` are the others."""

    regions: dict[int, _Found]  # by identity of the span
    outside: list[NodeSaves]


def survey_of(spans: Iterable[Spans], nodes: Iterable[NodeSaves]) -> Survey:
    """Which of ``nodes`` belong to which region."""
    ordered = sorted((span for several in spans for span in several.items), key=lambda span: span.start)
    starts = [span.start for span in ordered]
    survey = Survey({}, [])
    for node in nodes:
        span = _owner(ordered, starts, node.number)
        if span is None:
            survey.outside.append(node)
        else:
            survey.regions.setdefault(id(span), _Found(span)).nodes.append(node)
    return survey


def _owner(ordered: list[Span], starts: list[int], number: int) -> Span | None:
    """The last span that starts at or before ``number``, if ``number`` lies in it."""
    index = bisect.bisect_right(starts, number) - 1
    while index >= 0 and ordered[index].end == ordered[index].start:
        index -= 1  # a region that made no node
    if index < 0:
        return None
    span = ordered[index]
    return span if span.end is None or number < span.end else None


class Draft:
    """What the checkpoint with ``spans`` keeps: regions are billed at once, the rest by :meth:`finished` (rule 3)."""

    def __init__(
        self,
        spans: Spans,
        tape: Tape | None,
        frame: Frame | None,
        survey: Survey,
        bill: Bill,
        annotate: Annotate | None,
    ) -> None:
        self.spans = spans
        self._tape = tape
        self._bill = bill
        self._annotate = annotate
        self._observed: list[Value] = []
        self._packed = _Packed()
        records = {id(record.span): (index, record) for index, record in enumerate(tape.order if tape else [])}
        early = _early_outputs(frame)
        self.regions = tuple(
            self._region(span, survey.regions.get(id(span)), *records.get(id(span), (-1, None)), early)
            for span in spans.items
        )

    def _region(
        self, span: Span, found: _Found | None, index: int, record: Region | None, early: set[tuple[int, int]] | None
    ) -> RegionMemory:
        with unseen():
            values, rebuilt = _saved_values(span, found.nodes if found else [], self._packed)
            offloaded = 0
            if record is not None:
                wanted = None if early is None else {leaf for region, leaf in early if region == index}
                offloaded = _output_values(record, values, wanted, self._observed, self._packed)
        name = display_name(self.spans.checkpoint, span.name)
        rows, elsewhere = self._bill.rows(values, name, self._annotate)
        made_nodes = span.end is not None and span.end > span.start
        return RegionMemory(
            span.name,
            sum(row.bytes for row in rows),
            rows,
            rebuilt,
            offloaded,
            tuple(sorted((owner, count) for owner, count in elsewhere.items() if owner != name)),
            bool(found) or bool(values) or not made_nodes,
        )

    def finished(self) -> CheckpointMemory:
        """The whole of it."""
        bill, name = self._bill, display_name(self.spans.checkpoint)
        with unseen():
            inputs = list(_input_values(self._tape, self._packed)) if self._tape else []
        input_rows, _ = bill.rows(inputs, f"the inputs of {name}", self._annotate)
        with unseen():
            packed = self._packed.report(bill)
            rebuilt = bill.new_storages(_rebuilt_values(self._tape), "replay")
            observed = bill.new_storages(self._observed, "observing")
        return CheckpointMemory(
            self.spans.checkpoint,
            sum(region.bytes for region in self.regions),
            sum(len(region.rows) for region in self.regions),
            self.regions,
            input_rows,
            packed,
            sum(size for _, size in rebuilt),
            len(rebuilt),
            sum(size for _, size in observed),
            len(self._observed),
        )


def _early_outputs(frame: Frame | None) -> set[tuple[int, int]] | None:
    """While a call is observed: the outputs that recomputed code has read so far. None where nothing is observed."""
    observer = getattr(frame, "observer", None)
    return None if observer is None else observer.graph.read_so_far()


def _saved_values(span: Span, nodes: list[NodeSaves], packed: _Packed) -> tuple[list[Value], int]:
    """What the nodes of a region keep, named; and how many of its saves replay will rebuild."""
    values: list[Value] = []
    unnamed = rebuilt = 0
    for node in nodes:
        names = (span.names or {}).get(node.number, ())
        for save in node.saves:
            name = names[save.position] if save.position < len(names) else ""
            if not name:
                name = f"saved.{unnamed}"
                unnamed += 1
            if save.kind == "slot":
                rebuilt += 1
            elif save.kind in ("packed", "foreign"):
                packed.add(save.payload)
            elif save.tensor is not None and not save.weight:
                values.extend(_with_address(span, value) for value in values_of(save.tensor, name))
    return values, rebuilt


def _with_address(span: Span, value: Value) -> Value:
    """Note as which outputs, not persisted, the region returned the value."""
    if span.outputs:
        try:
            address = value.tensor.data_ptr()
        except RuntimeError:  # a tensor without memory
            return value
        value.outputs.extend(index for index, one in span.outputs if one == address != 0)
    return value


def _output_values(
    record: Region, values: list[Value], wanted: set[int] | None, rest: list[Value], packed: _Packed
) -> int:
    """Add persisted outputs to ``values``; returns how many are offloaded. ``rest``: held while observing only."""
    offloaded = 0
    for index, output in [*enumerate(record.outputs), *((-1 - leaf, output) for leaf, output in record.changed)]:
        if output.kind is not OutputKind.KEPT:
            continue
        if callable(output.unpack):
            offloaded += 1
            packed.add(output.data)
            continue
        if not isinstance(output.data, Tensor):
            continue
        made = list(_of_output(index, output))
        saved = {_memory(value) for value in values}
        if wanted is not None and index >= 0 and index not in wanted and not any(_memory(one) in saved for one in made):
            rest.extend(made)
        else:
            values.extend(made)
    return offloaded


def _of_output(index: int, output: Output) -> Iterator[Value]:
    for value in values_of(output.data, "" if index >= 0 else f"argument at idx {-1 - index}"):
        if index >= 0:
            value.outputs.append(index)
        yield value


def _memory(value: Value) -> int:
    return value.tensor.untyped_storage()._cdata


def _input_values(tape: Tape, packed: _Packed) -> Iterator[Value]:
    for index, output in enumerate(tape.inputs):
        if output.kind is not OutputKind.KEPT:
            continue
        if output.unpack is not None:
            packed.add(output.data)
        elif not is_weight(output.data):
            yield from values_of(output.data, f"input {index}")


def _rebuilt_values(tape: Tape | None) -> Iterator[Value]:
    for slot in tape.living_slots() if tape else ():
        if slot.tensor is not None:
            yield from values_of(slot.tensor, "rebuilt")


class _Packed:
    """The payloads of hook pairs, each once: an output and a save of the same tensor share one."""

    def __init__(self) -> None:
        self._payloads: dict[int, Any] = {}

    def add(self, payload: Any) -> None:
        """Take in one payload."""
        payload = payload.payload if type(payload) is Packed else payload
        self._payloads[id(payload)] = payload

    def report(self, bill: Bill) -> PackedMemory:
        """How many there are, and the bytes of the tensors in them that nobody has been billed for."""
        sizes: dict[str, int] = {}
        for payload in self._payloads.values():
            for tensor in _tensors_in(payload, 4):
                for value in values_of(tensor, ""):
                    device = str(value.tensor.device)
                    sizes[device] = sizes.get(device, 0) + sum(size for _, size in bill.new_storages([value], "hooks"))
        return PackedMemory(len(self._payloads), tuple(sorted(sizes.items())))


def _tensors_in(payload: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(payload, Tensor):
        yield payload
    elif depth and isinstance(payload, (tuple, list)):
        for one in payload:
            yield from _tensors_in(one, depth - 1)
    elif depth and isinstance(payload, dict):
        for one in payload.values():
            yield from _tensors_in(one, depth - 1)


def native_values(node: NodeSaves) -> Iterator[tuple[Save, Value]]:
    """What a node outside every region keeps by itself."""
    for save in node.saves:
        if save.kind in ("native", "kept") and save.tensor is not None and not save.weight:
            for value in values_of(save.tensor, save.attribute):
                yield save, value
