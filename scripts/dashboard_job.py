"""A small pipeline job whose memory is worth a look: four ranks over gloo, 1F1B, the first stage keeps most.

    python scripts/dashboard_job.py runs/pipeline            train, and show every rank's memory there
    tensorboard --logdir runs/pipeline

Two blocks on each stage, attention and the wide projections are SAVE regions. The length of the sequences changes from
step to step, as packed documents do. `scripts/dashboard_run.jsonl` is the recording of such a job.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "integrations")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.pipelining import PipelineStage  # noqa: E402
from torch.distributed.pipelining.schedules import Schedule1F1B  # noqa: E402

import torch_remat as remat  # noqa: E402
from torch_remat_tensorboard import MemoryDashboard  # noqa: E402

DIM, HIDDEN, HEADS = 128, 384, 4
SAVED = ("core", "wo", "w1", "w3")
MICROBATCHES, BLOCKS_PER_STAGE = 8, 2


class Block(nn.Module):
    """RMSNorm, attention, RMSNorm, SwiGLU; the calls named in `SAVED` run once."""

    def __init__(self, index: int, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.index, self.dim = index, dim
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block, as a checkpoint; `x` is `[batch, seq, dim]`."""
        return remat.checkpoint(region_name=f"layers.{self.index}")(self._body)(x)

    def _body(self, x: Tensor) -> Tensor:
        split = self.wqkv(F.rms_norm(x, [self.dim])).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = split.chunk(3, 1)
        attended = self._run(F.scaled_dot_product_attention, "core", q, k, v).transpose(1, 2).flatten(2)
        x = x + self._run(self.wo, "wo", attended)
        h = F.rms_norm(x, [self.dim])
        return x + self._run(self.w2, "w2", F.silu(self._run(self.w1, "w1", h)) * self._run(self.w3, "w3", h))

    def _run(self, function: Any, name: str, *args: Tensor) -> Tensor:
        return remat.region(function, name, recompute=name not in SAVED)(*args)


def main() -> int:
    """Launch the job, or be one of its ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log_dir", type=Path, help="folder of the run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        _train(options.log_dir, options.steps)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    arguments = [__file__, str(options.log_dir.absolute()), f"--steps={options.steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    status = subprocess.run([*command, *arguments], env=environment, timeout=900, check=False).returncode
    if status == 0:
        print(f"tensorboard --logdir {options.log_dir}")
    return status


def _train(log_dir: Path, steps: int) -> None:
    """The work of one rank."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    module = nn.Sequential(*(Block(BLOCKS_PER_STAGE * rank + index) for index in range(BLOCKS_PER_STAGE)))
    optimizer = torch.optim.AdamW(module.parameters())
    lengths = random.Random(0)  # the same on every rank
    with MemoryDashboard(log_dir, mesh=mesh, hparams={"schedule": "1F1B", "microbatches": MICROBATCHES}) as dashboard:
        for _ in range(steps):
            _step(module, rank, ranks, 16 * lengths.randint(4, 12))
            optimizer.step()
            optimizer.zero_grad()
            dashboard.step()
    dist.barrier()
    dist.destroy_process_group()


def _step(module: nn.Module, rank: int, ranks: int, length: int) -> None:
    """Forward and backward of all microbatches of one step."""
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean())
    x = torch.randn(MICROBATCHES, length, DIM)
    if rank == 0:
        schedule.step(x)
    elif rank == ranks - 1:
        schedule.step(target=x)
    else:
        schedule.step()


if __name__ == "__main__":
    sys.exit(main())
