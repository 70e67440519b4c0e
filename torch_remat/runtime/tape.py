"""What one checkpoint keeps from forward to backward. Holds, decides nothing, imports no sibling.

[Note: who owns what]

- A :class:`Slot` is the payload of a saved tensor of recomputed code. The autograd node owns it; the tape has a weak
  reference. It is empty after forward, filled by replay, and dies with its node.
- A :class:`Region` record lives on the tape. Its outputs hold the data of persisted outputs and only metadata of the
  others.
- The tape itself is owned by the autograd graph alone, through the unpack hooks of its slots. When the last slot dies,
  so does the tape, with its inputs and records; a checkpoint without a living slot has nothing to replay.
- Outputs reach the tape through weak references only, so a held output holds no tape.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_remat.errors import InternalError

__all__ = [
    "BASE_GRADIENT",
    "LEAF_GRADIENT",
    "Kept",
    "Output",
    "OutputKind",
    "Packed",
    "Region",
    "Slot",
    "Span",
    "Spans",
    "Tape",
    "WeakStorage",
    "attributes_of",
    "gradient_of",
    "plain_attributes",
    "stride_of",
    "version_of",
    "version_probe",
    "without_frames",
]


def version_of(tensor: Tensor) -> int:
    """The version counter of ``tensor``; -1 for an inference tensor, which has none and which nothing can save."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


_set_version = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
can_set_versions = _set_version is not None


def set_version(tensor: Tensor, version: int) -> None:
    """Give ``tensor`` a version counter that it had before, where torch can do that; nothing for a negative one."""
    if _set_version is not None and version >= 0 and version_of(tensor) not in (version, -1):
        _set_version((tensor,), (version,))


LEAF_GRADIENT, BASE_GRADIENT = 2, 3
_creation = getattr(torch._C._autograd, "_get_creation_meta", None)


def _made_without_gradients(view: Tensor) -> bool:
    return view.is_leaf if _creation is None else _creation(view).name == "NO_GRAD_MODE"


def gradient_of(tensor: Tensor) -> int:
    """False, True, ``LEAF_GRADIENT`` or ``BASE_GRADIENT``: whether and how ``tensor`` requires a gradient.

    A view made under no_grad says that it does where its base does, and gets none.
    """
    if not tensor.requires_grad:
        return False
    base = tensor._base
    if base is not None and tensor._version > 0:
        # Asked for its node, a changed view makes a new one (backward would add up in another order), or is refused.
        if not _made_without_gradients(tensor):
            return True
    elif not tensor.is_leaf:
        return True
    return LEAF_GRADIENT if base is None or not base.requires_grad else BASE_GRADIENT


_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def attributes_of(tensor: Tensor) -> dict[str, Any] | None:
    """What user code has hung on ``tensor`` (``tensor.scale = 3.0``); None where there is nothing."""
    attributes: dict[str, Any] = tensor.__dict__  # type: ignore[assignment]
    return None if not attributes or is_traceable_wrapper_subclass(tensor) else attributes


def plain_attributes(tensor: Tensor) -> dict[str, Any] | None:
    """The simple values among :func:`attributes_of`, for a tensor that the tape does not hold.

    Objects are left out: one that leads to a tensor of the graph would keep that alive for ever.
    """
    attributes = attributes_of(tensor) or {}
    return {name: value for name, value in attributes.items() if isinstance(value, _SIMPLE)} or None


_no_dispatch = getattr(torch._C, "_DisableTorchDispatch", contextlib.nullcontext)
_STALE = -2  # no tensor is ever at this version


class Slot:
    """A saved tensor of recomputed code (or a rebuilt save of a SAVE region).

    ``tensor`` is None until replay fills it. ``expected`` is the metadata seen in forward, None when nobody checks.
    ``version`` is the version counter at the save in forward; the tensor must be at the same one when replay saves it
    and when backward asks. ``probe`` is the version counter of forward's tensor, and the count at which it must stay:
    code that replay does not run (its tail, SAVE regions, the caller's) may modify that tensor.
    """

    __slots__ = ("__weakref__", "count", "expected", "probe", "tensor", "version")

    def __init__(self, expected: tuple[Any, ...] | None, saved: Tensor) -> None:
        self.tensor: Tensor | None = None
        self.version = self.count = saved._version
        self.expected = expected
        self.probe = version_probe(saved)

    def is_modified(self) -> bool:
        """Whether forward's tensor, or the one that replay made, is not at the version of the save."""
        if self.probe is not None and self.probe._version != self.count:
            return True
        return self.tensor is not None and version_of(self.tensor) != self.version

    def fill(self, tensor: Tensor, version: int, trusted: bool) -> None:
        """Replay has made the tensor, at ``version``. Without ``trusted`` the versions of the passes do not compare."""
        self.tensor = tensor
        if version != self.version:
            self.version = version if not trusted else _STALE


class Kept:
    """Payload of a save that stays resident under one of our pack hooks; checked at unpack like an ordinary save."""

    __slots__ = ("__weakref__", "label", "tensor", "version")

    def __init__(self, tensor: Tensor, label: tuple[str | None, str | None, int]) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.label = label  # checkpoint, region, which save of the region


class Packed:
    """Payload of a save, or of a persisted output, that a user's hook pair has packed.

    ``probe`` is the version counter of the tensor.
    """

    __slots__ = ("is_output", "label", "payload", "probe", "ready", "unpack", "version")

    def __init__(self, payload: Any, unpack: Callable[[Any], Any], probe: Tensor | None, label: Any) -> None:
        self.payload = payload
        self.unpack = unpack
        # Unpacked for replay, which reads the same value: until the save asks for it; of an output, while the outputs
        # of its region are handed out.
        self.ready: Any = None
        self.is_output = False
        self.probe = probe
        self.version = 0 if probe is None else probe._version
        self.label = label


class WeakStorage:
    """Keeps a storage's identity from being reused, not its memory."""

    __slots__ = ("_reference",)

    def __init__(self, storage: Any) -> None:
        self._reference = storage._weak_ref()

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._reference)


class OutputKind(enum.IntEnum):
    """How replay gets one leaf of a SAVE region's output."""

    OBJECT = 0  # not a tensor: the very object is handed out again
    KEPT = 1  # persisted: data is on the tape (or in a hook's payload)
    PLACEHOLDER = 2  # only metadata is kept; data is a weak reference until forward has ended
    ARGUMENT = 3  # the region returned one of its arguments: replay returns its own
    ARGUMENT_VIEW = 4  # a view of an argument's memory: rebuilt from replay's own argument
    REPEAT = 5  # the same tensor as an earlier leaf


class Output:
    """One leaf of a SAVE region's output, or one input of the checkpoint."""

    __slots__ = (
        "attributes",
        "cloned",
        "data",
        "free",
        "kind",
        "meta",
        "pending",
        "shell",
        "stride",
        "unpack",
        "version",
    )

    def __init__(self, kind: OutputKind, data: Any = None, meta: Any = None) -> None:
        self.kind = kind
        self.data = (
            data  # OBJECT: the object; KEPT: tensor or payload; ARGUMENT*: index; REPEAT: index of the first leaf
        )
        self.meta = meta  # metadata for a placeholder; gradient_of(tensor) for KEPT; geometry for ARGUMENT_VIEW
        self.attributes: dict[str, Any] | None = None  # what user code has hung on the tensor
        self.unpack: Callable[[Any], Any] | None = None  # set where a hook packed the data
        self.version: Any = None  # of the tensor; with a version probe where a hook packed the data
        self.cloned = False  # data is a private copy, because the body modifies the output in place
        self.pending: weakref.ref[Any] | None = None  # the collective that forward may not have waited for yet
        self.stride: tuple[int, ...] | None = None  # of a tensor that a hook packed: it may come back in another layout
        self.free: weakref.ref[Kept] | None = None  # of a placeholder: the region's own save, which has the data
        self.shell = False  # another SAVE region overwrites it before anybody reads it: its version does not matter


class Span:
    """Which autograd nodes one SAVE region call made, and what it calls its tensors: for reports. Holds no tensor."""

    __slots__ = ("end", "name", "names", "outputs", "start")

    def __init__(self, name: str, start: int) -> None:
        self.name = name
        self.start = start  # the first sequence number that is its own
        self.end: int | None = None  # one past the last; None while the region runs
        self.names: dict[int, tuple[str, ...]] | None = None  # node -> the user's names of what it saves, in order
        self.outputs: tuple[tuple[int, int], ...] = ()  # (leaf, address) of outputs that are not persisted


class Spans:
    """The spans of one checkpoint, in order.

    The tape owns them, and so do the pre-hooks of the checkpoint's outputs: a checkpoint that keeps only what autograd
    saves natively has no tape, and its saves are to be told apart all the same.
    """

    __slots__ = ("checkpoint", "items")

    def __init__(self, checkpoint: str | None) -> None:
        self.checkpoint = checkpoint
        self.items: list[Span] = []


class Region:
    """What forward records of one region call."""

    __slots__ = (
        "changed",
        "cloned",
        "dropped",
        "error",
        "exit_states",
        "given",
        "name",
        "outputs",
        "outside",
        "rebuilds",
        "recompute",
        "slots_before",
        "span",
        "spec",
    )

    def __init__(self, name: str, recompute: bool, slots_before: int) -> None:
        self.name = name
        self.recompute = recompute
        self.slots_before = slots_before  # recomputed saves before this call: where replay must stand when it gets here
        self.spec: Any = None
        self.cloned = False  # some outputs are private copies
        self.outputs: list[Output] = []
        self.given: tuple[tuple[int, Any, int], ...] = ()  # outputs that are arguments or repeat others; see plan.Step
        self.outside: list[Any] = []  # tensors that the body of a SAVE region finds by itself, where it may run again
        self.changed: list[
            tuple[int, Output]
        ] = []  # leaves of the arguments that the body modified in place, as it left them
        self.dropped: list[tuple[int, weakref.ref[Tensor], int]] = []  # those that the plan does not need, with version
        self.rebuilds: list[tuple[weakref.ref[Slot], int, Any]] = []  # slot, leaf of the arguments, how to make it
        self.error: BaseException | None = None  # what the body of a SAVE region raised
        self.span: Span | None = None  # of a SAVE region
        self.exit_states: list[tuple[Any, Any]] = []  # state hooks and what they were when the region returned


class Tape:
    """The record of one checkpoint call; see the note at the top of this file."""

    __slots__ = (
        "__weakref__",
        "ambient",
        "captured",
        "changes",
        "check",
        "codes",
        "complete",
        "externals",
        "first_sequence_nr",
        "fits",
        "function",
        "guards",
        "handed_on",
        "hooks",
        "inner_states",
        "inputs",
        "key",
        "lock",
        "name",
        "order",
        "regions",
        "released",
        "replays",
        "reruns",
        "root",
        "scopes",
        "slots",
        "spans",
        "spec",
        "states",
        "suspects",
        "task",
        "to_end",
        "trained",
        "under_mode",
        "watch_draws",
    )

    def __init__(self, name: str | None, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        self.captured: Any = None  # what the function's variables held; see captured.py
        self.spec: Any = None  # of (args, kwargs)
        self.inputs: list[Output] = []  # leaves of the arguments
        self.slots: list[weakref.ref[Slot]] = []
        self.regions: dict[str, Region] = {}
        self.order: list[Region] = []
        self.spans = Spans(name)
        self.check: Any = None  # compares values between the passes; see bitwise.py
        self.codes: list[Any] | None = None  # what saved, for each slot, where something is compiled
        self.scopes: tuple[str, ...] = ()
        self.ambient: Any = None  # autocast and friends, as forward saw them
        self.hooks: tuple[Any, ...] = ()  # state hooks
        self.states: list[Any] = []  # of the state hooks at entry
        self.inner_states: list[list[Any]] = []  # of the hooks of checkpoints inside this one, at their entries
        self.under_mode = False  # forward ran under a dispatch mode, ours or another
        self.watch_draws = False  # replay must look at every random operation
        # Parameters, buffers and captured tensors with their versions: those that replay reads, or all if not ``fits``.
        self.externals: list[Any] = []
        self.root: Any = None  # from where they were found
        self.changes = False  # the body itself has changed one of them, and did not when it was observed
        self.suspects: list[Any] = []  # those of which it may have read the old value
        self.handed_on: Any = None  # what SAVE regions handed on beside their outputs; see handed_on.py
        self.first_sequence_nr = 0  # autograd nodes of this body have at least this number
        self.key: Any = None  # under which the plans of this body are registered
        self.trained: list[Any] = []  # modules that the call leads to, with their training flags; see body_key.py
        self.task: tuple[int, bool] = (
            -1,
            False,
        )  # the last graph task and whether it leaves rebuilt tensors in their slots
        self.fits = False  # the learned plan fitted this call
        self.to_end = False  # replay must not stop early
        self.complete = False  # forward has ended
        self.guards = False  # the body has asked is_recomputing(), and may do things once only
        self.released = False  # all living slots are filled for good: no further replay can be needed
        self.replays = 0
        self.reruns: set[str] | None = None  # SAVE regions that replay runs, for their outputs; None: an error instead
        self.lock = threading.RLock()

    def release(self) -> None:
        """Drop everything that only a further replay would need."""
        self.released = True
        self.function = _released
        self.captured = None
        self.spec = None
        self.inputs = []
        self.regions = {}
        self.order = []
        self.states = []
        self.trained = []
        self.externals = []
        self.suspects = []
        self.root = None
        self.handed_on = None

    def living_slots(self) -> Iterator[Slot]:
        """The slots that some autograd node still owns."""
        for reference in self.slots:
            slot = reference()
            if slot is not None:
                yield slot
        for region in self.order:
            for reference, _, _ in region.rebuilds:
                slot = reference()
                if slot is not None:
                    yield slot

    def empty_slots(self) -> None:
        """Forget everything that replays have made so far."""
        for slot in self.living_slots():
            slot.tensor = None

    def unfilled(self) -> int:
        """How many living slots wait for a tensor."""
        count = 0
        for reference in self.slots:
            slot = reference()
            if slot is not None and slot.tensor is None:
                count += 1
        for region in self.order:
            for reference, _, _ in region.rebuilds:
                slot = reference()
                if slot is not None and slot.tensor is None:
                    count += 1
        return count


def without_frames(error: BaseException) -> BaseException:
    """A copy of ``error`` that holds no frames (and so no tensors of the body)."""
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001 - an exception that cannot be copied is kept as it is
        twin = error
    return twin.with_traceback(None) if twin is not error else error


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides to restore when a plain tensor comes back from a hook."""
    plain = type(tensor) is Tensor or type(tensor) is torch.nn.Parameter
    return tensor.stride() if plain and tensor.layout is torch.strided else None


def version_probe(tensor: Tensor) -> Tensor | None:
    """An empty tensor that shares the version counter of ``tensor`` and none of its memory.

    None for subclasses and for layouts other than strided: those cannot give their memory away.
    """
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return None
    probe = tensor.detach()
    try:
        probe.data = _empty(tensor.device)
    except RuntimeError:  # sparse, say
        return None
    return probe


@functools.cache
def _empty(device: torch.device) -> Tensor:
    with _no_dispatch():  # whatever mode is active must not make it
        return torch.empty(0, device=device)


def _released(*args: Any, **kwargs: Any) -> Any:
    raise InternalError("a released tape was replayed")
