"""State hooks: what the user carries from forward to replay, and how it is restored without a trace.

A hook may write into tensors (``buffer.copy_(value)``). At the end of a replay they hold what they held before, so
their version counters are set back as well: what others saved of them is as good as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.runtime.generators import GeneratorHook
from torch_remat.runtime.tape import set_version, version_of
from torch_remat.runtime.tensors import storage_keys, written_by

__all__ = ["RecomputeStateHook", "Written", "as_restored", "carry_state", "restore", "restoring", "snapshots"]

restoring: ContextVar[bool] = ContextVar("torch_remat_restoring", default=False)
"""Whether a state hook runs: what it reads and writes is none of the body's doing."""


@runtime_checkable
class RecomputeStateHook(Protocol):
    """Carries state that lives outside the checkpoint's arguments from forward to replay.

    ``snapshot`` runs at entry of the checkpoint, after each SAVE region that ran, and before each replay (the outer
    state). ``restore`` runs in the thread that replays: with the entry snapshot at the start, with a region's exit
    snapshot where replay skips that region, and with the outer snapshot at the end, also when replay raises. Where the
    body changes state that it reads, forward restores the entry once to see whether the hook brings it back. A snapshot
    may be restored many times.
    """

    def snapshot(self) -> Any:
        """Return the present state."""
        ...

    def restore(self, state: Any) -> None:
        """Make ``state``, a result of :meth:`snapshot`, the present state."""
        ...


class Written(TorchDispatchMode):
    """Notes the tensors that are written to while it is active, and their version counters before."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled while we look."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            self._before.setdefault(id(tensor), (tensor, version_of(tensor)))
        return func(*args, **kwargs)

    def keys(self) -> set[int]:
        """The storages that were written to."""
        return {key for tensor, _ in self._before.values() for key in storage_keys(tensor)}

    def set_back(self, among: Written | None = None) -> None:
        """Give the tensors, or those that ``among`` has noted as well, the version counters that they had before."""
        for key, (tensor, version) in reversed(self._before.items()):  # a view and its base have one counter
            if among is None or key in among._before:
                set_version(tensor, version)


def carry_state(hooks: Iterable[RecomputeStateHook]) -> bool:
    """Whether one of the state hooks may restore something else than generators."""
    return any(type(hook) is not GeneratorHook for hook in hooks)


def snapshots(hooks: Iterable[RecomputeStateHook]) -> list[Any]:
    """The present state of each hook. What is read for it, the body does not read."""
    token = restoring.set(True)
    try:
        return [hook.snapshot() for hook in hooks]
    finally:
        restoring.reset(token)


def restore(states: Iterable[tuple[RecomputeStateHook, Any]]) -> Written | None:
    """Restore each hook's state; version counters stay. Returns what was written to, None where nothing can be."""
    pairs = list(states)
    if not carry_state([hook for hook, _ in pairs]):
        for hook, state in pairs:
            hook.restore(state)
        return None
    written = Written()
    token = restoring.set(True)
    try:
        with written:
            for hook, state in pairs:
                hook.restore(state)
    finally:
        restoring.reset(token)
        written.set_back()
    return written


@contextlib.contextmanager
def as_restored(hooks: tuple[RecomputeStateHook, ...], states: list[Any]) -> Iterator[set[int]]:
    """With the hooks set to ``states``, as a replay sets them; yields the storages that this wrote to.

    Afterwards they are as before.
    """
    now = [(hook, hook.snapshot()) for hook in hooks]
    try:
        written = restore(zip(hooks, states, strict=True))
        yield set() if written is None else written.keys()
    finally:
        restore(now)
