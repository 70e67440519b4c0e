"""What a checkpoint keeps when its forward has ended, region by region, read off its part of the autograd graph.

The same storages for the same regions as in `torch_remat.saved_tensors_report()`, without a look at the whole process:
what the autograd nodes of SAVE regions save, their persisted outputs, the checkpoint's inputs. Weights are left out.
"""

from __future__ import annotations

import bisect
import weakref
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_remat.diagnostics.graph import is_weight, saves_of
from torch_remat.runtime.tape import Output, OutputKind, Packed, Span, Tape
from torch_remat_tensorboard.names import INPUTS, label_of
from torch_remat_tensorboard.resident import Resident
from torch_remat_tensorboard.storages import storages_of
from torch_remat_tensorboard.weights import Weights

__all__ = ["count_kept"]

_LEAF_NUMBER = 1 << 62  # nodes that accumulate into leaves have the largest numbers


def count_kept(tape: Tape, nodes: list[Any], weights: Weights, kept: Resident, packed: Resident) -> None:
    """Count what the checkpoint keeps, and in `packed` what hook pairs have made of its tensors.

    Args:
        tape: the checkpoint's, right after its forward.
        nodes: autograd nodes of its outputs.
        weights: storages that do not count; those that are met in the graph are added.
        kept: counts by label of group and region.
        packed: the same for the payloads of hook pairs.
    """
    owner = weakref.ref(tape)
    records = {id(record.span): record for record in tape.order}
    by_span = _nodes_by_span(tape, nodes, weights)
    for span in tape.spans.items:
        label = label_of(tape.name, span.name)
        for node in by_span.get(id(span), ()):
            for save in saves_of(node):
                if save.kind in ("packed", "foreign"):
                    _count_payload(save.payload, label, packed)
                elif save.tensor is not None and not save.weight:
                    for storage in storages_of(save.tensor):
                        if storage._cdata not in weights:
                            kept.add(storage, label)
        record = records.get(id(span))
        if record is not None:
            for output in (*record.outputs, *(changed for _, changed in record.changed)):
                _count_output(output, label, owner, kept, packed)
    label = label_of(tape.name, INPUTS)
    for output in tape.inputs:
        if not (isinstance(output.data, Tensor) and is_weight(output.data)):
            _count_output(output, label, owner, kept, packed)


def _nodes_by_span(tape: Tape, nodes: list[Any], weights: Weights) -> dict[int, list[Any]]:
    """The nodes that SAVE regions of the body made, by identity of the region's span, oldest first."""
    spans = [span for span in tape.spans.items if span.end is not None and span.end > span.start]
    if not spans:
        return {}
    starts = [span.start for span in spans]
    first = starts[0]
    found: list[tuple[int, Span, Any]] = []
    seen: set[Any] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if number >= _LEAF_NUMBER:
            weights.note_if_parameter(node.variable)
            continue
        if number < first:
            continue  # before the first region, and so is all that can be reached from here
        span = spans[bisect.bisect_right(starts, number) - 1]
        if span.start <= number < (span.end or 0):
            found.append((number, span, node))
        pending.extend(edge for edge, _ in node.next_functions if edge is not None)
    by_span: dict[int, list[Any]] = {}
    for _, span, node in sorted(found, key=lambda one: one[0]):
        by_span.setdefault(id(span), []).append(node)
    return by_span


def _count_output(output: Output, label: str, owner: weakref.ref[Tape], kept: Resident, packed: Resident) -> None:
    """A persisted output, or an input."""
    if output.kind is not OutputKind.KEPT:
        return
    if callable(output.unpack):
        _count_payload(output.data, label, packed)
    elif isinstance(output.data, Tensor):
        for storage in storages_of(output.data):
            kept.add(storage, label, owner)


def _count_payload(payload: Any, label: str, packed: Resident) -> None:
    for leaf in tree_leaves(payload.payload if type(payload) is Packed else payload):
        if isinstance(leaf, Tensor):
            for storage in storages_of(leaf):
                packed.add(storage, label)
