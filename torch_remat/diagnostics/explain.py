"""``explain``: what a checkpoint keeps and why, from one observed run of its body."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ParamSpec

from torch_remat.checkpoint import Checkpointed, checkpoint
from torch_remat.diagnostics.compiled import WatchedGraphs
from torch_remat.diagnostics.describing import Bill, Describer
from torch_remat.diagnostics.explanation import CheckpointExplanation, Explanation
from torch_remat.diagnostics.roots import may_compile
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
        if may_compile(function):
            explanation = _explained(function, args, kwargs, generators, graphs=True)
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


def _explained(
    function: Any,
    args: Any,
    kwargs: Any,
    generators: Generators,
    *,
    body: bool = False,
    graphs: bool = False,
) -> Explanation:
    found: list[CheckpointExplanation] = []
    bill = Bill()
    watched = WatchedGraphs(found, bill)

    def describe(frame: ForwardFrame, observer: Watching, plan: Plan) -> None:
        found.append(Describer(frame, observer, plan, bill).checkpoint())

    with watched.watching() if graphs else contextlib.nullcontext():
        WatchingRoot(generators, describe, takes_checkpoints=not body).run(function, args, kwargs)
    outside = tuple(watched.outside)
    return Explanation(tuple(found), bill.total - sum(row.bytes for row in outside), outside)
