"""What one rank measures: it listens to the library's events and gives a sample at the end of a step.

In forward it reads off what a checkpoint keeps when its body has returned. In backward it does what the events of
replay ask of a listener: look at what was rebuilt, and the clock. It holds no tensor.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from torch_remat.diagnostics.oom import is_out_of_memory
from torch_remat.runtime import events
from torch_remat.runtime.tape import Tape
from torch_remat_tensorboard.device import Device, Reading
from torch_remat_tensorboard.kept import count_kept
from torch_remat_tensorboard.names import group_of
from torch_remat_tensorboard.resident import Resident
from torch_remat_tensorboard.sample import Sample, largest_rows
from torch_remat_tensorboard.storages import storages_of
from torch_remat_tensorboard.weights import Weights

__all__ = ["Sampler"]

_no_torch_functions = torch._C.DisableTorchFunction

_LOOKS = 2
"""At the start of so many steps frozen parameters are looked for: FSDP makes those it computes with in the first."""


class Sampler:
    """Measures this process from `attach` to `detach`.

    Attributes:
        policy: `"save"` or `"recompute"` -> block group -> names of the regions in the first sample.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.policy: dict[str, dict[str, set[str]]] = {"save": {}, "recompute": {}}
        self._device = device or Device()
        self._capacity_bytes: int | None = None
        self._timer = self._device.timer()
        self._lock = threading.Lock()  # replays run in the threads of backward
        self._kept, self._packed, self._rebuilt = Resident(), Resident(), Resident()
        self._weights = Weights()
        self._looks = self._samples = 0
        self._tapes: set[weakref.ref[Tape]] = set()
        self._running: dict[int, Any] = {}  # identity of a tape in replay -> start of the replay
        self._before = self._device.read()
        self._since = time.perf_counter()
        self._start()

    def _start(self) -> None:
        """Begin to measure the next sample."""
        self._most_kept = self._most_packed = self._most_rebuilt = 0
        self._regions: dict[str, int] = {}
        self._replays = self._errors = 0
        self._allocated: int | None = None

    def attach(self) -> None:
        """Listen."""
        for event, listener in self._listeners():
            event.subscribe(listener)

    def detach(self) -> None:
        """Listen no more."""
        for event, listener in self._listeners():
            event.unsubscribe(listener)

    def _listeners(self) -> tuple[tuple[events.Event, Any], ...]:
        return (
            (events.graph_made, self._graph_made),
            (events.output_reached, self._output_reached),
            (events.replay_started, self._replay_started),
            (events.replay_ended, self._replay_ended),
        )

    def note_peak(self) -> None:
        """Take down the allocator's peak now; for a training loop that resets it before the step ends."""
        allocated = self._device.read().allocated_bytes
        if allocated is not None:
            self._allocated = max(allocated, self._allocated or 0)

    def take(self, rank: int = 0, stage: int | None = None) -> Sample:
        """The sample since the last one."""
        self.note_peak()
        if self._capacity_bytes is None:
            self._capacity_bytes = self._device.capacity_bytes()
        now, reading = time.perf_counter(), self._device.read()
        with self._lock:
            sample = Sample(
                rank=rank,
                stage=stage,
                seconds=now - self._since,
                kept_bytes=self._most_kept,
                rebuilt_bytes=self._most_rebuilt,
                offloaded_bytes=self._most_packed,
                allocated_bytes=self._allocated,
                reserved_bytes=reading.reserved_bytes,
                resident_bytes=reading.resident_bytes,
                capacity_bytes=self._capacity_bytes,
                replay_seconds=self._timer.take(),
                replays=self._replays,
                retries=reading.retries - self._before.retries,
                out_of_memory=self._out_of_memory(reading),
                regions=largest_rows(self._regions),
            )
            self._before, self._since = reading, now
            self._samples += 1
            self._start()
            for resident in (self._kept, self._packed, self._rebuilt):
                resident.prune()
            self._note_peaks()  # what is alive from here on counts for the next sample as well
        return sample

    def _out_of_memory(self, reading: Reading) -> int:
        """As the allocator counts it, or the replays that ended so where there is no such count."""
        counted = reading.out_of_memory - self._before.out_of_memory
        return counted if reading.allocated_bytes is not None else self._errors

    def _graph_made(self, tape: Tape, nodes: list[Any]) -> None:
        with self._lock:
            self._prune()
            if self._looks <= self._samples and self._looks < _LOOKS:
                self._weights.look_for_all()
                self._looks += 1
            with _no_torch_functions():
                count_kept(tape, nodes, self._weights, self._kept, self._packed)
            self._tapes.add(weakref.ref(tape, self._died))
            self._note_peaks()
            if not self._samples:
                self._note_policy(tape)

    def _note_policy(self, tape: Tape) -> None:
        group = group_of(tape.name)
        for record in tape.order:
            policy = self.policy["recompute" if record.recompute else "save"]
            policy.setdefault(group, set()).add(record.name)

    def _prune(self) -> None:
        for resident in (self._kept, self._packed):
            if resident.stale:
                resident.prune()

    def _note_peaks(self) -> None:
        if self._kept.total > self._most_kept:
            self._most_kept = self._kept.total
            self._regions = dict(self._kept.sizes)
        self._most_packed = max(self._most_packed, self._packed.total)
        self._most_rebuilt = max(self._most_rebuilt, self._rebuilt.total)

    def _died(self, reference: weakref.ref[Tape]) -> None:
        self._tapes.discard(reference)
        self._kept.stale = self._packed.stale = True

    def _output_reached(self) -> None:
        self._kept.stale = self._packed.stale = True

    def _replay_started(self, tape: Tape) -> None:
        self._running[id(tape)] = self._timer.start()

    def _replay_ended(self, tape: Tape, error: BaseException | None) -> None:
        started = self._running.pop(id(tape), None)
        with self._lock:
            if started is not None:
                self._timer.end(started)
            self._replays += 1
            if error is not None:
                self._errors += is_out_of_memory(error)
                return
            self._rebuilt.prune()
            with _no_torch_functions():
                for slot in tape.living_slots():
                    self._count_rebuilt(slot.tensor)
            self._note_peaks()

    def _count_rebuilt(self, tensor: Tensor | None) -> None:
        for storage in storages_of(tensor) if tensor is not None else ():
            address = storage._cdata
            if address not in self._kept and address not in self._weights:
                self._rebuilt.add(storage, "")
