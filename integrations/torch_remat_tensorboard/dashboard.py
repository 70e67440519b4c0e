"""`MemoryDashboard`: from any training loop to TensorBoard in three lines."""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_remat.diagnostics.oom import install_oom_observer
from torch_remat_tensorboard.gather import Gather
from torch_remat_tensorboard.sampler import Sampler
from torch_remat_tensorboard.writer import RunWriter

__all__ = ["MemoryDashboard"]


class MemoryDashboard:
    """Memory of every rank, step by step, as a run that TensorBoard shows.

        with MemoryDashboard("runs/llama") as dashboard:
            for batch in batches:
                train(batch)
                dashboard.step()

    Every rank makes one with the same arguments and calls `step` equally often. At each, every rank sends
    `SAMPLE_BYTES`, and one rank writes. Without a process group it shows this process alone. While none exists nothing
    is measured and nothing listens.

    Each step is with the system when `step` returns: what ends the job later, however, loses none. Only where the
    process group has no backend for CPU tensors is a step written at the end of the next one, or at `close`. A folder
    that cannot be written is one warning, and training goes on. A job that is started again with the same folder
    continues the run.

    When memory runs out, each rank leaves `remat_oom_rank<rank>.txt` in the folder, see
    `torch_remat.install_oom_observer`.

    Args:
        log_dir: folder of the run.
        group: process group whose ranks are shown; by default all.
        mesh: device mesh of the job, to know the pipeline stages by its dimension `pipeline_dim`.
        pipeline_dim: name of that dimension; a mesh without it has no stages.
        hparams: what the run was set to, beside the regions that it is seen to save and recompute.
        every: steps from one sample to the next. Figures are those since the last sample.
        image_every: steps from one picture of ranks and regions to the next.
        writer_rank: the rank in `group` that writes.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        group: Any = None,
        mesh: Any = None,
        pipeline_dim: str = "pp",
        hparams: dict[str, bool | float | str] | None = None,
        every: int = 1,
        image_every: int = 10,
        writer_rank: int = 0,
    ) -> None:
        for name, value in (("every", every), ("image_every", image_every)):
            if value < 1:
                raise ValueError(f"MemoryDashboard expects {name} to be at least 1, got {value}.")
        self.log_dir = Path(log_dir)
        self._group = group
        self._stage = _stage_in(mesh, pipeline_dim)
        self._hparams = dict(hparams or {})
        self._every, self._image_every, self._writer_rank = every, image_every, writer_rank
        self._calls = 0
        self._last_step: int | None = None
        self._gather: Gather | None = None
        self._writer: RunWriter | None = None
        self._sampler: Sampler | None = Sampler()
        self._sampler.attach()
        self._oom = install_oom_observer(self.log_dir)
        atexit.register(self._close_at_exit)

    def step(self, step: int | None = None) -> None:
        """A step has ended: outside of backward, on every rank.

        Args:
            step: its number. By default one more than the last; a run that is continued goes on from what it has.

        Raises:
            RuntimeError: the dashboard is closed.
        """
        if self._sampler is None:
            raise RuntimeError("MemoryDashboard.step() after close().\nTo fix: close it after the last step.")
        if self._gather is None:
            self._gather = Gather(self._group)
            if self._gather.rank == self._writer_rank:
                self._writer = RunWriter(self.log_dir, self._image_every)
        gather, writer = self._gather, self._writer
        self._calls += 1
        if step is None:
            if self._last_step is None:
                self._last_step = writer.last_step() if writer is not None else 0
            step = self._last_step + 1
        self._last_step = step
        if self._calls % self._every:
            return
        sample = self._sampler.take(gather.rank, self._stage)
        for gathered in gather.exchange(step, sample, read=writer is not None):
            if writer is not None:
                writer.write(gathered, self._all_hparams())

    def note_peak(self) -> None:
        """Call it before the training loop resets the allocator's peak, where it does that before `step`."""
        if self._sampler is not None:
            self._sampler.note_peak()

    def close(self) -> None:
        """Write what is left, and listen no more. Happens by itself when the program ends."""
        self._close(wait=True)

    def _close(self, *, wait: bool) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        sampler.detach()
        self._oom.detach()
        atexit.unregister(self._close_at_exit)
        if self._writer is not None and self._gather is not None:
            for gathered in self._gather.drain(wait=wait):
                self._writer.write(gathered, self._all_hparams(sampler))
            self._writer.close()

    def _close_at_exit(self) -> None:
        self._close(wait=False)

    def __enter__(self) -> MemoryDashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._oom.__exit__(kind, error, trace)
        # After a failure of some rank, what was on its way may never arrive.
        self._close(wait=error is None)

    def _all_hparams(self, sampler: Sampler | None = None) -> dict[str, bool | float | str]:
        """What the user said, and the policy as it was seen."""
        found: dict[str, bool | float | str] = {}
        sampler = sampler or self._sampler
        for policy, groups in sampler.policy.items() if sampler is not None else ():
            for group, regions in groups.items():
                found[f"{policy} in {group}"] = ", ".join(sorted(regions))
        if self._gather is not None:
            found["ranks"] = self._gather.ranks
        return {**found, **self._hparams}


def _stage_in(mesh: Any, dimension: str) -> int | None:
    if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
        return None
    return mesh.get_local_rank(dimension)
