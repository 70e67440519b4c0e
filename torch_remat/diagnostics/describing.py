"""Turns a watched forward that has just ended into its explanation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_remat.diagnostics.explanation import (
    CheckpointExplanation,
    ExplainedTensor,
    RegionExplanation,
    ReplayExplanation,
)
from torch_remat.diagnostics.watching import Metadata, Save, Watching, meta_of
from torch_remat.runtime.forward import ForwardFrame
from torch_remat.runtime.placeholder import can_stand_in
from torch_remat.runtime.plan import Plan
from torch_remat.runtime.tape import Output, OutputKind, Region, Tape, WeakStorage
from torch_remat.runtime.tensors import storages_of
from torch_remat.runtime.tree import is_container, unflatten

__all__ = ["Bill", "Describer"]


class Bill:
    """Counts each storage once; holds none."""

    def __init__(self) -> None:
        self._holders: dict[int, tuple[WeakStorage, str]] = {}
        self.total = 0

    def add(self, tensor: Tensor, holder: str) -> tuple[int, str | None]:
        """(bytes of the storages of ``tensor`` that are new here, who has had one of the others first)."""
        new, shared = 0, None
        for storage in storages_of(tensor):
            if storage._cdata in self._holders:
                shared = shared or self._holders[storage._cdata][1]
            else:
                self._holders[storage._cdata] = WeakStorage(storage), holder
                new += storage.nbytes()
        self.total += new
        return new, shared


class Describer:
    """Turns a finished forward into its explanation."""

    def __init__(self, frame: ForwardFrame, observer: Watching, plan: Plan, total: Bill) -> None:
        self._plan = plan
        self._tape = frame.tape
        self._leaves = frame.leaves
        self._observer = observer
        self._saves = observer.living_saves()
        self._bill = Bill()
        self._total = total
        self._seen: set[int] = set()  # storages that replay makes

    def checkpoint(self) -> CheckpointExplanation:
        """The whole of it."""
        inputs = tuple(self._inputs())
        regions = tuple(self._region(index, region) for index, region in enumerate(self._tape.order))
        rebuilt = tuple(self._rebuilt([save for save in self._saves if save.region is None]))
        bare = RegionExplanation(None, "bare", (), rebuilt, (), 0)
        made = sum(row.bytes for one in (*regions, bare) for row in one.rebuilt)
        draws = tuple(self._observer.draws)
        return CheckpointExplanation(
            self._tape.name, inputs, regions, bare, draws, self._replay(), self._bill.total, made
        )

    def _kept(self, what: str, tensor: Tensor, why: str, holder: str, *, copy: bool = False) -> ExplainedTensor:
        if not copy and self._observer.is_captured(tensor):
            return ExplainedTensor(what, *meta_of(tensor), 0, f"{why}; a captured tensor, held at no cost")
        self._total.add(tensor, holder)
        new, shared = self._bill.add(tensor, holder)
        if shared is not None and not new:
            why = f"shares memory with {shared}" if why.startswith("shares") else f"{why}; in memory of {shared}"
        return ExplainedTensor(what, *meta_of(tensor), new, why)

    def _inputs(self) -> Iterator[ExplainedTensor]:
        labels = _labels(self._tape.spec, len(self._leaves), ("input {}", _arguments(self._tape)))
        for index, (leaf, output, label) in enumerate(zip(self._leaves, self._tape.inputs, labels, strict=True)):
            if not isinstance(leaf, Tensor) or output.kind is OutputKind.REPEAT:
                continue
            why = self._observer.reason(self._observer.input_node(index)) if self._saves else None
            if leaf.is_leaf and leaf.requires_grad:
                held = "a leaf that requires a gradient, held at no cost"
                yield ExplainedTensor(label, *meta_of(leaf), 0, held if why is None else f"{why}; {held}")
            elif output.kind is OutputKind.PLACEHOLDER or not self._saves:
                yield ExplainedTensor(label, *meta_of(leaf), 0, "not kept: replay does not read it")
            elif output.unpack is not None:
                yield ExplainedTensor(label, *meta_of(leaf), 0, f"{why or 'not read'}; packed by the hook pair")
            else:
                yield self._kept(label, leaf, f"kept: {why or 'no placeholder can stand for it'}", label)

    def _region(self, index: int, region: Region) -> RegionExplanation:
        saves = [save for save in self._saves if save.region == region.name]
        if region.recompute:
            return RegionExplanation(region.name, "recompute", (), tuple(self._rebuilt(saves)), (), 0)
        before = self._bill.total
        labels = _labels(region.spec, len(region.outputs), ("output{}", None)) if region.outputs else []
        kept: list[ExplainedTensor] = []
        given: list[ExplainedTensor] = []
        placeholders: list[ExplainedTensor] = []
        for position, (output, label) in enumerate(zip(region.outputs, labels, strict=True)):
            self._output(index, region, position, output, label, kept, given, placeholders)
        for argument, output in region.changed:
            self._changed(index, region, argument, output, kept)
        kept.extend(self._region_saves(index, region))
        rebuilt = (*given, *self._rebuilt(saves))
        return RegionExplanation(
            region.name, "save", tuple(kept), rebuilt, tuple(placeholders), self._bill.total - before
        )

    def _output(
        self,
        index: int,
        region: Region,
        position: int,
        output: Output,
        label: str,
        kept: list[ExplainedTensor],
        given: list[ExplainedTensor],
        placeholders: list[ExplainedTensor],
    ) -> None:
        meta: Metadata = self._observer.outputs.get((index, position), ((), ""))
        if output.kind is OutputKind.PLACEHOLDER:
            count = output.meta.dtype.itemsize * int(torch.Size(output.meta.size).numel())
            why = "nothing that backward needs is made from it"
            if position in self._plan.steps[index].free:
                why += "; replay gets the memory that the region's own saves keep"
            placeholders.append(ExplainedTensor(label, *meta, count, why))
        elif output.kind is OutputKind.KEPT:
            if not self._saves:
                return  # no replay: nothing is left to hold it
            why = self._why((index, position))
            if isinstance(output.data, Tensor) and not can_stand_in(output.data):
                why = "no placeholder can stand for it"
            if output.unpack is not None:
                kept.append(ExplainedTensor(label, *meta, 0, f"{why}; packed by the hook pair"))
            else:
                if output.cloned:
                    why += "; a copy, since the body modifies it in place"
                kept.append(self._kept(label, output.data, why, f"{label} of region {region.name}", copy=output.cloned))
        elif output.kind in (OutputKind.ARGUMENT, OutputKind.ARGUMENT_VIEW):
            how = "is" if output.kind is OutputKind.ARGUMENT else "is a view of"
            given.append(ExplainedTensor(label, *meta, 0, f"{how} argument {output.data}, which replay has"))

    def _changed(self, index: int, region: Region, argument: int, output: Output, kept: list[ExplainedTensor]) -> None:
        label = f"argument {argument}"
        why = f"modified in place by the region; {self._why((index, -1 - argument))}"
        if output.unpack is not None:
            kept.append(ExplainedTensor(label, (), "", 0, f"{why}; packed by the hook pair"))
        elif self._saves and isinstance(output.data, Tensor):
            kept.append(self._kept(label, output.data, why, f"{label} of region {region.name}", copy=output.cloned))

    def _why(self, detail: tuple[int, int]) -> str:
        reason = self._observer.reason(detail)
        if reason is not None:
            return reason
        if detail in self._observer.declarations:
            return f"named in recompute_needs_tensor at {self._observer.declarations[detail]}"
        return "shares memory with what is kept"

    def _region_saves(self, index: int, region: Region) -> Iterator[ExplainedTensor]:
        number = 0
        for owner, meta, line, reference in self._observer.kept_saves:
            if owner != index:
                continue
            label = f"save {number}"
            number += 1
            why = f"saved for backward by code at {line}"
            if reference is None:
                yield ExplainedTensor(label, *meta, 0, f"{why}; packed by the hook pair")
                continue
            payload = reference()
            if payload is not None:
                yield self._kept(label, payload.tensor, why, f"{label} of region {region.name}")

    def _rebuilt(self, saves: list[Save]) -> Iterator[ExplainedTensor]:
        for save in saves:
            if not self._observer.is_made_again(save):
                continue
            fresh = any(key not in self._seen for key in save.keys)
            self._seen.update(save.keys)
            what = "saved tensor" if save.argument is None else f"argument {save.argument}"
            by = self._observer.operation(save) if save.argument is None else f"the region, code at {save.line}"
            yield ExplainedTensor(what, *save.meta, save.bytes if fresh else 0, f"saved by {by}")

    def _replay(self) -> ReplayExplanation:
        if not self._saves:
            return ReplayExplanation(False, False, None, None, "none, nothing has to be recomputed", ())
        last = self._saves[-1]
        if self._tape.to_end:
            why = "code after the last save modifies what was saved, or early stop is off"
            return ReplayExplanation(True, True, None, None, f"runs to the end of the body: {why}", ())
        later = self._tape.order[last.started :]
        not_run = tuple(region.name for region in later if region.recompute)
        if last.argument is not None:
            text = f"stops at region {last.region}, which saves its argument {last.argument}"
        else:
            place = "bare code" if last.region is None else f"region {last.region}"
            text = f"stops after {self._observer.operation(last)}, in {place}"
        if not_run:
            text += f"; not run again: {', '.join(not_run)}"
        return ReplayExplanation(True, False, last.region, last.line, text, not_run)


class _Leaf:
    """Stands for a leaf while labels are made."""


def _labels(spec: Any, count: int, form: tuple[str, list[str] | None]) -> list[str]:
    """What leaves are called: ``form`` is a template for the path, and names for the positional arguments."""
    leaves = [_Leaf() for _ in range(count)]
    template, names = form
    paths: dict[int, str] = {}
    try:
        if names is None:
            _walk(unflatten(spec, list(leaves)), "", paths)
        else:
            args, kwargs = unflatten(spec, list(leaves))
            for position, value in enumerate(args):
                _walk(value, names[position] if position < len(names) else str(position), paths)
            for name, value in kwargs.items():
                _walk(value, name, paths)
    except Exception:  # noqa: BLE001 - a container of the user's own that takes tensors only: numbers will do
        paths = {}
    return [
        template.format(paths.get(id(leaf), f"[{index}]" if names is None else str(index)))
        for index, leaf in enumerate(leaves)
    ]


def _walk(value: Any, path: str, paths: dict[int, str]) -> None:
    if isinstance(value, _Leaf):
        paths[id(value)] = path
    elif isinstance(value, dict):
        for key, item in value.items():
            _walk(item, f"{path}[{key!r}]", paths)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, item in zip(value._fields, value, strict=True):  # type: ignore[attr-defined]
            _walk(item, f"{path}.{field}", paths)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _walk(item, f"{path}[{index}]", paths)
    elif dataclasses.is_dataclass(value) and is_container(value):
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name, None), f"{path}.{field.name}", paths)


def _arguments(tape: Tape) -> list[str]:
    """The names of the positional arguments of the body, as far as its code tells."""
    function: Any = tape.function
    if isinstance(function, torch.nn.Module):
        function = function.forward
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    names = list(code.co_varnames[: code.co_argcount])
    return names[1:] if hasattr(function, "__self__") else names
