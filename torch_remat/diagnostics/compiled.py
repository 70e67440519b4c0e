"""What checkpoints in graphs of ``torch.compile`` keep, read off the partitioned graphs.

1. Whatever is compiled while somebody watches is compiled anew, by a backend that partitions as Inductor does and runs
   the graphs operation by operation. What was compiled before stays what it was.
2. Kept is what the forward graph hands to the backward graph. It belongs to the region whose operation made it, or else
   to the checkpoint that reads it, as its input; bytes are those of the tensors of this call.
3. Rebuilt is what the backward graph computes under a name of the forward graph.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_remat.compile.marks import CHECKPOINT_MARK, REGION_MARK, SAVE_MARK, is_view
from torch_remat.diagnostics.describing import Bill
from torch_remat.diagnostics.explanation import (
    CheckpointExplanation,
    ExplainedTensor,
    RegionExplanation,
    ReplayExplanation,
)
from torch_remat.runtime.tensors import storages_of

__all__ = ["WatchedGraphs"]

_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_HELD = "a leaf, held by the caller at no cost"


class WatchedGraphs:
    """What graphs say of themselves when they run while this is watching."""

    def __init__(self, found: list[CheckpointExplanation], total: Bill) -> None:
        self._found = found
        self._total = total
        self.outside: list[ExplainedTensor] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compile what is compiled here, or was compiled before, so that it can be watched."""
        token = _watching.set(self)
        try:
            with torch.compiler.set_stance("default", force_backend=_backend):
                yield
        finally:
            _watching.reset(token)

    def note(self, graphs: _Graphs, arguments: Any, results: Any) -> None:
        """A forward graph has run."""
        if graphs.checkpoints:
            explained, outside = graphs.explain(arguments, results, self._total)
            self._found.extend(explained)
            self.outside.extend(outside)


_watching: ContextVar[WatchedGraphs | None] = ContextVar("torch_remat_watched_graphs", default=None)


def _backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """One backend for all that ever watch: what it compiles serves the next one, and holds nothing of this one."""
    from torch._dynamo.backends.common import aot_autograd

    partition, decompositions = _inductors()
    partitioned: list[tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        partitioned.append(partition(*args, **kwargs))
        return partitioned[-1]

    def compiled(forward: torch.fx.GraphModule, _: Any) -> Any:
        return _explaining(forward, partitioned.pop()[1]) if partitioned else _boxed(forward)

    return aot_autograd(
        fw_compiler=compiled,
        bw_compiler=lambda module, _: _boxed(module),
        inference_compiler=lambda module, _: _boxed(module),
        partition_fn=noted,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )(graph, inputs)


def _explaining(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    graphs = _Graphs(forward, backward)

    def run(*arguments: Any) -> Any:
        results = forward(*arguments)
        watching = _watching.get()
        if watching is not None:
            watching.note(graphs, arguments, results)
        return results

    return _boxed(run)


def _inductors() -> tuple[Callable[..., Any], Any]:
    """The partitioner of Inductor, and what it takes apart before; without Inductor, the partitioner alone."""
    try:
        from torch._inductor.compile_fx import partition_fn
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V
    except ImportError:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return min_cut_rematerialization_partition, {}

    def partition(*args: Any, **kwargs: Any) -> Any:
        with V.set_fake_mode(torch._guards.detect_fake_mode()):
            return partition_fn(*args, **kwargs)

    return partition, select_decomp_table()


def _boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        taken = list(arguments)
        arguments.clear()  # the graph owns what it is given
        return function(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Kept(NamedTuple):
    """What the forward graph hands to the backward graph."""

    node: torch.fx.Node
    value: Tensor
    is_input: bool  # of a checkpoint
    held: bool  # in memory of a leaf that the graph is called with: the caller has it


class _Graphs:
    """A forward and a backward graph."""

    def __init__(self, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> None:
        self._nodes = {node.name: node for node in forward.graph.nodes}
        (self._outputs,) = next(node for node in forward.graph.nodes if node.op == "output").args
        handed = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
        self._kept = [
            (position, node)
            for position, node in enumerate(self._outputs)
            if isinstance(node, torch.fx.Node) and (node.name in handed or _drawn_from(node) is not None)
        ]
        self._rebuilt = [
            node
            for node in backward.graph.nodes
            if node.op == "call_function" and node.name in self._nodes and not _makes_nothing(node)
        ]
        self.checkpoints = list(dict.fromkeys(filter(None, map(_checkpoint, self._nodes.values()))))

    def explain(
        self, arguments: Any, results: Any, total: Bill
    ) -> tuple[list[CheckpointExplanation], list[ExplainedTensor]]:
        """The checkpoints of the graph, and what it keeps outside of them."""
        leaves = [one for one in arguments if isinstance(one, Tensor) and one.grad_fn is None]
        held = {storage._cdata for leaf in leaves for storage in storages_of(leaf)}
        kept: dict[str | None, list[_Kept]] = {name: [] for name in self.checkpoints}
        kept[None] = []
        seen: set[str] = set()
        for position, node in self._kept:
            value = results[position]
            if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and node.name not in seen:
                seen.add(node.name)
                owner, is_input = self._owner(node)
                free = all(storage._cdata in held for storage in storages_of(value))
                kept[owner].append(_Kept(node, value, is_input, free))
        explained = [self._checkpoint(name, kept[name], total) for name in self.checkpoints]
        bill = Bill()
        return explained, [_row(one, bill, total) for one in kept[None]]

    def _owner(self, node: torch.fx.Node) -> tuple[str | None, bool]:
        """The checkpoint that keeps what ``node`` made, and whether as an input."""
        made_in = _checkpoint(_drawn_from(node) or node)
        if made_in is not None and _region(node) is not None:
            return made_in, False
        for user in node.users:
            reader = _checkpoint(user)
            if reader is not None and reader != made_in:
                return reader, True
        return made_in, False

    def _checkpoint(self, mark: str, kept: list[_Kept], total: Bill) -> CheckpointExplanation:
        bill = Bill()
        inputs = tuple(_row(one, bill, total) for one in kept if one.is_input)
        made = [node for node in self._nodes.values() if _checkpoint(node) == mark]
        names = list(dict.fromkeys(filter(None, map(_region, made))))
        saved = {_region(node) for node in made if SAVE_MARK in _marks(node)}
        again = [node for node in self._rebuilt if _checkpoint(node) == mark]
        regions = []
        for name in (*names, None):
            before = bill.total
            rows = tuple(_row(one, bill, total) for one in kept if not one.is_input and _region(one.node) == name)
            rebuilt = tuple(_rebuilt_row(node) for node in again if _region(node) == name)
            policy = "bare" if name is None else "save" if name in saved else "recompute"
            regions.append(RegionExplanation(name, policy, rows, rebuilt, (), bill.total - before))
        repeated = f"the backward graph repeats {len(again)} operations" if again else "none, nothing is recomputed"
        replay = ReplayExplanation(bool(again), False, None, None, f"{repeated}; compiled into one graph", ())
        rebuilt_bytes = sum(row.bytes for region in regions for row in region.rebuilt)
        name = mark.partition(":")[2] or None
        return CheckpointExplanation(
            name, inputs, tuple(regions[:-1]), regions[-1], (), replay, bill.total, rebuilt_bytes
        )


def _marks(node: torch.fx.Node) -> dict[str, Any]:
    return node.meta.get("custom") or {}


def _checkpoint(node: torch.fx.Node) -> str | None:
    return _marks(node).get(CHECKPOINT_MARK)


def _region(node: torch.fx.Node) -> str | None:
    return _marks(node).get(REGION_MARK)


def _drawn_from(node: torch.fx.Node) -> torch.fx.Node | None:
    """What is drawn, if ``node`` is the state of the generator before that: the backward graph draws it again."""
    if node.op != "call_function" or getattr(node.target, "__name__", "") != "getitem":
        return None
    source, index = node.args[:2]
    if index != 0 or not isinstance(source, torch.fx.Node) or "run_and_save_rng_state" not in str(source.target):
        return None
    return next((drawn for drawn in source.users if drawn.args[1] == 1), None)


def _makes_nothing(node: torch.fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), Tensor) or is_view(node.target)


def _operation(node: torch.fx.Node) -> str:
    if node.op == "placeholder":
        return "graph input"
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        source, index = node.args[:2]
        return f"{_operation(source)}[{index}]" if isinstance(source, torch.fx.Node) else node.name
    packet = getattr(node.target, "overloadpacket", node.target)
    return getattr(packet, "__name__", node.name)


def _line(node: torch.fx.Node) -> str:
    for path, number, name in reversed(_LINE.findall(node.meta.get("stack_trace") or "")):
        if "/torch_remat/" not in path and "/torch/" not in path:
            return f"{path}:{number} in {name}"
    return "an unknown line"


def _row(kept: _Kept, bill: Bill, total: Bill) -> ExplainedTensor:
    node, value = kept.node, kept.value
    meta = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    what = _operation(node)
    why = "read by the backward graph" if node.op == "placeholder" else f"made by code at {_line(node)}"
    if kept.held:
        return ExplainedTensor(what, *meta, 0, f"{why}; {'' if node.op == 'placeholder' else 'a view of '}{_HELD}")
    total.add(value, what)
    new, shared = bill.add(value, what)
    if shared is not None and not new:
        why += f"; in memory of {shared}"
    return ExplainedTensor(what, *meta, new, why)


def _rebuilt_row(node: torch.fx.Node) -> ExplainedTensor:
    value = node.meta["val"]
    shape = tuple(_hint(size) for size in value.shape)
    count = value.dtype.itemsize
    for size in shape:
        count *= size
    why = f"computed again, for code at {_line(node)}"
    return ExplainedTensor(_operation(node), shape, str(value.dtype).removeprefix("torch."), count, why)


def _hint(size: Any) -> int:
    """A size of this call; where the graph is for any length, the one it was traced with."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
