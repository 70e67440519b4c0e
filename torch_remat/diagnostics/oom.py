"""What was kept when memory ran out: a report printed by the allocator's observer, or left in a file per rank.

Nothing is recorded while a program runs. The phase is read off the Python stack: of the allocation that failed, or of
the exception.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from torch_remat.diagnostics.graph import discover_autograd_roots
from torch_remat.diagnostics.memory import SavedTensorsReport, saved_tensors_report
from torch_remat.diagnostics.report import Report
from torch_remat.diagnostics.storages import Annotate
from torch_remat.errors import display_name
from torch_remat.runtime.forward import ForwardFrame, run_forward
from torch_remat.runtime.replay import ReplayFrame, replay
from torch_remat.runtime.tape import Tape

__all__ = [
    "OomReport",
    "OomReports",
    "format_oom_saved_tensors_report",
    "install_oom_observer",
    "oom_observer",
    "oom_report",
]


@dataclass(frozen=True)
class OomReport(Report):
    """What was going on when memory ran out, and what was kept.

    ``phase`` is ``"forward"``, ``"replay"``, ``"backward"`` or ``"outside"`` (the optimizer step, say); ``checkpoint``
    and ``region`` are those that were running. The sizes are those that the allocator told, where it did.
    """

    rank: int
    phase: str
    checkpoint: str | None
    region: str | None
    error: str | None
    device: int | None
    requested_bytes: int | None
    device_bytes: int | None
    free_bytes: int | None
    memory: SavedTensorsReport

    @property
    def headline(self) -> str:
        """Where memory ran out, in one line."""
        where = "outside of forward and backward" if self.phase == "outside" else f"in {self.phase}"
        if self.checkpoint is not None:
            where += f" of {self.checkpoint}"
        if self.region is not None:
            where += f", in region {self.region}"
        return f"rank {self.rank}: out of memory {where}"

    def format(self) -> str:
        """The report as text."""
        text = [self.headline]
        if self.device is not None:
            text.append(_sizes(self.device, self.requested_bytes, self.device_bytes, self.free_bytes))
        if self.error is not None:
            text.append(self.error)
        return "\n".join([*text, "", self.memory.format()])

    def as_dict(self) -> dict[str, Any]:
        """The report as nested dicts."""
        return {**super().as_dict(), "memory": self.memory.as_dict()}


def format_oom_saved_tensors_report(annotate: Annotate | None = None) -> str:
    """The whole model's report, rooted at every living tensor with a ``grad_fn``."""
    return saved_tensors_report(discover_autograd_roots(), annotate).format()


def oom_observer(device: int, alloc: int, device_alloc: int, device_free: int) -> None:
    """Print what is kept to the standard error. To be attached with torch's out-of-memory observer hook.

    Called by the allocator with the device, the bytes asked for, those allocated and those free. Never raises.
    :func:`install_oom_observer` attaches it, and can detach it.
    """
    try:
        text = (
            f"CUDA {_sizes(device, alloc, device_alloc, device_free)} torch_remat saved-for-backward report:\n"
            f"{format_oom_saved_tensors_report()}\n"
        )
    except Exception:  # noqa: BLE001 - the program is about to die of something else
        text = f"torch_remat failed to produce its report of the out-of-memory error:\n{traceback.format_exc()}"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # there is no standard error, or it is closed
        pass


def oom_report(
    error: BaseException | None = None,
    annotate: Annotate | None = None,
    sizes: tuple[int, int, int, int] | None = None,
) -> OomReport:
    """What is going on now, or was when ``error`` was raised, and what is kept.

    ``sizes`` are what the allocator's observer is called with: device, bytes asked for, allocated and free.
    """
    phase, checkpoint, region = _phase(list(_present_stack()) if error is None else _stack_of(error))
    device, requested, allocated, free = sizes if sizes is not None else (None, None, None, None)
    return OomReport(
        _rank(),
        phase,
        checkpoint,
        region,
        None if error is None else ": ".join([type(error).__name__, *str(error).splitlines()[:1]]),
        device,
        requested,
        allocated,
        free,
        saved_tensors_report(discover_autograd_roots(), annotate),
    )


class OomReports:
    """Writes a report per rank when memory runs out; made by :func:`install_oom_observer`.

    ``files`` are those written so far. Detach with :meth:`detach`, or use it as a context manager, which also reports
    an out-of-memory error that the allocator's observer was not told of (on CPU) as it leaves the ``with`` block.
    """

    def __init__(self, directory: str | os.PathLike[str], annotate: Annotate | None) -> None:
        self.directory = Path(directory)
        self.files: list[Path] = []
        self._annotate = None if annotate is None else _forgiving(annotate)
        self._told = False  # by the allocator, and not yet that the program died of it

    def attach(self) -> None:
        """Listen to the allocator."""
        with _lock:
            if self not in _attached:
                _attached.append(self)
        _hook_allocator()

    def detach(self) -> None:
        """Listen no more."""
        with _lock:
            if self in _attached:
                _attached.remove(self)

    def __enter__(self) -> OomReports:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()
        cause = None if error is None else out_of_memory(error)
        if cause is not None and not (self._told and isinstance(cause, torch.OutOfMemoryError)):
            self.write(error)
        self._told = False

    def observe(self, device: int, alloc: int, device_alloc: int, device_free: int) -> None:
        """The allocator could not allocate."""
        self._told = self.write(None, (device, alloc, device_alloc, device_free)) is not None

    def write(self, error: BaseException | None = None, sizes: tuple[int, int, int, int] | None = None) -> Path | None:
        """Write the text and, beside it, the JSON form; returns the path of the text. Never raises.

        Where no report can be made, the text says why.
        """
        path = self.directory / f"remat_oom_rank{_rank()}.txt"
        try:
            report = oom_report(error, self._annotate, sizes)
            title, text, data = report.headline, report.format(), report.to_json(indent=1)
        except Exception:  # noqa: BLE001 - the program is about to die of something else
            title = f"rank {_rank()}: out of memory, and torch_remat failed to produce its report"
            text, data = f"{title}\n{traceback.format_exc()}", None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            path.write_text(f"{now}\n{text}\n", encoding="utf-8")
            if data is not None:
                path.with_suffix(".json").write_text(data + "\n", encoding="utf-8")
        except Exception as failed:  # noqa: BLE001
            _log.error("%s; what was kept cannot be written to %s: %s", title, path, failed)
            return None
        self.files.append(path)
        _log.error("%s; what was kept is in %s", title, path)
        return path


def install_oom_observer(directory: str | os.PathLike[str] = ".", annotate: Annotate | None = None) -> OomReports:
    """Have ``remat_oom_rank<rank>.txt`` and ``.json`` written to ``directory`` when memory runs out.

    The file names the phase (forward, replay or backward), the checkpoint and the region that were running, and what
    every checkpoint keeps. A later one replaces it. Attached at once; ``detach()`` of the result ends it. Around the
    training loop as a context manager it works without CUDA, too::

        with remat.install_oom_observer("reports"):
            train()

    Args:
        directory: made where it is missing.
        annotate: see :func:`memory_snapshot_annotate`. What it raises stands in place of the label.

    Where the file is goes to the logger ``torch_remat``.
    """
    reports = OomReports(directory, annotate)
    reports.attach()
    return reports


def out_of_memory(error: BaseException) -> BaseException | None:
    """The error behind ``error``, or itself, that says that memory ran out, on whatever device."""
    for one in _causes(error):
        text = str(one).lower()
        if isinstance(one, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(one, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
        ):
            return one
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says that memory ran out, on whatever device."""
    return out_of_memory(error) is not None


def _causes(error: BaseException) -> list[BaseException]:
    """``error``, what it was raised from (pipeline stages raise their own), and so on."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in found:
        found.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return found


def _forgiving(annotate: Annotate) -> Annotate:
    def label(tensor: Any) -> Any:
        try:
            return annotate(tensor)
        except Exception as error:  # noqa: BLE001 - a report without the label is better than none
            return f"{type(error).__name__}: {error}"

    return label


_log = logging.getLogger("torch_remat")
_lock = threading.Lock()
_attached: list[OomReports] = []
_hooked = False


def _hook_allocator() -> None:
    """Attach one observer to the CUDA allocator for good; torch cannot detach any."""
    global _hooked
    attach: Callable[[Any], None] | None = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if _hooked or attach is None or not torch.cuda.is_available():
        return
    torch.cuda.init()
    attach(_tell)
    _hooked = True


def _tell(device: int, alloc: int, device_alloc: int, device_free: int) -> None:
    for reports in tuple(_attached):
        reports.observe(device, alloc, device_alloc, device_free)


def _sizes(device: int, alloc: int | None, device_alloc: int | None, device_free: int | None) -> str:
    return f"OOM on device {device}: requested {alloc} B (device_alloc={device_alloc} B, device_free={device_free} B)."


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def _present_stack() -> Iterator[FrameType]:
    """The running frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _stack_of(error: BaseException) -> list[FrameType]:
    """The frames that ``error``, and what it was raised from, went through, innermost first."""
    return [frame for one in reversed(_causes(error)) for frame, _ in [*traceback.walk_tb(one.__traceback__)][::-1]]


def _phase(frames: list[FrameType]) -> tuple[str, str | None, str | None]:
    """The phase, the checkpoint and the region that ``frames`` are in. Names are lost with the locals of a frame."""
    region: str | None = None
    for frame in frames:
        code = frame.f_code
        if code in _REGION_CALLS and region is None:
            region = frame.f_locals.get("name")
        if code is replay.__code__:
            return "replay", _name(frame.f_locals.get("tape")), region
        if code is run_forward.__code__:
            return "forward", _name(getattr(frame.f_locals.get("frame"), "tape", None)), region
    in_backward = torch._C._current_graph_task_id() != -1 or any(
        frame.f_code.co_name == "_engine_run_backward" for frame in frames
    )
    return "backward" if in_backward else "outside", None, region


def _name(tape: Tape | None) -> str | None:
    return None if tape is None else display_name(tape.name)


_REGION_CALLS = (ForwardFrame.call_region.__code__, ReplayFrame.call_region.__code__)
