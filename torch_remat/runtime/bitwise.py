"""Whether replay computed the same bits: fingerprints of forward's values against those of replay.

Rules:
 1. Every tensor that replay makes for backward (slots, rebuilt saves of SAVE regions) and every one that it is given
    (persisted outputs, inputs) has a fingerprint from forward and gets one in replay.
 2. A fingerprint is two 64-bit integers on the tensor's device: the sum of the elements' bits, and their sum with
    weights scrambled from the position. Integer sums do not depend on the order of summation: equal bits have equal
    fingerprints.
 3. The device is asked once per replay, when all fingerprints are there.
 4. Nobody who does not ask pays: a check sits on the tape, and the passes look for it where they start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_remat.errors import ValuesDriftError, display_name
from torch_remat.runtime.placeholder import inner_tensors, is_placeholder, user_line
from torch_remat.runtime.tape import Output, OutputKind, Region, Slot, Tape

__all__ = ["BitwiseCheck", "Difference", "fingerprint", "maker_of", "operation_of"]

_CHUNK = 1 << 20  # integers taken at a time: bounds the memory that a fingerprint needs
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_no_dispatch = getattr(torch._C, "_DisableTorchDispatch", None)


@dataclass(frozen=True)
class Difference:
    """One tensor that replay made differently.

    ``tensor`` is what it is to the checkpoint; ``operation`` the autograd node that saves it and ``made_by`` the one
    that made it, where known; ``line`` is where replay saved it. ``max_difference`` and ``differing`` (of ``elements``)
    need the values of both passes, which only :func:`~torch_remat.verify_replay` keeps.
    """

    checkpoint: str
    region: str | None
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    operation: str | None
    made_by: str | None
    line: str | None
    max_difference: float | None
    differing: int | None
    elements: int
    likely_cause: str

    def lines(self) -> list[str]:
        """The difference in words."""
        where = f"region {self.region}" if self.region is not None else "outside regions"
        text = [f"checkpoint {self.checkpoint}, {where}: {self.tensor}, {self.dtype} {self.shape}"]
        if self.operation is not None:
            text.append(f"saved by {self.operation}" + (f", made by {self.made_by}" if self.made_by else ""))
        if self.line is not None:
            text.append(f"in replay saved at {self.line}")
        if self.max_difference is not None:
            text.append(
                f"largest difference {self.max_difference:.6g}, in {self.differing} of {self.elements} elements"
            )
        text.append(f"likely cause: {self.likely_cause}")
        return text


class _Mark:
    """What forward saw of one tensor."""

    __slots__ = ("fingerprint", "kind", "made_by", "region", "slot", "value", "what")

    def __init__(self, what: str, kind: str, region: str | None, tensor: Tensor, keep: bool) -> None:
        self.what = what
        self.kind = kind  # "saved", "output" or "input"
        self.region = region
        self.made_by = maker_of(tensor)
        self.fingerprint = fingerprint(tensor)
        self.value = tensor.detach().clone() if keep else None
        self.slot = 0  # identity of its slot, to find the node that saves it


@dataclass(frozen=True)
class _Found:
    """What replay saw of it."""

    mark: _Mark
    fingerprint: Tensor
    value: Tensor
    line: str | None


class BitwiseCheck:
    """The comparison of one checkpoint's passes; sits on its tape and holds no slot."""

    def __init__(self, tape: Tape, leaves: list[Any], *, keep_values: bool = False) -> None:
        self.keep_values = keep_values
        self.differences: list[Difference] | None = [] if keep_values else None  # collected there, raised here
        self.compared = 0
        self._marks: dict[int, _Mark] = {}  # by identity of a slot or output, the latest owner of it
        self._open: list[Region] = []
        self._found: list[_Found] = []
        self.roots: tuple[Any, ...] = ()  # autograd nodes from which the checkpoint's can be reached
        for index, output in enumerate(tape.inputs):
            if output.kind is OutputKind.KEPT:
                self._add(output, leaves[index], f"input {index}", "input", None)

    # --- Forward

    def forward_hook(self, frame: Any) -> Callable[[Tensor], Any]:
        """The pack hook of recomputed code with a fingerprint for each slot."""
        frame.wraps = True
        pack = frame.pack
        tape = frame.tape

        def checked(tensor: Tensor) -> Any:
            payload = pack(tensor)
            if type(payload) is Slot:
                mark = self._add(payload, tensor, f"saved tensor {len(tape.slots) - 1}", "saved", self._region())
                if mark is not None:
                    mark.slot = id(payload)
            return payload

        return checked

    def saved(self, slot: Slot, tensor: Tensor, record: Region) -> None:
        """A SAVE region saves an argument that replay will make."""
        mark = self._add(slot, tensor, "an argument that it saves", "saved", record.name)
        if mark is not None:
            mark.slot = id(slot)

    def persisted(self, record: Region, position: int, output: Output, tensor: Tensor) -> None:
        """An output of a SAVE region, or an argument that it changed, is kept for replay."""
        what = f"output {position}" if position >= 0 else f"argument {-1 - position} as the region left it"
        self._add(output, tensor, what, "output", record.name)

    def around(self, function: Callable[..., Any], record: Region) -> Callable[..., Any]:
        """The body of a region call, which says where saves happen."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._open.append(record)
            try:
                return function(*args, **kwargs)
            finally:
                self._open.pop()

        return call

    def _region(self) -> str | None:
        return self._open[-1].name if self._open else None

    def _add(self, owner: Any, tensor: Tensor, what: str, kind: str, region: str | None) -> _Mark | None:
        if not _has_values(tensor):
            return None
        mark = self._marks[id(owner)] = _Mark(what, kind, region, tensor, self.keep_values)
        return mark

    # --- Replay

    def replay_starts(self) -> None:
        """Forget what an earlier replay has seen."""
        self._found = []
        self._open = []

    def seen(self, owner: Slot | Output, tensor: Tensor) -> None:
        """Replay has made or was given the tensor of ``owner``."""
        mark = self._marks.get(id(owner))
        if mark is None or not _has_values(tensor) or (type(owner) is Output and owner.shell):
            return
        line = user_line() if mark.kind == "saved" else None
        self._found.append(_Found(mark, fingerprint(tensor), tensor.detach(), line))

    def compare(self, tape: Tape) -> None:
        """Replay has ended: raise, or collect, what differs."""
        found, self._found = self._found, []
        self.compared += len(found)
        differing = [one for one, differs in zip(found, _differ(found), strict=True) if differs]
        if not differing:
            return
        differences = [self._difference(tape, one) for one in (differing if self.keep_values else differing[:1])]
        if self.differences is not None:
            self.differences.extend(differences)
            return
        raise ValuesDriftError(drift_message(differences[0], len(differing), len(found)))

    def forget(self) -> None:
        """Let go of all values."""
        self._marks = {}
        self._found = []

    def _difference(self, tape: Tape, found: _Found) -> Difference:
        mark = found.mark
        operation = operation_of(mark.slot, self.roots) if mark.slot else None
        largest, count = _largest(mark.value, found.value) if mark.value is not None else (None, None)
        return Difference(
            display_name(tape.name),
            mark.region,
            mark.what,
            tuple(found.value.shape),
            str(found.value.dtype).removeprefix("torch."),
            operation,
            mark.made_by if mark.slot else None,
            found.line,
            largest,
            count,
            found.value.numel(),
            _likely_cause(tape, mark, found, operation),
        )


def drift_message(first: Difference, count: int, compared: int) -> str:
    """The text of a :class:`ValuesDriftError`."""
    details = "".join(f"  {line}\n" for line in first.lines())
    return (
        f"Replay computed other values than forward for {count} of {compared} tensors that backward or replay reads. "
        f"The first:\n{details}"
        f"To fix: make the recomputed code deterministic, or move what differs into a region with recompute=False; "
        f"remat.verify_replay(fn, *args) lists every difference with its size."
    )


def fingerprint(tensor: Tensor) -> Tensor:
    """Two integers, on the device of ``tensor``, that tell its bits from others."""
    if _no_dispatch is None:
        return _fingerprint(tensor)
    parts = list(_parts(tensor))
    with _no_dispatch(), torch._C.DisableTorchFunction():
        return sum(
            (_fingerprint(part) * (index + 1) for index, part in enumerate(parts[1:], 1)), _fingerprint(parts[0])
        )


def _fingerprint(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        bits = _bits(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1))
        total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for index, start in enumerate(range(0, bits.numel(), _CHUNK)):
            part = bits[start : start + _CHUNK].to(torch.int64)
            weighted = (part * _weights(part.numel(), part.device)).sum()
            total += torch.stack((part.sum(), weighted * _scrambled(index)))
        return total


def _bits(flat: Tensor) -> Tensor:
    """The memory of a contiguous tensor as integers: eight bytes in each where the size allows, whatever the offset."""
    size = flat.element_size()
    if flat.numel() * size % 8:
        return flat.view(_BITS.get(size, torch.int64))
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)


_known_weights: dict[Any, Tensor] = {}


def _weights(count: int, device: torch.device) -> Tensor:
    """A scrambled odd integer for each position: weights that grow evenly would cancel where elements move evenly.

    Kept for the next tensor, per device and stream, as long as the longest so far.
    """
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    known = _known_weights.get(key)
    if known is None or known.numel() < count:
        length = min(_CHUNK, 1 << (count - 1).bit_length())
        known = torch.arange(1, length + 1, device=device).mul_(_SCRAMBLE[0])
        known ^= known >> 32
        _known_weights[key] = known = known.mul_(_SCRAMBLE[1]).bitwise_or_(1)
    return known[:count]


_SCRAMBLE = (-7046029254386353131, -4658895280553007687)


def _scrambled(index: int) -> int:
    """The same for a chunk, as a number that fits in 64 bits."""
    value = (index * _SCRAMBLE[0]) & 0x7FFFFFFFFFFFFFFF
    return (value ^ value >> 32) | 1


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that ``tensor`` is made of."""
    if is_traceable_wrapper_subclass(tensor):
        for _, inner in inner_tensors(tensor):
            yield from _parts(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout is torch.strided:
        yield tensor


def _has_values(tensor: Tensor) -> bool:
    """Whether there are bits to compare: not in meta and fake tensors, placeholders, and layouts without them."""
    parts = [] if is_placeholder(tensor) else list(_parts(tensor))
    return bool(parts) and all(_has_memory(part) and not part.is_quantized for part in parts)


def _has_memory(tensor: Tensor) -> bool:
    if tensor.device.type == "meta":
        return False
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        return True
    try:
        storage = tensor.untyped_storage()
        return storage.device.type != "meta" and storage.data_ptr() >= 0
    except RuntimeError:  # a wrapper that does not say what it is made of
        return False


def _differ(found: list[_Found]) -> list[bool]:
    """Which of the fingerprints differ. Waits for each device once."""
    differs = [False] * len(found)
    devices: dict[torch.device, list[int]] = {}
    for index, one in enumerate(found):
        devices.setdefault(one.fingerprint.device, []).append(index)
    for device, indices in devices.items():
        forward = torch.stack([found[index].mark.fingerprint.to(device) for index in indices])
        replay = torch.stack([found[index].fingerprint for index in indices])
        for index, differing in zip(indices, (forward != replay).any(1).tolist(), strict=True):
            differs[index] = differing
    return differs


def _largest(forward: Tensor, replay: Tensor) -> tuple[float | None, int | None]:
    """The largest absolute difference, and how many elements differ."""
    if forward.shape != replay.shape or is_traceable_wrapper_subclass(forward) or forward.layout is not torch.strided:
        return None, None
    with torch.no_grad():
        forward, replay = (one.detach().resolve_conj().resolve_neg().cpu().contiguous() for one in (forward, replay))
        size = forward.element_size()
        bits = [one.reshape(-1).view(torch.uint8).view(-1, size) for one in (forward, replay)]
        differs = (bits[0] != bits[1]).any(1)
        wide = torch.complex128 if forward.is_complex() else torch.float64
        both = [one.reshape(-1)[differs].to(wide) for one in (forward, replay)]
        difference = (both[0] - both[1]).abs()
    return (float(difference.max()) if difference.numel() else 0.0), int(differs.sum())


def maker_of(tensor: Tensor) -> str | None:
    """The autograd node that made ``tensor``; None for a leaf and what needs no gradient."""
    return None if tensor.grad_fn is None else tensor.grad_fn.name()


def operation_of(slot: int, roots: tuple[Any, ...]) -> str | None:
    """The autograd node that owns the slot, and as what it saves it."""
    node = torch._C._current_autograd_node()
    pending = list(roots) if node is None else [node]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for name in dir(type(node)):
            if name.startswith("_raw_saved_"):
                for index, payload in enumerate(_payloads(node, name)):
                    if id(payload) == slot:
                        attribute = name.removeprefix("_raw_saved_")
                        return f"{node.name()} as {index if attribute == 'saved_tensors' else attribute}"
        pending.extend(edge for edge, _ in node.next_functions if edge is not None)
    return None


def _payloads(node: Any, name: str) -> list[Any]:
    try:
        saved = getattr(node, name)
        return [getattr(one, "data", None) for one in (saved if isinstance(saved, (tuple, list)) else (saved,))]
    except RuntimeError:  # released
        return []


_RANDOM = ("Dropout", "Bernoulli", "Rand", "Normal", "Uniform", "Exponential", "Multinomial", "Rrelu", "Poisson")
_UNORDERED = ("IndexAdd", "ScatterAdd", "IndexPut", "Scatter", "Convolution", "Attention", "Bmm", "Cumsum", "Embedding")


def _likely_cause(tape: Tape, mark: _Mark, found: _Found, operation: str | None) -> str:
    names = " ".join(one for one in (operation, mark.made_by) if one)
    if mark.kind == "input":
        return "the input was changed after forward read it, or a hook pair does not give back what it packed"
    if mark.kind == "output":
        return "the output was changed after the region returned it, or a hook pair does not give back what it packed"
    if any(word in names for word in _RANDOM):
        return "a random operation whose generator no state hook restores; pass remat.GeneratorHook()"
    dtype = found.value.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return "a choice that drifts (routing, a mask drawn at random): make it in a region with recompute=False"
    if getattr(tape.ambient, "autocast", None):
        return "autocast, or a kernel that does not give the same bits twice"
    if any(word in names for word in _UNORDERED) and found.value.device.type != "cpu":
        return "a kernel that does not give the same bits twice; see torch.use_deterministic_algorithms"
    return (
        "a parameter, buffer or other state that changed between the passes, a random operation, or a kernel that "
        "does not give the same bits twice"
    )
