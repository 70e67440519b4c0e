"""``explain``: what a checkpoint keeps and why, from one observed run of its body."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from torch_remat.checkpoint import Checkpointed, checkpoint
from torch_remat.diagnostics.compiled import WatchedGraphs
from torch_remat.diagnostics.describing import Bill, Describer
from torch_remat.diagnostics.explanation import CheckpointExplanation, Explanation
from torch_remat.diagnostics.watching import Generators, RunsCheckpoints, Watching, WatchingRoot
from torch_remat.errors import InvalidTypeError, UsageError
from torch_remat.runtime.forward import ForwardFrame
from torch_remat.runtime.frame import current_frame
from torch_remat.runtime.plan import Plan

__all__ = ["explain"]

P = ParamSpec("P")


def explain(function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
    """Run a checkpointed function once and say what it keeps, what replay rebuilds, and why.

    ``print(remat.explain(remat.checkpoint(region_name="layers.0")(block), x))`` prints, for each region, its policy,
    what is kept with bytes and the line that reads it, what is rebuilt, where placeholders stand, and where replay
    stops. ``as_dict()`` and ``to_json()`` of the result are the same as data.

    Args:
        function: a checkpointed function; a function or module that runs checkpoints (a whole model), each of which is
            explained; or one that runs none, which is explained as the body of a checkpoint. Where ``torch.compile``
            makes checkpoints part of a graph, what is kept is read off the graphs, partitioned as Inductor does.
        *args: what it is called with. What requires a gradient here decides what is kept, as in training.
        **kwargs: the same.

    Returns:
        One :class:`CheckpointExplanation` for each checkpoint that ran.

    The forward really runs, with gradients enabled: its side effects and collectives happen. Afterwards the random
    generators are where they were, no gradient has changed, nothing is kept alive, and later calls of the checkpoint do
    what they would have done without. A function that is no checkpoint may run a second time: what it does before its
    first checkpoint, or, in a process that compiles, all of one that runs none.

    Raises:
        RuntimeError: called inside a checkpoint; or what the call itself raises where no replay can reproduce the body.
            Random operations without a state hook are reported, not raised.
        TypeError: ``function`` is not callable.
    """
    if not callable(function):
        raise InvalidTypeError(
            f"explain expects a function, got {type(function).__name__}. To fix: explain(fn, *args)."
        )
    if current_frame.get() is not None:
        raise UsageError(
            "explain() was called inside a checkpoint, which would be explained as a part of it. "
            "To fix: call it outside, with the checkpointed function and its arguments."
        )
    generators = Generators()
    try:
        if isinstance(function, Checkpointed):
            return _explained(function, args, kwargs, generators)
        if _may_compile(function):
            explanation = _with_graphs(function, args, kwargs, generators)
            if explanation.checkpoints:
                return explanation
            generators.put_back()
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            return _explained(checkpoint(region_name=name)(function), args, kwargs, generators, body=True)
        except RunsCheckpoints:
            generators.put_back()
        return _explained(function, args, kwargs, generators)
    finally:
        generators.put_back()


def _may_compile(function: Any) -> bool:
    """Whether something may be compiled in there: anything has been given to ``torch.compile`` in this process.

    That Dynamo is imported says nothing: every dispatch mode does that, those of observed checkpoints, too.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", {None: True})  # of compiled functions, and None as soon as imported
    return hasattr(function, "_torchdynamo_orig_callable") or any(one is not None for one in backends.values())


def _with_graphs(function: Any, args: Any, kwargs: Any, generators: Generators) -> Explanation:
    """Explain a function that may be compiled: it tells only when it runs whether there are checkpoints in it."""
    try:
        return _explained(function, args, kwargs, generators, graphs=True)
    except torch._dynamo.exc.Unsupported:
        generators.put_back()
    return _explained(function, args, kwargs, generators, graphs=True, may_break=True)


def _explained(
    function: Any,
    args: Any,
    kwargs: Any,
    generators: Generators,
    *,
    body: bool = False,
    graphs: bool = False,
    may_break: bool = False,
) -> Explanation:
    found: list[CheckpointExplanation] = []
    bill = Bill()
    watched = WatchedGraphs(found, bill)

    def describe(frame: ForwardFrame, observer: Watching, plan: Plan) -> None:
        found.append(Describer(frame, observer, plan, bill).checkpoint())

    with watched.watching(may_break=may_break) if graphs else contextlib.nullcontext():
        WatchingRoot(generators, describe, takes_checkpoints=not body).run(function, args, kwargs)
    outside = tuple(watched.outside)
    return Explanation(tuple(found), bill.total - sum(row.bytes for row in outside), outside)
