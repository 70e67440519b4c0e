"""One JSON row per step and rank, with every digit of the loss and the gradient norm; both versions of torchtitan.

The launcher writes them to `<folder>/rank<r>.jsonl` when the environment variable `TORCH_REMAT_ROWS` names a folder.
`scripts/compare_loss.py` compares two such folders. With `TORCH_REMAT_ROWS_COLLECTIVES=1` the collectives of each step
are counted as well, by phase, which costs time.
"""

import contextlib
import importlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from torch_remat.runtime import events
from torch_remat.testing import CountCollectives

FOLDER = "TORCH_REMAT_ROWS"
COLLECTIVES = "TORCH_REMAT_ROWS_COLLECTIVES"


def write_rows_if_asked() -> None:
    """Install the writer if the environment asks for rows; after torchtitan can be imported."""
    folder = os.environ.get(FOLDER)
    if folder:
        _Writer(Path(folder)).install()


class _Writer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._counts: Counter[str] = Counter()
        self._collectives: CountCollectives | None = None
        self._started = time.perf_counter()

    def install(self) -> None:
        """Put this writer behind the host's metrics and around its training step."""
        metrics: Any = importlib.import_module("torchtitan.components.metrics").MetricsProcessor
        log = metrics.log

        def logged(
            processor: Any,
            step: int,
            global_avg_loss: float,
            global_max_loss: float,
            grad_norm: float,
            *rest: Any,
            **more: Any,
        ) -> Any:
            self._write(step, global_avg_loss, grad_norm)
            return log(processor, step, global_avg_loss, global_max_loss, grad_norm, *rest, **more)

        metrics.log = logged
        trainer: Any = self._trainer()
        train_step = trainer.train_step

        def stepped(one: Any, *args: Any, **kwargs: Any) -> Any:
            self._counts.clear()
            self._started = time.perf_counter()
            self._collectives = CountCollectives() if os.environ.get(COLLECTIVES) else None
            with self._collectives or contextlib.nullcontext():
                return train_step(one, *args, **kwargs)

        trainer.train_step = stepped
        events.forward_ended.subscribe(lambda tape: self._counts.update(["forwards"]))
        events.replay_started.subscribe(lambda tape: self._counts.update(["replays"]))

    @staticmethod
    def _trainer() -> Any:
        return importlib.import_module("torchtitan.train").Trainer

    def _write(self, step: int, loss: float, grad_norm: float) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"rank{torch.distributed.get_rank()}.jsonl").open("w", buffering=1)
        row = {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "seconds": time.perf_counter() - self._started,
            "forwards": self._counts["forwards"],
            "replays": self._counts["replays"],
        }
        if self._collectives is not None:
            phases = ("forward", "replay", "backward")
            row["collectives"] = {phase: self._collectives.counts(phase) for phase in phases}
        self._file.write(json.dumps(row) + "\n")
