"""Count collectives and body runs of each parallelism without checkpointing, with torch's checkpoint and with ours.

    python scripts/bench_distributed.py            print the table
    python scripts/bench_distributed.py --write    put it into docs/distributed.md, too

The models and the steps are those of `multi_gpu_tests/`, which assert the same counts and equal numbers. Over
gloo on the CPU, in three `torchrun` launches (two, four, eight ranks); counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
TESTS = PROJECT / "multi_gpu_tests"
PAGE = PROJECT / "docs" / "distributed.md"
MARKERS = ("<!-- counts -->", "<!-- /counts -->")
SETS: dict[int, tuple[str, ...]] = {
    2: (
        "test_ddp",
        "test_fsdp2_units",
        "test_tensor_parallel",
        "test_context_expert_parallel",
        "test_async_collectives",
        "test_pipeline",
    ),
    4: ("test_mixed",),
    8: ("test_three_at_once",),
}
DIMENSIONS = {2: ("inner",), 4: ("outer", "inner"), 8: ("outer", "data", "tensor")}
"""Names of the dimensions of the mesh that the cases get, two ranks each."""
RUNS = ("none", "torch", "full", "regions")
HEADINGS = ("no checkpointing", "`torch.utils.checkpoint`", "ours, nothing saved", "ours, regions")
SHORT = {
    "all_gather": "gather",
    "all_reduce": "reduce",
    "all_to_all": "all-to-all",
    "reduce_scatter": "scatter",
    "send": "send",
    "recv": "receive",
}


def main() -> int:
    """Launch the workers, print and perhaps write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(PROJECT)}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(Path(options.worker))
    table = format_table(measure())
    print(table)
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        PAGE.write_text(f"{before}{MARKERS[0]}\n\n{table}\n\n{MARKERS[1]}{after}", encoding="utf-8")
    return 0


def measure() -> dict[str, dict[str, Any]]:
    """Composition to run to counts."""
    found: dict[str, dict[str, Any]] = {}
    for ranks in SETS:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "counts.json"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": f"{PROJECT}:{TESTS}"}
            command = [*torchrun, str(Path(__file__)), "--worker", str(result)]
            subprocess.run(command, check=True, env=environment, cwd=PROJECT, timeout=900)
            found.update(json.loads(result.read_text(encoding="utf-8")))
    return found


def work(result: Path) -> int:
    """One rank of a launch: measure every case, write the counts of rank 0."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks, device = dist.get_world_size(), torch.device("cpu")
    names = DIMENSIONS[ranks]
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    found: dict[str, dict[str, Any]] = {}
    for name in SETS[ranks]:
        for title, case in importlib.import_module(name).CASES.items():
            found[title] = {run: counts_of(case, run, device, mesh) for run in RUNS}
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
    return 0


def counts_of(case: Any, run: str, device: Any, mesh: Any) -> dict[str, Any]:
    """What one step of ``case`` issued and ran on this rank."""
    measured = case(run, device, mesh)
    bodies = sorted({count / measured.microbatches for count in measured.bodies.values()})
    return {"collectives": measured.counts(), "bodies": bodies}


def format_table(found: dict[str, dict[str, Any]]) -> str:
    """The counts as a Markdown table: collectives, then how often each body ran."""
    rows = [f"| | {' | '.join(HEADINGS)} |", "|---" * 5 + "|"]
    for title, runs in found.items():
        rows.append(f"| {title} | {' | '.join(cell(runs[run]) for run in RUNS)} |")
    return "\n".join(rows)


def cell(counts: dict[str, Any]) -> str:
    """One cell: ``gather 6, scatter 3; body 2``."""
    collectives = ", ".join(f"{SHORT.get(kind, kind)} {count}" for kind, count in counts["collectives"].items())
    bodies = " to ".join(f"{count:g}" for count in counts["bodies"])
    return f"{collectives or 'none'}; body {bodies}"


if __name__ == "__main__":
    sys.exit(main())
