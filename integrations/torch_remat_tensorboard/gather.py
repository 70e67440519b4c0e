"""One small all-gather at the end of a step: every rank's sample, of fixed size, to every rank.

Rules:
 1. Every rank calls `exchange` equally often, outside of backward.
 2. Where the process group has a backend for CPU tensors, those are sent, and a device is not asked to stop.
 3. Elsewhere the device sends, in its own order, and the host does not wait: what arrives is read one call later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_remat_tensorboard.device import current_accelerator
from torch_remat_tensorboard.sample import SAMPLE_BYTES, Sample

__all__ = ["Gather", "Gathered"]


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.14


@dataclass(frozen=True)
class Gathered:
    """The samples of all ranks of one step, in rank order; `time` is when the step ended, in seconds of the epoch."""

    step: int
    time: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class _Sent:
    """An all-gather on its way. `arrived` is an event of the device, None where everything is there already."""

    step: int
    time: float
    received: Tensor
    arrived: Any

    def result(self) -> Gathered:
        data = self.received.numpy().tobytes()
        parts = [data[start : start + SAMPLE_BYTES] for start in range(0, len(data), SAMPLE_BYTES)]
        return Gathered(self.step, self.time, tuple(map(Sample.unpack, parts)))


class Gather:
    """The exchange of samples in one process group; without any, with oneself.

    Attributes:
        rank: of this process in the group.
        ranks: how many there are.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._pending: _Sent | None = None
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if distributed else 0
        self.ranks = dist.get_world_size(group) if distributed else 1
        self._device = _device_of(group) if self.ranks > 1 else torch.device("cpu")

    def exchange(self, step: int, sample: Sample, *, read: bool = True) -> list[Gathered]:
        """Send this rank's sample; what has arrived from all since the last call, where that is to be read."""
        now = time.time()
        if self.ranks == 1:
            return [Gathered(step, now, (sample,))]
        mine = torch.frombuffer(bytearray(sample.pack()), dtype=torch.uint8).to(self._device)
        received = torch.empty(self.ranks * SAMPLE_BYTES, dtype=torch.uint8, device=self._device)
        _all_gather(received, mine, group=self._group)
        if not read:
            return []
        if self._device.type == "cpu":
            return [_Sent(step, now, received, None).result()]
        before = self.drain(wait=True)
        on_host = torch.empty(received.shape, dtype=torch.uint8, pin_memory=True)
        on_host.copy_(received, non_blocking=True)
        arrived = torch.Event(self._device)
        arrived.record()
        self._pending = _Sent(step, now, on_host, arrived)
        return before

    def drain(self, *, wait: bool) -> list[Gathered]:
        """What is still on its way. Without `wait` only if it is there by now: after a failure it may never be."""
        pending, self._pending = self._pending, None
        if pending is None or not (wait or pending.arrived.query()):
            return []
        pending.arrived.synchronize()
        return [pending.result()]


def _device_of(group: Any) -> torch.device:
    """Where tensors must be for the group's backend: on the CPU, where it takes them there (rule 2)."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return current_accelerator()
