"""``verify_replay``: run a forward and every replay of it, and compare all values, without a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec

from torch import Tensor

from torch_remat.checkpoint import Checkpointed
from torch_remat.diagnostics.graph import nodes_of
from torch_remat.diagnostics.report import Report, count_of
from torch_remat.diagnostics.roots import Root, as_body, check_call, in_eager_code, may_compile
from torch_remat.errors import ValuesDriftError, display_name
from torch_remat.runtime.bitwise import BitwiseCheck, Difference, drift_message
from torch_remat.runtime.forward import ForwardFrame
from torch_remat.runtime.replay import replay
from torch_remat.runtime.tape import Tape

__all__ = ["CheckedCheckpoint", "ReplayReport", "verify_replay"]

P = ParamSpec("P")


@dataclass(frozen=True)
class CheckedCheckpoint(Report):
    """One checkpoint: how many tensors of its replay were compared with forward's, and those that differ."""

    name: str
    compared: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class ReplayReport(Report):
    """What :func:`verify_replay` found, in the order of the forward."""

    checkpoints: tuple[CheckedCheckpoint, ...]

    @property
    def compared(self) -> int:
        """How many tensors were compared."""
        return sum(one.compared for one in self.checkpoints)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, in the order of forward."""
        return tuple(difference for one in self.checkpoints for difference in one.differences)

    def format(self) -> str:
        """A line for each checkpoint, and what differs."""
        total = len(self.differences)
        text = [
            f"{count_of(self.compared, 'tensor')} of {count_of(len(self.checkpoints), 'checkpoint')} compared, "
            + (f"{total} differ" if total else "all bits equal")
        ]
        for one in self.checkpoints:
            text.append(f"{one.name}: {one.compared} compared, {len(one.differences)} differ")
            for difference in one.differences:
                first, *rest = difference.lines()
                text += [f"  {first}", *(f"    {line}" for line in rest)]
        return "\n".join(text)


def verify_replay(function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> ReplayReport:
    """Run ``function``, replay each of its checkpoints, and require that replay computes the very bits of forward.

    Compared is every tensor that replay makes for backward and every one it is given. No backward runs and no gradient
    changes.

    Args:
        function: a checkpointed function; one that runs checkpoints (a whole model); or one that runs none, which then
            runs once more, as the body of a checkpoint. Checkpoints that are part of a graph of ``torch.compile`` have
            no replay: in a process that compiles, a function that is no checkpoint itself runs once more, as eager
            code, and that run is compared where it meets more checkpoints.
        *args: what it is called with. Something must require a gradient, as in training.
        **kwargs: the same.

    Returns:
        What was compared, by checkpoint; nothing in it differs.

    Both values of each tensor are kept until its checkpoint has been compared: this needs about the memory of the model
    without checkpointing, twice.

    Raises:
        ValuesDriftError: some value differs. The message has the first; ``error.report`` has them all.
        ReplayError: a replay fails in another way, as it would in backward.
        RuntimeError: called inside a checkpoint, or nothing that the function returns requires a gradient.
        TypeError: ``function`` is not callable.
    """
    check_call(function, "verify_replay")
    root = _Root()
    outputs = root.run(function, args, kwargs)
    setting: AbstractContextManager[Any] = nullcontext()
    if not isinstance(function, Checkpointed) and may_compile(function):
        eager = _Root()
        with in_eager_code():
            eager_outputs = eager.run(function, args, kwargs)
        if len(eager.tapes) > len(root.tapes):  # some are part of graphs, which have no replay
            root, outputs, setting = eager, eager_outputs, in_eager_code()
    if not root.tapes:
        outputs = root.run(as_body(function), args, kwargs)
    with setting:
        compared = [_compared(tape(), check, name, outputs) for tape, check, name in root.last()]
    report = ReplayReport(tuple(reversed(compared)))
    if report.differences:
        count = len(report.differences)
        error = ValuesDriftError(drift_message(report.differences[0], count, report.compared))
        error.report = report
        raise error
    return report


class _Root(Root):
    """Active around the call: checkpoints under it are compared ones."""

    def __init__(self) -> None:
        super().__init__(self._forward)
        self.tapes: list[tuple[weakref.ref[Tape], BitwiseCheck, str | None]] = []

    def _forward(self, tape: Tape, key: Any, leaves: list[Any], *rest: Any) -> ForwardFrame:
        tape.check = BitwiseCheck(tape, leaves, keep_values=True)
        self.tapes.append((weakref.ref(tape), tape.check, tape.name))
        return ForwardFrame(tape, key, leaves, *rest)

    def last(self) -> list[tuple[weakref.ref[Tape], BitwiseCheck, str | None]]:
        """The checkpoints that ran, the last one first, as backward meets them. Hands over their checks."""
        found = self.tapes[::-1]
        self.tapes = []
        return found


def _compared(tape: Tape | None, check: BitwiseCheck, name: str | None, outputs: list[Any]) -> CheckedCheckpoint:
    if tape is not None:
        check.roots = tuple(nodes_of(one for one in outputs if isinstance(one, Tensor)))
        with tape.lock:
            unfilled = tape.unfilled()
            try:
                if unfilled:
                    replay(tape, unfilled)
            finally:
                tape.empty_slots()
                check.roots = ()
    check.forget()
    return CheckedCheckpoint(display_name(name), check.compared, tuple(check.differences or ()))
