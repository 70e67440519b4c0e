"""The main job as torchtitan configurations: the Llama 3 debug model, the same steps under three policies.

Chosen with `--module torch_remat_titan.pretrain --config none|full|regions`. Seed, data order and kernels are fixed,
so the loss and the gradient norm of every step must be equal in the three, digit for digit. Each rank writes one JSON
row per step to `<dump_folder>/metrics/rank<r>.jsonl`; `scripts/train.py` runs the three and reads the rows.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from torch_remat_titan.activation_checkpoint import RematAC
from torch_remat_titan.cpu import has_accelerator
from torch_remat_titan.measure import BlockMeter

LLAMA3_SAVE = ("attention.inner_attention", "attention.wo", "feed_forward.*")
"""Attention core, output projection and feed-forward projections of torchtitan's Llama 3 block."""

MEMORY_DASHBOARD = "memory"
"""Folder of the run for TensorBoard, below that of the job with regions."""

STEPS = 20
SEED = 7
MEASURED_STEP = 3
"""The step whose forward is watched for kept bytes: late enough that every block has run before."""


class RowMetrics(MetricsProcessor):
    """torchtitan's metrics, and one JSON row per step and rank with every digit of the loss and the gradient norm."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As in torchtitan; `log_freq` must be 1 for a row per step."""

    meter: BlockMeter

    def __init__(self, config: "RowMetrics.Config", *, dump_folder: str = "./outputs", **options: Any) -> None:
        super().__init__(config, dump_folder=dump_folder, **options)
        path = Path(dump_folder) / "metrics" / f"rank{torch.distributed.get_rank()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = path.open("w", encoding="utf-8", buffering=1)
        self._step_started = time.perf_counter()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log as torchtitan does and write this step's row."""
        row = {
            "step": step,
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "tokens": self.ntokens_since_last_log,
            "seconds": time.perf_counter() - self._step_started,
            "kept_bytes": self.meter.kept_bytes if step == MEASURED_STEP else None,
            "blocks": self.meter.block_count,
            "forwards": sum(self.meter.forwards.values()),
            "replays": sum(self.meter.replays.values()),
        }
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)
        self._rows.write(json.dumps(row) + "\n")
        self._step_started = time.perf_counter()

    def close(self) -> None:
        """Close the rows and torchtitan's own loggers."""
        self._rows.close()
        super().close()


class PretrainTrainer(Trainer):
    """torchtitan's trainer with a `BlockMeter` on the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's trainer config whose activation checkpointing is `RematAC` or nothing."""

        activation_checkpoint: RematAC.Config | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
        metrics: RowMetrics.Config = field(  # pyright: ignore[reportIncompatibleVariableOverride]
            default_factory=lambda: RowMetrics.Config(log_freq=1)
        )

    metrics_processor: RowMetrics  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: "PretrainTrainer.Config") -> None:
        super().__init__(config)
        self.meter = BlockMeter(self.model_parts[0])
        self.metrics_processor.meter = self.meter

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        """One step, counted from zero; the measured one also takes the kept bytes."""
        self.meter.reset_counts()
        if self.step == MEASURED_STEP:
            self.meter.arm()
        super().train_step(data_iterator)


def _pretrain(activation_checkpoint: RematAC.Config | None) -> PretrainTrainer.Config:
    """The job under one policy; sizes follow what the host trains on."""
    host = llama3_debugmodel()
    on_cpu = not has_accelerator()
    config = PretrainTrainer.Config(
        activation_checkpoint=activation_checkpoint,
        loss=host.loss,
        model_spec=host.model_spec,
        optimizer=host.optimizer,
        dataloader=host.dataloader,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear"),
        training=TrainingConfig(local_batch_size=4 if on_cpu else 8, seq_len=256 if on_cpu else 2048, steps=STEPS),
    )
    config.training.disable_cuda_graphs = True  # the meter looks at storages in the middle of a step
    if on_cpu:
        config.training.mixed_precision_param = "float32"  # half precision is emulated, and slower, on most CPUs
    config.debug.seed = SEED
    config.debug.deterministic = True
    config.override.imports = ["torch_remat_titan.attention.sdpa_attention"]
    return config


def none() -> PretrainTrainer.Config:
    """No checkpointing."""
    return _pretrain(None)


def full() -> PretrainTrainer.Config:
    """Full recomputation: every block is a checkpoint with no SAVE region."""
    return _pretrain(RematAC.Config(preset="none"))


def regions() -> PretrainTrainer.Config:
    """Attention core, output projection and feed-forward projections are SAVE regions; the rest is recomputed.

    The job shows the memory of its ranks in TensorBoard.
    """
    return _pretrain(RematAC.Config(save_regions=list(LLAMA3_SAVE), memory_dashboard=MEMORY_DASHBOARD))
