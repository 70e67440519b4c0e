"""`scripts/compare_loss.py` on rows and on TensorBoard files; needs no torchtitan."""

import json
import math
import subprocess
import sys

import pytest
from titan_hosts import PROJECT, environment

SCRIPT = PROJECT / "scripts" / "compare_loss.py"


def write_rows(folder, *, ranks=2, steps=3, **changes):
    """Rows of a run; `changes` go into the last row of the last rank."""
    for rank in range(ranks):
        rows = [
            {"step": step, "loss": 8 - step / 7, "grad_norm": 1 / step, "seconds": rank + step / 3}
            for step in range(1, steps + 1)
        ]
        if rank == ranks - 1:
            rows[-1].update(changes)
        folder.mkdir(exist_ok=True)
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compare(*folders):
    command = [sys.executable, str(SCRIPT), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())


def test_equal_runs(tmp_path):
    done = compare(write_rows(tmp_path / "a"), write_rows(tmp_path / "b"))
    assert (done.returncode, done.stdout) == (
        0,
        f"6 steps: loss and gradient norm equal digit for digit in {tmp_path / 'a'} and {tmp_path / 'b'}\n",
    )


@pytest.mark.parametrize("figure", ["loss", "grad_norm"])
def test_one_last_digit_is_found(tmp_path, figure):
    value = {"loss": 8 - 3 / 7, "grad_norm": 1 / 3}[figure]
    changed = math.nextafter(value, 9)
    done = compare(write_rows(tmp_path / "a"), write_rows(tmp_path / "b", **{figure: changed}))
    assert done.returncode == 1
    assert done.stdout.startswith(f"rank1, step 3, {figure}: {value!r} and {changed!r}\n")


def test_a_missing_step_and_a_missing_rank_are_no_agreement(tmp_path):
    whole = write_rows(tmp_path / "a")
    done = compare(whole, write_rows(tmp_path / "short", steps=2))
    assert (done.returncode, "rank0, step 3: only in the first run" in done.stdout) == (1, True)
    done = compare(whole, write_rows(tmp_path / "alone", ranks=1))
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "the runs have rank0, rank1 and rank0")


def test_not_a_number_equals_itself(tmp_path):
    changes = {"loss": math.nan}
    assert compare(write_rows(tmp_path / "a", **changes), write_rows(tmp_path / "b", **changes)).returncode == 0


def test_a_folder_without_a_run_says_how_to_write_one(tmp_path):
    done = compare(tmp_path, tmp_path)
    assert done.returncode == 2
    assert f"To fix: set TORCH_REMAT_ROWS={tmp_path} for python -m torch_remat_titan.train" in done.stderr


def test_tensorboard_files_of_the_host(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed here")
    from torch.utils.tensorboard import SummaryWriter

    for run, last in (("a", 7.25), ("b", 7.25), ("c", 7.2500005)):
        writer = SummaryWriter(tmp_path / run / "tb")
        for step, loss in ((1, 8.0625), (2, last)):
            writer.add_scalar("loss_metrics/global_avg_loss", loss, step)
            writer.add_scalar("grad_norm", 0.5, step)
        writer.close()
    assert compare(tmp_path / "a", tmp_path / "b").returncode == 0
    done = compare(tmp_path / "a", tmp_path / "c")
    assert (done.returncode, "tensorboard, step 2, loss: 7.25 and 7.2500004" in done.stdout) == (1, True)
