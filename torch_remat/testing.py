"""Helpers to test code that checkpoints: count collectives and runs, measure what is kept, compare bits.

They change no number and no order of operations. Counts carry the **phase** in which something ran:
``"forward"``, ``"replay"`` (a body run again by this library) or ``"backward"`` (anything else inside a
backward; another library's recomputation counts here).

>>> with CountCollectives() as collectives:
...     model(x).sum().backward()
>>> collectives.count("all_gather"), collectives.counts("replay")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from torch_remat.errors import InvalidTypeError
from torch_remat.runtime.frame import is_recomputing
from torch_remat.runtime.placeholder import is_placeholder

__all__ = [
    "Collective",
    "CountCollectives",
    "CountRuns",
    "KeptBytes",
    "Phase",
    "assert_same_bits",
    "assert_same_gradients",
    "differences",
    "phase",
]

P = ParamSpec("P")
R = TypeVar("R")

Phase = Literal["forward", "replay", "backward"]

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "monitoredbarrier": "barrier",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "isend": "send",
    "send": "send",
    "irecv": "recv",
    "recv": "recv",
    "waittensor": "wait",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}


def phase() -> Phase:
    """Where the code asking runs: in forward, in a replay, or elsewhere in backward."""
    if is_recomputing():
        return "replay"
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


# ------------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that was issued: its kind, the phase, and the operation as the dispatcher names it."""

    kind: str
    phase: Phase
    operation: str


class CountCollectives(TorchDispatchMode):
    """Records every collective issued inside the ``with`` block, by kind, in the order in which it is issued.

    Kinds: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``reduce``,
    ``gather``, ``scatter``, ``send``, ``recv``, ``barrier``. Waiting for a functional collective is no
    collective; see :attr:`waits`.

    Seen are ``torch.distributed`` calls, functional collectives, what ``DTensor`` issues, and what FSDP, DDP
    and pipeline stages issue by themselves; in forward and in backward, in the autograd engine's threads too.
    Not seen are threads that the program itself starts, and communication that does not go through the
    dispatcher (NVSHMEM in a custom kernel).
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self._waits: list[Phase] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note collectives; let DTensor and other wrappers first take themselves apart."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if func.namespace in _NAMESPACES:
            name = func._opname
            kind = _kind(name)
            if kind == "wait":
                self._waits.append(phase())
            elif kind is not None:
                self.calls.append(Collective(kind, phase(), f"{func.namespace}.{name}"))
        return func(*args, **(kwargs or {}))

    def count(self, kind: str | None = None, phase: Phase | None = None) -> int:
        """How many collectives of ``kind`` were issued in ``phase``; None stands for all."""
        return sum(kind in (None, call.kind) and phase in (None, call.phase) for call in self.calls)

    def counts(self, phase: Phase | None = None) -> dict[str, int]:
        """Kind to count, sorted by kind, of one phase or of all."""
        return dict(sorted(Counter(call.kind for call in self.calls if phase in (None, call.phase)).items()))

    def kinds(self, phase: Phase | None = None) -> list[str]:
        """The kinds in the order of issue: equal on every rank where nothing can hang."""
        return [call.kind for call in self.calls if phase in (None, call.phase)]

    def waits(self, phase: Phase | None = None) -> int:
        """How often functional collectives were waited for (``wait_tensor``)."""
        return sum(phase in (None, one) for one in self._waits)


def _kind(operation: str) -> str | None:
    """The kind of an operation: ``_allgather_base_`` and ``all_gather_into_tensor_out`` are both ``all_gather``."""
    name = operation.replace("_", "").removeprefix("sharddim")
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            return kind
    return None


# -------------------------------------------------------------------------------------------------------------- runs


class CountRuns:
    """Counts how often functions and modules run, by name and phase.

    >>> runs = CountRuns()
    >>> body = runs.watch(block, "body")
    >>> torch_remat.checkpoint(region_name="layers.0")(body)(x).sum().backward()
    >>> runs.count("body", "forward"), runs.count("body", "replay")
    (1, 1)
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Phase]] = []

    def watch(self, function: Callable[P, R], name: str) -> Callable[P, R]:
        """``function``, counted under ``name`` each time it runs."""

        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            self.calls.append((name, phase()))
            return function(*args, **kwargs)

        return watched

    @contextmanager
    def modules(self, model: nn.Module) -> Iterator[CountRuns]:
        """Count the calls of ``model`` and of every module in it under its path (the model itself is ``""``)."""
        handles = []
        for path, module in model.named_modules():

            def note(module: nn.Module, args: Any, path: str = path) -> None:
                self.calls.append((path, phase()))

            handles.append(module.register_forward_pre_hook(note))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def count(self, name: str, phase: Phase | None = None) -> int:
        """How often ``name`` ran, in one phase or in all."""
        return sum(name == one and phase in (None, when) for one, when in self.calls)


# -------------------------------------------------------------------------------------------------------- kept bytes


class KeptBytes(TorchDispatchMode):
    """Measures which memory that was allocated inside the ``with`` block is still alive, without a device counter.

    >>> with KeptBytes() as kept:
    ...     y = model(x)
    >>> kept.bytes(without=y)  # what stays resident for backward, the output aside

    Each storage counts once, at its present size; parameters, and other tensors that exist before, do not
    count. Only what operations of this thread allocate is seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self._older: dict[int, StorageWeakRef] = {}  # a weak reference keeps an address from being used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the storages that ``func`` makes."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._older.setdefault(storage._cdata, StorageWeakRef(storage))
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if storage._cdata not in self._older:
                self._made.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def sizes(self, *, without: Any = ()) -> list[int]:
        """Bytes of each storage still alive, sorted, except those of the tensors in ``without`` (any pytree)."""
        excluded = {storage._cdata for storage in _storages(without)}
        alive = [_storage_bytes(made) for address, made in self._made.items() if address not in excluded]
        return sorted(nbytes for nbytes in alive if nbytes)

    def bytes(self, *, without: Any = ()) -> int:
        """Bytes still alive in all."""
        return sum(self.sizes(without=without))


def _storages(tree: Any) -> list[Any]:
    found: list[Any] = []
    pending = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    while pending:
        tensor = pending.pop()
        if is_placeholder(tensor):
            continue
        if is_traceable_wrapper_subclass(tensor):
            pending.extend(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif tensor.layout is torch.strided:
            found.append(tensor.untyped_storage())
    return found


def _storage_bytes(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


# -------------------------------------------------------------------------------------------------------------- bits


def differences(expected: Any, actual: Any, *, atol: float = 0.0) -> list[str]:
    """One line for each leaf of two pytrees that is not the same.

    Tensors must have equal metadata and equal bits: NaN is NaN, and 0.0 is not -0.0. With ``atol`` their
    values may differ by that much, for sums taken in another order. ``DTensor`` leaves are compared by this
    rank's part and their placements.
    """
    ours, structure = tree_flatten_with_path(expected)
    theirs, other_structure = tree_flatten_with_path(actual)
    if structure != other_structure:
        return [f"other structure: expected {structure}, got {other_structure}"]
    found = []
    for (path, left), (_, right) in zip(ours, theirs, strict=True):
        how = _difference(left, right, atol)
        if how:
            found.append(f"{keystr(path) or 'the value'}: {how}")
    return found


def assert_same_bits(expected: Any, actual: Any, *, atol: float = 0.0, what: str = "") -> None:
    """Require two pytrees to be the same; see :func:`differences`.

    Raises:
        AssertionError: naming up to ten leaves that differ.
    """
    found = differences(expected, actual, atol=atol)
    if found:
        more = [f"... and {len(found) - 10} more"] if len(found) > 10 else []
        raise AssertionError("\n".join([f"{what or 'values'}: {len(found)} differ", *found[:10], *more]))


def assert_same_gradients(expected: nn.Module, actual: nn.Module, *, atol: float = 0.0) -> None:
    """Require the gradients of two models to be the same, parameter by parameter, and at least one not to be zero.

    Raises:
        AssertionError: naming up to ten parameters whose gradients differ, or when there is no gradient at all.
    """
    ours, theirs = _gradients(expected), _gradients(actual)
    if not any(grad is not None and bool(_local(grad).count_nonzero()) for grad in ours.values()):
        raise AssertionError("the expected model has no gradient that is not zero: call backward on both models first")
    assert_same_bits(ours, theirs, atol=atol, what="gradients")


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _difference(expected: Any, actual: Any, atol: float) -> str | None:
    if not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        same = type(expected) is type(actual) and (expected is actual or bool(expected == actual))
        return None if same else f"expected {expected!r}, got {actual!r}"
    if _described(expected) != _described(actual):
        return f"expected {_described(expected)}, got {_described(actual)}"
    left, right = _local(expected), _local(actual)
    if left.shape == right.shape and torch.equal(_bits(left), _bits(right)):
        return None
    worst = _distance(left, right) if left.shape == right.shape else None
    if worst is not None and atol > 0 and worst <= atol:
        return None
    return f"{_described(expected)} differs by up to {worst}"


def _distance(left: Tensor, right: Tensor) -> float:
    wide = torch.complex128 if left.is_complex() else torch.float64
    return (left.to(wide) - right.to(wide)).abs().max().item()


def _described(tensor: Tensor) -> str:
    placements = getattr(tensor, "placements", None)
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
    return text if placements is None else f"{text} as {placements}"


def _local(tensor: Tensor) -> Tensor:
    to_local = getattr(tensor, "to_local", None)
    tensor = tensor.detach() if to_local is None else to_local().detach()
    wait = getattr(tensor, "wait", None)  # a functional collective that is still running
    return tensor if wait is None else wait()


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)
