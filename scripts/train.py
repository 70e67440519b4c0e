"""The main job: torchtitan's Llama 3 debug model, the same steps without checkpointing, recomputed, with regions.

Runs the three under torchrun (every GPU over NCCL, or two CPU ranks over gloo), shows each step as it ends, and ends
with one table and the command that shows the memory of every rank in TensorBoard. Exit status 1 when a run failed or a
loss or gradient norm of any step differs in any digit.

A run is judged by the rows its ranks wrote, one per step, not by the exit status of its teardown: a gloo thread can
abort a process that has finished training. A run that ended before its last step has failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "integrations")]

from torch_remat_titan.text import TextAssets, prepare_text  # noqa: E402  (the path is set above)

RUNS = {"none": "no checkpointing", "full": "full recomputation", "regions": "regions"}
DASHBOARD = "memory"
"""The folder in which the run with regions shows the memory of its ranks."""

WARM_UP_STEPS = 3
"""Steps left out of the speed: first allocations, and the one whose forward is watched for kept bytes."""

Rows = list[dict[str, Any]]


class RunError(Exception):
    """A run ended, or was ended, before its last step."""


@dataclass(frozen=True)
class RunResult:
    """What one run's rows say.

    Attributes:
        name: key of `RUNS`.
        ranks: for each rank, its rows in step order.
    """

    name: str
    ranks: list[Rows]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks by the median step time after the warm-up."""
        tokens = sum(rows[-1]["tokens"] for rows in self.ranks)
        return tokens / median(row["seconds"] for row in self.ranks[0][WARM_UP_STEPS:])

    @property
    def kept_bytes(self) -> list[int]:
        """Bytes kept after forward, per rank."""
        return [next(row["kept_bytes"] for row in rows if row["kept_bytes"] is not None) for rows in self.ranks]

    @property
    def replays(self) -> set[tuple[int, int]]:
        """The distinct (replays, blocks) of a step, over all steps and ranks."""
        return {(row["replays"], row["blocks"]) for rows in self.ranks for row in rows}


def main() -> int:
    """Run the job; returns the exit status."""
    options = _parse_options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a running job is ended too
    ranks, device = _ranks()
    text = prepare_text(options.cache / "text")
    print(f"Llama 3 debug model, {options.steps} steps, {ranks} {device} ranks, text: the Python documentation topics")
    results = []
    for name, title in RUNS.items():
        print(f"\n== {title}", flush=True)
        try:
            results.append(_run(name, ranks, text, options))
        except RunError as failure:
            print(f"\n{title} FAILED: {failure}", file=sys.stderr)
            return 1
    print("\n" + _table(results))
    differences = _differences(results)
    if differences:
        print("\nFAILED: the runs do not agree.\n" + "\n".join(differences), file=sys.stderr)
        return 1
    print(f"\nLoss and gradient norm of {options.steps} steps on {ranks} ranks: equal digit for digit in the three.")
    print(f"Memory of every rank, step by step: {_dashboard_command(options.cache)}")
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Further arguments go to torchtitan's trainer in all three runs, such as --training.seq_len=512.",
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (default 20, at least 5)")
    parser.add_argument("--run-timeout", type=float, default=900.0, help="seconds a run may take (default 900)")
    parser.add_argument("--cache", type=Path, default=PROJECT / ".cache", help="folder for text, tokenizer, logs")
    options, options.titan_arguments = parser.parse_known_args()
    if options.steps <= WARM_UP_STEPS + 1:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}, got {options.steps}")
    return options


def _ranks() -> tuple[int, str]:
    """How many processes to start, and what each trains on."""
    import torch

    if torch.accelerator.is_available():
        return torch.accelerator.device_count(), torch.accelerator.current_accelerator(check_available=True).type  # pyright: ignore[reportOptionalMemberAccess]
    return 2, "CPU"


def _run(name: str, ranks: int, text: TextAssets, options: argparse.Namespace) -> RunResult:
    """Run one configuration, printing each step when rank 0 has written its row."""
    folder = options.cache / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *("-m", "torch_remat_titan", "--module", "torch_remat_titan.pretrain", "--config", name),
        f"--hf-assets-path={text.tokenizer}",
        f"--dataloader.dataset-path={text.dataset}",
        f"--dump-folder={folder}",
        f"--training.steps={options.steps}",
        *options.titan_arguments,
    ]
    log_path = folder / "log.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(options.cache),
            start_new_session=True,
        )
        try:
            _show_progress(process, folder, options)
        finally:
            _end(process)
    paths = [folder / "metrics" / f"rank{rank}.jsonl" for rank in range(ranks)]
    rows = [_read_rows(path) for path in paths]
    finished = [len(one) for one in rows]
    if any(count != options.steps for count in finished):
        _print_tail(log_path)
        raise RunError(
            f"steps finished per rank: {finished}, expected {options.steps}; exit status {process.returncode}.\n"
            f"To fix: read the whole log, {log_path}"
        )
    return RunResult(name, rows)


def _environment(cache: Path) -> dict[str, str]:
    """This process's environment with our packages importable and every cache inside the project."""
    path = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HOME": str(cache / "huggingface"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
    }


def _show_progress(process: subprocess.Popen[bytes], folder: Path, options: argparse.Namespace) -> None:
    """Print rank 0's rows as they appear, until the process ends or its time is up."""
    path = folder / "metrics" / "rank0.jsonl"
    deadline = time.monotonic() + options.run_timeout
    shown = 0
    while True:
        ended = process.poll() is not None
        rows = _read_rows(path)
        for row in rows[shown:]:
            print(
                f"step {row['step']:3d}/{options.steps}  loss {row['loss']:.5f}  grad norm {row['grad_norm']:.4f}  "
                f"{row['seconds']:.2f} s  {row['replays']} replays",
                flush=True,
            )
        shown = len(rows)
        if ended:
            return
        if time.monotonic() > deadline:
            _print_tail(folder / "log.txt")
            raise RunError(
                f"not finished after {options.run_timeout:.0f} s, at step {shown} of {options.steps}.\n"
                "To fix: look for a hang in the log above, or allow more time with --run-timeout"
            )
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no rank behind: torchrun hands a SIGTERM on to its ranks, which are in sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read_rows(path: Path) -> Rows:
    """The complete rows in a file that may still be written to."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _print_tail(log_path: Path, lines: int = 40) -> None:
    """The end of what a failed run's ranks wrote, before torchrun's own words about their end."""
    written = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    ends = [number for number, line in enumerate(written) if "torch/distributed/elastic/" in line]
    print(f"\n-- last lines of {log_path}", file=sys.stderr)
    print("\n".join(written[: ends[0] if ends else None][-lines:]), file=sys.stderr)


def _table(results: list[RunResult]) -> str:
    """One row per run; the loss and gradient norm of the last step with all their digits."""
    head = ("run", "final loss", "gradient norm", "tokens/s", "bytes kept after forward, per rank", "replays per step")
    body = []
    for result in results:
        last = result.ranks[0][-1]
        kept = " ".join(f"{size:,}" for size in result.kept_bytes)
        replays = ", ".join(f"{count} ({blocks} blocks)" for count, blocks in sorted(result.replays))
        speed = f"{result.tokens_per_second:,.0f}"
        body.append((RUNS[result.name], repr(last["loss"]), repr(last["grad_norm"]), speed, kept, replays))
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *body)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _dashboard_command(cache: Path) -> str:
    """What opens the dashboard of the run with regions, as short as it can be typed from here."""
    parts = (Path(sys.executable).parent / "tensorboard", cache / "runs" / "regions" / DASHBOARD)
    here = Path.cwd()
    program, folder = (part.relative_to(here) if part.is_relative_to(here) else part for part in parts)
    return f"{program} --logdir {folder}"


def _differences(results: list[RunResult]) -> list[str]:
    """For each run that does not agree with the first one, the first step and figure that differ."""
    found = []
    first, *others = results
    for other in others:
        for rank, (expected, got) in enumerate(zip(first.ranks, other.ranks, strict=True)):
            for row, other_row in zip(expected, got, strict=True):
                names = [name for name in ("step", "loss", "grad_norm") if repr(row[name]) != repr(other_row[name])]
                if names:
                    found.append(
                        f"{RUNS[other.name]}, rank {rank}, step {row['step']}, {names[0]}: "
                        f"expected {row[names[0]]!r} as in {RUNS[first.name]}, got {other_row[names[0]]!r}"
                    )
                    break
    return found


if __name__ == "__main__":
    sys.exit(main())
