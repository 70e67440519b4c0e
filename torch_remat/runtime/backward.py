"""The unpack side: a node asks for a slot, the block is replayed once, tensors are handed out and let go.

Rules:
 1. Replay starts in a pre-hook of each output's autograd node, before the block's first backward node, and lazily at
    the first unpack for every other way into the graph.
 2. Without ``retain_graph`` a filled slot lives as long as its node: autograd releases the node right after it ran, and
    the tensor with it. When every living slot is filled nothing can ask for a second replay, and the tape is released.
 3. With ``retain_graph`` a node stays. If the running graph task does all of the block's work, each tensor is let go at
    its last use, and the next backward replays again. If it leaves part of the work undone (the input half of a split
    backward), the slots stay filled for the rest, and the tape is released.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from torch_remat.errors import InternalError, ModifiedError, display_name
from torch_remat.runtime import events
from torch_remat.runtime.hooks import HookPair, call_unpack
from torch_remat.runtime.labels import label, profiling
from torch_remat.runtime.replay import replay
from torch_remat.runtime.tape import Kept, Packed, Slot, Tape, version_of

__all__ = ["Trigger", "unpacker"]

_NOTHING = contextlib.nullcontext()
_engine = torch._C._autograd
_graph_task_id = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_keep_graph = getattr(_engine, "_get_current_graph_task_keep_graph", None)
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)


class Trigger:
    """Pre-hook of an output's autograd node (rule 1). Holds no tape: a held output keeps nothing alive."""

    __slots__ = ("_tape", "spans")

    def __init__(self, tape: Tape) -> None:
        self._tape = weakref.ref(tape)
        self.spans = tape.spans

    def __call__(self, grads: Any) -> None:
        """Replay, unless nothing is left to fill."""
        if events.output_reached.listeners:
            events.output_reached()
        tape = self._tape()
        if tape is not None and not tape.released:
            if events.backward_reached.listeners:
                events.backward_reached(tape)
            _ensure_filled(tape)


def unpacker(tape: Tape) -> Any:
    """The unpack hook of a checkpoint. It owns the tape on behalf of the autograd graph."""

    def unpack(payload: Any) -> Tensor:
        if type(payload) is not Slot:
            return _resident(payload, tape)
        tensor = payload.tensor
        if tensor is None:
            if events.backward_reached.listeners:
                events.backward_reached(tape)
            _ensure_filled(tape)
            tensor = payload.tensor
            if tensor is None:
                raise InternalError(f"replay of {display_name(tape.name)} left a slot empty")
        if payload.is_modified():
            raise _modified_save(tape, tensor)
        if not tape.released:
            _account(tape, payload)
        return tensor

    return unpack


def _modified_save(tape: Tape, tensor: Tensor) -> ModifiedError:
    return ModifiedError(
        f"One of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} tensor that checkpoint "
        f"{display_name(tape.name)} saved "
        f"is not at the version at which it was saved.\n"
        f"To fix: do not modify it between its use and backward, or use a .clone()."
    )


def _account(tape: Tape, slot: Slot) -> None:
    """A tensor of a tape that may be replayed again was handed out: see that it goes at its last use (rule 3)."""
    if _graph_task_id() == -1:
        slot.tensor = None
    elif not _leaves_filled(tape):
        _of_thread.handed.add(slot)


def _resident(payload: Any, tape: Tape) -> Tensor:
    """A save that stayed, or that a user's pair packed."""
    if type(payload) is Kept:
        if version_of(payload.tensor) != payload.version:
            raise _modified(payload, tape)
        return payload.tensor
    if type(payload) is Packed:
        if payload.probe is not None and payload.probe._version != payload.version:
            raise _modified(payload, tape)
        if payload.ready is not None:
            tensor, payload.ready = payload.ready, None
            return tensor
        return call_unpack(
            HookPair(_no_pack, payload.unpack), payload.payload, f"a saved tensor of region {payload.label[1]}"
        )
    raise InternalError(f"unknown payload {type(payload).__name__}")


def _no_pack(tensor: Tensor) -> Any:
    raise InternalError("pack of an unpack-only pair")


def _modified(payload: Any, tape: Tape) -> ModifiedError:
    checkpoint, region, index = payload.label
    name = _name_of(payload, tape) or f"saved.{index}"
    what = f"Saved tensor {name} for {display_name(checkpoint, region)}"
    if region is None:
        what = f"A parameter that checkpoint {display_name(checkpoint)} reads"
    return ModifiedError(
        f"{what} was modified in-place after it was saved for backward.\n"
        f"To fix: do not modify it between its use and backward, or use a .clone()."
    )


def _name_of(payload: Any, tape: Tape) -> str | None:
    """What ``save_for_backward`` called a save of the running node."""
    node = _current_node()
    number = -1 if node is None else node._sequence_nr()
    names = next((found for span in tape.spans.items if (found := (span.names or {}).get(number))), ())
    saves = getattr(node, "_raw_saved_tensors", ()) if names else ()
    return next((name for name, saved in zip(names, saves, strict=False) if saved.data is payload), None)


def _ensure_filled(tape: Tape) -> None:
    with tape.lock:
        unfilled = 0 if tape.released else tape.unfilled()
        if not unfilled:
            return
        if events.replay_started.listeners:
            events.replay_started(tape)
        try:
            with label(f"torch_remat.replay: {display_name(tape.name)}") if profiling() else _NOTHING:
                replay(tape, unfilled)
        except BaseException as error:
            tape.empty_slots()  # what the failed replay filled may be wrong, and can be made again
            if events.replay_ended.listeners:
                events.replay_ended(tape, error)
            raise
        if events.replay_ended.listeners:
            events.replay_ended(tape, None)
        if tape.complete and _graph_task_id() != -1 and _leaves_filled(tape):
            tape.release()


def _leaves_filled(tape: Tape) -> bool:
    """Whether the running graph task leaves the slots of ``tape`` filled (rules 2 and 3). Decided once per task."""
    task = _graph_task_id()
    if tape.task[0] != task:
        tape.task = (task, not _keeps_graph() or _leaves_work(tape))
    return tape.task[1]


def _keeps_graph() -> bool:
    """Whether nodes outlive this graph task. Where torch cannot tell, as if not: slots stay with their nodes."""
    return _keep_graph is not None and _keep_graph()


def _leaves_work(tape: Tape) -> bool:
    """Whether some node of the block, or some edge out of it, will not run in this graph task."""
    node = _current_node()
    if _will_execute is None or node is None:
        return False
    seen: set[Any] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        try:
            if not _will_execute(node):
                return True
        except RuntimeError:
            continue  # a leaf whose gradient autograd.grad captures: that work is done
        if number >= tape.first_sequence_nr:  # a leaf ends here: it has nothing behind it
            pending.extend(edge for edge, _ in node.next_functions if edge is not None)
    return False


class _Handed:
    """Slots whose tensors the present node has been given; they are let go when another node asks, or the task ends.

    A node may read its saved tensors more than once, so the first read cannot be the last use. Nothing is held: the end
    of a task that fails is not told.
    """

    def __init__(self) -> None:
        self._task = -1
        self._node = -1  # its number; another node of the same one only means that slots are let go later
        self._slots: list[weakref.ref[Slot]] = []

    def add(self, slot: Slot) -> None:
        task = _graph_task_id()
        node = _current_node()
        number = -1 if node is None else node._sequence_nr()
        if task != self._task:
            self.let_go()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.let_go)
        elif number != self._node:
            self._drop()
        self._node = number
        self._slots.append(weakref.ref(slot))

    def let_go(self) -> None:
        """Empty what was handed out."""
        self._drop()
        self._task = self._node = -1

    def _drop(self) -> None:
        for reference in self._slots:
            slot = reference()
            if slot is not None:
                slot.tensor = None
        self._slots.clear()


class _OfThread(threading.local):
    """Each thread hands out on its own. The end of a task may be told in another one: the state itself is no local."""

    def __init__(self) -> None:
        self.handed = _Handed()


_of_thread = _OfThread()
