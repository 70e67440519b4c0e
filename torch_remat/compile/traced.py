"""What Dynamo traces where a checkpoint or a region is called.

A checkpoint becomes torch's non-reentrant checkpoint in the graph, and what a SAVE region computes is marked for the
partitioner. What cannot be in a graph breaks it, and runs eagerly; with ``fullgraph=True`` that is Dynamo's error, and
it says our reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import traceback
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torch_remat.compile import trace
from torch_remat.compile.marks import CHECKPOINT_MARK, REGION_MARK, SAVE_MARK, contexts
from torch_remat.errors import DuplicateNameError
from torch_remat.runtime.dynamo import eager_only, live
from torch_remat.runtime.frame import current_frame
from torch_remat.runtime.generators import GeneratorHook

__all__ = ["traced_checkpoint", "traced_declaration", "traced_region"]


def traced_checkpoint(call: Any, options: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """A call of a checkpoint in code that is traced; ``call`` is what runs one eagerly."""
    where = trace.around()
    given = options.named[1]
    name = trace.unguarded("given") or given
    if where in (trace.NOWHERE, trace.UNKNOWN) and _in_eager_checkpoint():
        inline = trace.one_graph()
        return function(*args, **kwargs) if inline else _joins_eagerly(call, options, function, args, kwargs)
    if where == trace.INERT:
        return function(*args, **kwargs)
    if where == trace.UNKNOWN:
        return _with_this_build(call, options, function, args, kwargs)
    if options.pair is not None:
        return _with_pair(call, options, function, args, kwargs)
    if options.bitwise:
        return _with_bitwise_check(call, options, function, args, kwargs)
    for hook in options.hooks:
        if not isinstance(hook, GeneratorHook):
            return _with_state_hooks(call, options, function, args, kwargs)
    if where == trace.RECOMPUTED:
        scope = trace.enter_scope(trace.inner_name(name))
        try:
            return function(*args, **kwargs)
        finally:
            trace.leave_scope(scope)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch._C._len_torch_function_stack():
        return _with_function_mode(call, options, function, args, kwargs)

    mark = trace.numbered(name)

    def body() -> Any:
        trace.begin(name)
        with traceback.annotate({CHECKPOINT_MARK: mark}):
            return function(*args, **kwargs)

    return torch_checkpoint(body, use_reentrant=False, context_fn=contexts)


def traced_region(function: Any, name: str, recompute: bool, args: Any, kwargs: Any, *, counted: bool = False) -> Any:
    """A call of a region in code that is traced; ``counted`` names are told apart where a body has them again."""
    where = trace.around()
    known = trace.unguarded("name") or name
    if where in (trace.NOWHERE, trace.UNKNOWN):
        if not _in_eager_checkpoint():
            return function(*args, **kwargs)
        problem = None if counted else trace.claim_beside(known)
        if problem is not None:
            raise DuplicateNameError(problem)
        if recompute or trace.cannot_break(known):
            return function(*args, **kwargs)
        return _leaves_the_graph(function, name, counted, args, kwargs)
    if where == trace.INERT:
        return function(*args, **kwargs)
    if counted:
        known = trace.free_name(known)
    problem = trace.claim(known)
    if problem is not None:
        raise DuplicateNameError(problem)
    scoped_name = trace.scoped(known)
    if recompute:
        with traceback.annotate({REGION_MARK: scoped_name}):
            return function(*args, **kwargs)
    full_name = trace.enter_save(known)
    try:
        with traceback.annotate({REGION_MARK: scoped_name, SAVE_MARK: full_name}):
            return function(*args, **kwargs)
    finally:
        trace.leave_save()


def traced_declaration(declare: Any, tensors: Any) -> None:
    """A declaration in code that is traced; ``declare`` makes one eagerly. In a graph the partitioner finds readers."""
    if trace.around() in (trace.NOWHERE, trace.UNKNOWN) and _in_eager_checkpoint() and not trace.one_graph():
        _declares_eagerly(declare, tensors)


def _in_eager_checkpoint() -> bool:
    """Whether recomputed code of an eager checkpoint has called the code that is traced; Dynamo guards the answer."""
    phase = live.phase
    return phase is not None and phase.inside


# --- Where the graph breaks


def _breaks(reason: str) -> Any:
    """A function that runs a checkpoint eagerly, outside the graph; with ``fullgraph=True`` Dynamo says ``reason``."""

    def eagerly(call: Any, options: Any, function: Any, args: Any, kwargs: Any) -> Any:
        return call(options, function, args, kwargs)

    return eager_only(reason)(eagerly)


_with_this_build = _breaks(
    "this build of torch does not tell torch_remat what is being traced: checkpoints stay out of graphs."
)

_with_pair = _breaks(
    "checkpoint(saved_tensors_hooks=...) is not supported inside one graph of torch.compile: the compiler decides what "
    "is saved. To fix: leave the option out, enter remat.saved_tensors_hooks around the compiled function, or compile "
    "without fullgraph=True."
)

_with_state_hooks = _breaks(
    "checkpoint(recompute_state_hooks=...) with hooks other than remat.GeneratorHook is not supported inside one graph "
    "of torch.compile: the compiler replays operations, not Python. To fix: leave the option out where replayed code "
    "reads no such state, or compile without fullgraph=True."
)

_with_bitwise_check = _breaks(
    'checkpoint(determinism_check="bitwise") is not supported inside one graph of torch.compile: nothing there is at '
    'hand to compare. To fix: determinism_check="default", or compile without fullgraph=True.'
)

_with_function_mode = _breaks(
    "a checkpoint inside a torch function mode (torch.device(...) as a context, torch.set_default_device) is not "
    "supported inside one graph of torch.compile: torch leaves the mode out of checkpoints. To fix: enter the mode in "
    "eager code only (name the device where tensors are made), or compile without fullgraph=True."
)

_joins_eagerly = _breaks(
    "a torch_remat.checkpoint called by a compiled part of another one that is not compiled. "
    "To fix: compile around the outer checkpoint, or compile without fullgraph=True."
)


@eager_only("recompute_needs_tensor in a compiled part of a checkpoint that is not compiled runs outside the graph.")
def _declares_eagerly(declare: Any, tensors: Any) -> None:
    declare(tensors)


@eager_only(
    "a SAVE region in a compiled part of a checkpoint that is not compiled runs outside the graph, where it is not "
    "recomputed. To fix: compile around the checkpoint."
)
def _leaves_the_graph(function: Any, name: str, counted: bool, args: Any, kwargs: Any) -> Any:
    frame = current_frame.get()
    if frame is None:
        return function(*args, **kwargs)
    return frame.call_region(function, frame.free_name(name) if counted else name, False, args, kwargs)
