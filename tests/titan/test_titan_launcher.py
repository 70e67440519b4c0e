"""The main job's launcher: what it concludes from the rows that the ranks wrote, and one short real run."""

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from titan_hosts import needs_0_3

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT / "scripts" / "train.py"


@pytest.fixture(scope="module")
def launcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("main_job_launcher", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(steps: int = 6, replays: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """One rank's rows; `changes` go into the last one."""
    found = [
        {
            "step": step,
            "loss": 8 - step / 7,
            "grad_norm": 1 / step,
            "tokens": 1024,
            "seconds": 0.5 if step > 3 else 9.0,
            "kept_bytes": 4096 if step == 3 else None,
            "blocks": 6,
            "forwards": 6,
            "replays": replays,
        }
        for step in range(1, steps + 1)
    ]
    found[-1].update(changes)
    return found


def test_equal_rows_are_no_difference(launcher):
    results = [launcher.RunResult(name, [rows(), rows()]) for name in launcher.RUNS]
    assert launcher._differences(results) == []


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
def test_one_different_last_digit_is_named_with_run_rank_and_step(launcher, figure):
    value = rows()[-1][figure]
    changed = math.nextafter(value, 9)
    results = [
        launcher.RunResult("none", [rows(), rows()]),
        launcher.RunResult("full", [rows(), rows()]),
        launcher.RunResult("regions", [rows(), rows(**{figure: changed})]),
    ]
    assert launcher._differences(results) == [
        f"regions, rank 1, step 6, {figure}: expected {value!r} as in no checkpointing, got {changed!r}"
    ]


def test_the_table_shows_all_digits_and_the_speed_after_warm_up(launcher):
    results = [
        launcher.RunResult("none", [rows(), rows()]),
        launcher.RunResult("regions", [rows(replays=6), rows(replays=6)]),
    ]
    loss, norm = repr(8 - 6 / 7), repr(1 / 6)
    assert launcher._table(results) == (
        "run               final loss         gradient norm        tokens/s  bytes kept after forward, per rank  "
        "replays per step\n"
        "----------------  -----------------  -------------------  --------  ----------------------------------  "
        "----------------\n"
        f"no checkpointing  {loss}  {norm}  4,096     4,096 4,096                         0 (6 blocks)\n"
        f"regions           {loss}  {norm}  4,096     4,096 4,096                         6 (6 blocks)"
    )


def test_a_row_that_is_still_being_written_is_not_read(launcher, tmp_path):
    path = tmp_path / "rank0.jsonl"
    assert launcher._read_rows(path) == []
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert launcher._read_rows(path) == [{"step": 1}]


def launch(cache: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the launcher itself, with few steps."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--steps=5", f"--cache={cache}", *options],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )


def processes_that_name(path: Path) -> list[str]:
    """Command lines of running processes with `path` in them."""
    found = []
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            found.append(command_line.read_bytes().replace(b"\0", b" ").decode())
    return [text for text in found if str(path) in text]


@needs_0_3
@pytest.mark.slow
def test_a_short_real_run_ends_with_equal_digits(tmp_path):
    done = launch(tmp_path, "--training.seq_len=64", "--training.local_batch_size=2")
    assert done.returncode == 0, done.stdout + done.stderr
    *_, none, full, regions, _, verdict, dashboard = done.stdout.splitlines()
    assert verdict.endswith("equal digit for digit in the three.")
    assert dashboard.startswith("Memory of every rank, step by step: ")
    figures = [line.split("  ") for line in (none, full, regions)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in figures]
    assert [line[0] for line in cells] == ["no checkpointing", "full recomputation", "regions"]
    assert len({(line[1], line[2]) for line in cells}) == 1
    kept = [[int(size.replace(",", "")) for size in line[4].split()] for line in cells]
    assert all(full_bytes < some < all_bytes for all_bytes, full_bytes, some in zip(*kept, strict=True))
    # Seven hidden states of the given size, in float32 or on GPUs bfloat16: the arguments reached the trainer.
    assert {size / (7 * 2 * 64 * 256) for size in kept[1]} in ({4}, {2})
    assert [line[5] for line in cells] == ["0 (6 blocks)", "6 (6 blocks)", "6 (6 blocks)"]


@needs_0_3
@pytest.mark.slow
def test_a_run_that_is_not_finished_in_its_time_fails_and_says_so(tmp_path):
    done = launch(tmp_path, "--run-timeout=3")
    assert done.returncode == 1
    assert "no checkpointing FAILED: not finished after 3 s, at step 0 of 5." in done.stderr
    assert processes_that_name(tmp_path) == []


@needs_0_3
@pytest.mark.slow
def test_a_run_that_crashes_fails_and_shows_its_log(tmp_path):
    broken = tmp_path / "torchtitan"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('torchtitan is broken here')\n")
    done = launch(tmp_path / "cache", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "RuntimeError: torchtitan is broken here" in done.stderr
    assert "no checkpointing FAILED: steps finished per rank: [0, 0], expected 5; exit status 1." in done.stderr
    assert f"To fix: read the whole log, {tmp_path / 'cache' / 'runs' / 'none' / 'log.txt'}" in done.stderr
