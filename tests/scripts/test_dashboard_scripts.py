"""The scripts around the memory dashboard: a recording is redrawn, the cost has a table, make train has its command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "scripts"
sys.path[:0] = [str(SCRIPTS)]

import bench_dashboard  # noqa: E402
import train  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402


def replay(*arguments):
    """Run the replay script."""
    command = [sys.executable, str(SCRIPTS / "replay_dashboard.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_recorded_run_is_redrawn_for_every_rank(tmp_path):
    recording = SCRIPTS / "dashboard_run.jsonl"
    done = replay(recording, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"30 steps. To look at them: tensorboard --logdir {tmp_path / 'run'}\n"
    rows = [json.loads(line) for line in recording.read_text().splitlines()]
    for rank in range(4):
        events = EventAccumulator(str(tmp_path / "run" / f"rank_{rank}"), size_guidance={"scalars": 0}).Reload()
        found = {event.step: round(event.value * 2**30) for event in events.Scalars("remat/kept_gib")}
        assert found == {row["step"]: row["samples"][rank]["kept_bytes"] for row in rows if "step" in row}


def test_the_recorded_pipeline_has_its_worst_rank_at_its_start():
    """What the pictures of the page show."""
    rows = [json.loads(line) for line in (SCRIPTS / "dashboard_run.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        kept = [sample["kept_bytes"] for sample in row["samples"]]
        assert kept == sorted(kept, reverse=True)


def test_a_folder_with_files_and_a_missing_recording_are_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    done = replay(SCRIPTS / "dashboard_run.jsonl", tmp_path / "run")
    assert done.returncode == 2
    assert "has files already. To fix: remove it, or name another folder" in done.stderr
    done = replay(tmp_path / "none.jsonl", tmp_path / "other")
    assert done.returncode == 2
    assert "is no file. To fix: name the samples.jsonl of a run" in done.stderr


def test_make_train_prints_what_can_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert train._dashboard_command(tmp_path / ".cache") == (
        ".venv/bin/tensorboard --logdir .cache/runs/regions/memory"
    )
    assert train._dashboard_command(Path("/elsewhere")).endswith("--logdir /elsewhere/runs/regions/memory")


def test_the_folder_that_make_train_names_is_the_one_of_the_job():
    text = (PROJECT / "integrations" / "torch_remat_titan" / "pretrain.py").read_text(encoding="utf-8")
    assert f'MEMORY_DASHBOARD = "{train.DASHBOARD}"' in text


def test_the_table_of_the_cost_and_what_thousands_of_ranks_write(tmp_path):
    written = bench_dashboard._written(tmp_path)
    assert set(written) == {2, 32, 4096}
    assert written[4096][0] < 2 * written[2][0]  # bytes of a step do not grow with the ranks above 32
    text = bench_dashboard.report([{"share": 0.004, "ratio": 1.0}, {"share": 0.006, "ratio": 1.1}], written)
    assert "| share of a step, 2 ranks" in text
    assert "0.40 % and 0.60 %" in text
    assert "1,136 B" in text


def test_the_page_has_the_measured_cost_under_one_percent():
    page = (PROJECT / "docs" / "tensorboard.md").read_text(encoding="utf-8")
    table = page.partition(bench_dashboard.MARKERS[0])[2].partition(bench_dashboard.MARKERS[1])[0]
    (row,) = [line for line in table.splitlines() if "share of a step" in line]
    shares = [float(part) for part in row.split("|")[2].replace("%", "").split("and")]
    assert len(shares) == 2
    assert max(shares) < 100 * bench_dashboard.MOST
