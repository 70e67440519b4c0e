"""The second run of a body, inside backward: fills the slots that are alive and stops when all are.

Rules:
 1. The body runs as in forward, under a :class:`~torch_remat.runtime.replay_frame.ReplayFrame`, with the state hooks
    set to the entry of the checkpoint.
 2. Replay ends at the last living slot, unless the plan needs the tail.
 3. Nothing is consumed: inputs, records and states stay on the tape until backward releases it, so a failed replay can
    be retried; what it had filled is emptied.
 4. Random generators that no state hook carries must not move.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from torch_remat.errors import RandomStateError, RematError, display_name
from torch_remat.runtime import externals, placeholder
from torch_remat.runtime.captured import bound
from torch_remat.runtime.compiled_code import pinned
from torch_remat.runtime.dynamo import live
from torch_remat.runtime.frame import current_frame, scopes
from torch_remat.runtime.generators import (
    DrawWatch,
    GeneratorGuard,
    covered,
    random_message,
    shared_with_threads,
)
from torch_remat.runtime.handed_on import Reads
from torch_remat.runtime.hooks import pop_hooks, push_hooks
from torch_remat.runtime.observe import Observer
from torch_remat.runtime.placeholder import Origin
from torch_remat.runtime.plan import path_of, registry
from torch_remat.runtime.replay_frame import CheckedReplayFrame, ReplayFrame, Stop, stand_in, taken
from torch_remat.runtime.rerun import plan_rerun
from torch_remat.runtime.state import SameOperations, restored, with_torch_functions
from torch_remat.runtime.state_hooks import restore
from torch_remat.runtime.tape import OutputKind, Tape, version_of
from torch_remat.runtime.tree import unflatten

__all__ = ["replay"]

_NOTHING = contextlib.nullcontext()


def replay(tape: Tape, unfilled: int) -> None:
    """Run the body of ``tape`` again and fill its living slots, of which ``unfilled`` are empty."""
    tape.replays += 1
    while True:
        try:
            with _NOTHING if tape.codes is None else pinned(tape.codes):
                return _replay(tape, unfilled)
        except placeholder.PlaceholderError as error:
            if not plan_rerun(tape, error):
                raise
            tape.empty_slots()
            unfilled = tape.unfilled()


def _replay(tape: Tape, unfilled: int) -> None:
    frame = (ReplayFrame if tape.check is None else CheckedReplayFrame)(tape, unfilled)
    function, objects = _as_captured(tape)
    if tape.root is not None:
        tape.root.function, tape.root.arguments = function, objects
    with with_torch_functions(tape.ambient):
        args, kwargs = _inputs(tape, frame, objects)
    guard = GeneratorGuard()
    outer = [hook.snapshot() for hook in tape.hooks]
    trained = [one.restore() for one in tape.trained]
    at_start = None
    try:
        at_start = restore(zip(tape.hooks, tape.states, strict=True)) if tape.hooks else None
        if tape.root is not None and (not tape.fits or tape.suspects):
            before = externals.Before(tape.root)
            with _ReplayObserver(tape, frame) as watch:
                _run(frame, tape, function, args, kwargs)
            watch.check_replay(before.replaced())
        elif tape.handed_on is not None:
            draws = DrawWatch(functools.partial(_check_draw, tape, frame)) if tape.watch_draws else _NOTHING
            with Reads(tape) as reads, draws:
                _run(frame, tape, function, args, kwargs)
            reads.check(len(frame.names))
        elif tape.watch_draws:
            with DrawWatch(functools.partial(_check_draw, tape, frame)):
                _run(frame, tape, function, args, kwargs)
        else:
            _run(frame, tape, function, args, kwargs)
    except placeholder.PlaceholderError as error:
        if tape.key is not None and tape.fits:  # a path that no plan fits is waited for already
            known = registry.known(tape.key)
            if error.region is None or error.leaf is None:
                known.stay_observed()
            else:
                known.teach(path_of(tape.order, len(tape.slots)), error.region, error.leaf)
        _put_back(guard, tape)
        raise
    except BaseException as error:
        _put_back(guard, tape)
        if isinstance(error, RuntimeError) and "Cannot access data pointer" in str(error):
            registry.known(tape.key).stay_observed()
            raise placeholder.unseen(_where(tape, frame)) from error
        if not isinstance(error, RematError):
            error.add_note(f"torch_remat: raised {_where(tape, frame)}.")
        raise
    finally:
        unmodified = _unmodified(tape) if tape.hooks else []
        frame.undo()
        for one in trained:
            one.restore()
        at_end = restore(zip(tape.hooks, outer, strict=True)) if tape.hooks else None
        if at_start is not None:  # what they hold, they held when replay began
            at_start.set_back(among=at_end)
        for slot in unmodified:
            slot.version = version_of(slot.tensor)
    moved = guard.moved()
    if moved is not None:
        _judge(tape, frame, guard, moved)
    if tape.changes:
        watched = {one.name for one in tape.suspects}
        lost = externals.overwritten(tape.externals, replaced=False, updated=False)
        lost = [one for one in lost if one.then is not None or one.name not in watched]
        if lost:
            registry.known(tape.key).stay_observed()
            raise externals.changed_again(tape.name, lost[0].name)
    if tape.check is not None:
        tape.check.compare(tape)


class _ReplayObserver(Observer):
    """Looks at the replay of a path that was not observed in forward."""

    def __init__(self, tape: Tape, frame: ReplayFrame) -> None:
        super().__init__(tape)
        self._frame = frame

    def _drawn(self, operation: str, generator: torch.Generator) -> None:
        self._frame.drew = True
        super()._drawn(operation, generator)


def _unmodified(tape: Tape) -> list[Any]:
    """The filled slots that replay itself has not modified since; what state hooks write from here on is theirs."""
    return [slot for slot in tape.living_slots() if slot.tensor is not None and version_of(slot.tensor) == slot.version]


def _judge(tape: Tape, frame: ReplayFrame, guard: GeneratorGuard, moved: torch.Generator) -> None:
    """A default generator is not where it was before replay: refuse, unless another thread may have drawn from it.

    Then the next replay of this body is watched, operation by operation, which tells.
    """
    if not shared_with_threads(moved):
        guard.put_back()
    elif tape.fits and not tape.watch_draws:
        registry.known(tape.key).suspect = True
        return
    elif not frame.drew:
        return
    raise RandomStateError(random_message(tape.name, "seen in replay", moved))


def _check_draw(tape: Tape, frame: ReplayFrame, operation: str, generator: torch.Generator) -> None:
    frame.drew = True
    if covered(tape.hooks, generator) is False:
        raise RandomStateError(random_message(tape.name, f"{operation} at {placeholder.user_line()}", generator))


def _where(tape: Tape, frame: ReplayFrame) -> str:
    """For errors that are not ours: user code, or a collective that another rank did not join."""
    entered = len(frame.names)
    where = "at its start"
    if 0 < entered <= len(tape.order):
        where = f"after it entered region {tape.order[entered - 1].name}"
    return f"while replaying checkpoint {display_name(tape.name)}, {where}"


def _put_back(guard: GeneratorGuard, tape: Tape) -> None:
    """After a failed replay without hooks the generators are as before."""
    moved = None if tape.hooks else guard.moved()
    if moved is not None and not shared_with_threads(moved):
        guard.put_back()


def _run(frame: ReplayFrame, tape: Tape, function: Any, args: Any, kwargs: Any) -> None:
    token = current_frame.set(frame)
    outer = live.phase
    live.phase = frame.phase
    scope_token = scopes.set(tape.scopes)
    try:
        with restored(tape.ambient):
            push_hooks(frame.pack, taken)
            try:
                if tape.under_mode and not torch._C._len_torch_dispatch_stack():
                    with SameOperations():
                        function(*args, **kwargs)
                else:
                    function(*args, **kwargs)
            finally:
                pop_hooks()
        frame.finished()
    except Stop:
        pass
    except Exception as error:
        if not frame.done:
            if frame.refused is not None and error is not frame.refused:
                raise frame.refused from error
            raise
    finally:
        frame.close()
        scopes.reset(scope_token)
        live.phase = outer
        current_frame.reset(token)


def _as_captured(tape: Tape) -> tuple[Any, list[Any]]:
    """The body's function and the objects among its arguments, whose variables hold what they held in forward."""
    objects = externals.objects(tape)
    if tape.captured is None:
        return tape.function, objects
    own, arguments = tape.captured
    for index, captured in arguments.items():
        objects[index] = bound(objects[index], captured)
    return tape.function if own is None else bound(tape.function, own), objects


def _inputs(tape: Tape, frame: ReplayFrame, objects: list[Any]) -> Any:
    """The arguments for replay: the same leaves and ``objects``, fresh aliases of other tensors, in new containers."""
    for seen in tape.externals if tape.fits else ():
        name = seen.changed()
        if name is not None:
            raise externals.changed(tape.name, name)
    leaves: list[Any] = []
    for index, output in enumerate(tape.inputs):
        if output.kind is OutputKind.OBJECT:
            leaves.append(objects[index])
        elif output.kind is OutputKind.PLACEHOLDER:
            origin = Origin(display_name(tape.name), f"input {index}")
            leaves.append(stand_in(output.meta, origin))
        elif output.kind is OutputKind.REPEAT:
            leaves.append(leaves[output.data])
        else:
            leaves.append(frame.data(output, f"input {index}"))
        if output.attributes is not None:
            leaves[-1].__dict__.update(output.attributes)
    return unflatten(tape.spec, leaves)
