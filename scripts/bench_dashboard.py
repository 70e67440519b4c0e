"""What the memory dashboard costs: its share of a step on two ranks over gloo, and what it sends and writes.

    python scripts/bench_dashboard.py            print the table
    python scripts/bench_dashboard.py --write    put it into docs/tensorboard.md, too

Two figures. *Share of a step*: the time inside everything that the dashboard does (its listeners and `step()`), by the
time of the step, median over the steps; the slower rank counts. *Step with, of one without*: medians of steps with and
without a dashboard, taken by turns in one process; on a busy machine this one is mostly noise.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "integrations"), str(PROJECT / "scripts")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from bench_common import table  # noqa: E402
from dashboard_job import Block  # noqa: E402
from torch import nn  # noqa: E402

from torch_remat_tensorboard import MemoryDashboard  # noqa: E402
from torch_remat_tensorboard.gather import Gathered  # noqa: E402
from torch_remat_tensorboard.sample import ROWS, SAMPLE_BYTES, Sample  # noqa: E402
from torch_remat_tensorboard.sampler import Sampler  # noqa: E402
from torch_remat_tensorboard.writer import RunWriter  # noqa: E402

PAGE = PROJECT / "docs" / "tensorboard.md"
MARKERS = ("<!-- cost -->", "<!-- /cost -->")
MOST = 0.01
"""The share of a step that it may cost."""

DEPTH, DIM, HIDDEN, BATCH, SEQ = 6, 256, 768, 4, 256
"""As torchtitan's debug model and `make train` have them."""

TURNS, STEPS_PER_TURN = 5, 5


def main() -> int:
    """Launch the ranks, print and perhaps write the table; 1 where the dashboard costs too much."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(PROJECT)}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.worker)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, __file__, "--worker", folder], env=environment, timeout=600, check=True)
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        written = _written(Path(folder))
    text = report(ranks, written)
    print(text)
    if options.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKERS[0])
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{rest.split(MARKERS[1])[1]}", encoding="utf-8")
    return int(max(rank["share"] for rank in ranks) > MOST)


def report(ranks: list[dict[str, float]], written: dict[int, tuple[int, float]]) -> str:
    """The table in Markdown."""
    ratio = median(rank["ratio"] for rank in ranks)
    rows = [
        ("share of a step, 2 ranks", " and ".join(f"{100 * rank['share']:.2f} %" for rank in ranks)),
        ("step with the dashboard, of one without", f"{ratio:.3f}"),
        ("sent per rank and step", f"{SAMPLE_BYTES:,} B"),
        *(
            (f"written per step, {count:,} ranks", f"{size / 1024:.1f} KiB, {share:.1f} times the work of 2 ranks")
            for count, (size, share) in written.items()
        ),
    ]
    return table(("cost", "measured"), rows)


class Clock:
    """Adds up the time in functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started

        return call


def _work(folder: Path) -> None:
    """One rank: the same steps with and without a dashboard, by turns."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(index, DIM, HIDDEN) for index in range(DEPTH)))
    x = torch.randn(BATCH, SEQ, DIM)
    clock = Clock()
    dashboard = MemoryDashboard(folder / "run", hparams={"depth": DEPTH})
    sampler = _with_clock(dashboard, clock)
    shares: list[float] = []
    times: dict[bool, list[float]] = {True: [], False: []}
    gc.disable()  # as training jobs do, whose ranks would wait for each other's collections
    for turn in range(2 * TURNS + 1):
        gc.collect()
        watched = turn % 2 == 0
        if not watched:
            sampler.detach()
        for step in range(STEPS_PER_TURN):
            clock.seconds = 0.0
            started = time.perf_counter()
            _step(model, x)
            arrived = time.perf_counter()
            dist.barrier()  # the wait for the other rank is not the dashboard's
            waited = time.perf_counter() - arrived
            if watched:
                clock.timed(dashboard.step)()
            seconds = time.perf_counter() - started - waited
            if turn and step:  # the first turn warms up, and the first step of a turn has what the one before left
                times[watched].append(seconds)
                shares += [clock.seconds / seconds] if watched else []
        if not watched:
            sampler.attach()
    dashboard.close()
    found = {"share": median(shares), "ratio": median(times[True]) / median(times[False])}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad = None


def _with_clock(dashboard: MemoryDashboard, clock: Clock) -> Sampler:
    """Count the time in what the dashboard has listen to events; returns the listener."""
    sampler = dashboard._sampler
    if sampler is None:
        raise RuntimeError("the dashboard is closed")
    sampler.detach()
    for name in ("_graph_made", "_output_reached", "_replay_started", "_replay_ended"):
        setattr(sampler, name, clock.timed(getattr(sampler, name)))
    sampler.attach()
    return sampler


def _written(folder: Path) -> dict[int, tuple[int, float]]:
    """Ranks -> bytes that one step adds to the files, and the writer's time as a multiple of that for two ranks."""
    found: dict[int, tuple[int, float]] = {}
    base = 0.0
    for ranks in (2, 32, 4096):
        regions = tuple((f"layers.*::region{row}", 1 << (20 + row)) for row in range(ROWS))
        samples = [
            Sample(rank=rank, stage=rank % 8, seconds=1, kept_bytes=rank << 20, capacity_bytes=1 << 40,
                   allocated_bytes=rank << 22, reserved_bytes=rank << 23, regions=regions)
            for rank in range(ranks)
        ]  # fmt: skip
        data = b"".join(sample.pack() for sample in samples)
        writer = RunWriter(folder / f"paper{ranks}", image_every=10)
        sizes, seconds = [], []
        for step in (11, 12, 13, 14):
            started = time.perf_counter()
            parts = (data[start : start + SAMPLE_BYTES] for start in range(0, len(data), SAMPLE_BYTES))
            writer.write(Gathered(step, 0.0, tuple(map(Sample.unpack, parts))), {})
            seconds.append(time.perf_counter() - started)
            files = (path for path in (folder / f"paper{ranks}").rglob("*") if path.is_file())
            sizes.append(sum(path.stat().st_size for path in files))
        writer.close()
        base = base or median(seconds[1:])
        found[ranks] = sizes[-1] - sizes[-2], median(seconds[1:]) / base
    return found


if __name__ == "__main__":
    sys.exit(main())
