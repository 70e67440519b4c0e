"""Nothing is lost and training goes on: exceptions, exits, kills, folders that cannot be written, full disks."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from boards import Board, batch, stack

import torch_remat as remat
from torch_remat_tensorboard import MemoryDashboard

PROJECT = Path(__file__).resolve().parents[2]


def start(code, *arguments, **options):
    """Run `code`, with the model and its batches at hand, in a process of its own."""
    paths = [PROJECT, PROJECT / "integrations", PROJECT / "tests", Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    begin = "import sys\nfrom boards import batch, stack\nfrom torch_remat_tensorboard import MemoryDashboard\n"
    return subprocess.Popen(
        [sys.executable, "-c", begin + code, *map(str, arguments)], env=environment, text=True, **options
    )


def finish(code, *arguments):
    """The exit status and what was written to the standard error."""
    process = start(code, *arguments, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def steps_in(folder):
    """Steps that the run has."""
    return Board(folder).steps


def test_an_exception_leaves_every_step_and_passes_on(tmp_path):
    def train():
        with MemoryDashboard(tmp_path) as dashboard:
            for step in range(4):
                stack(1)(batch()).sum().backward()
                dashboard.step()
                _ = 1 / (2 - step)

    with pytest.raises(ZeroDivisionError):
        train()
    assert steps_in(tmp_path) == {1, 2, 3}
    assert set(Board(tmp_path).images) == {1, 3}


def test_running_out_of_memory_leaves_the_report_of_this_rank_beside_the_run(tmp_path):
    def train():
        with MemoryDashboard(tmp_path) as dashboard:
            loss = stack(1)(batch()).sum()
            dashboard.step()
            raise torch.OutOfMemoryError(f"2 GiB, after a loss of {loss}")

    with pytest.raises(torch.OutOfMemoryError):
        train()
    assert "layers.0" in (tmp_path / "remat_oom_rank0.txt").read_text()
    assert steps_in(tmp_path) == {1}


LOOP = """
dashboard = MemoryDashboard(sys.argv[1])
for step in range(3):
    stack(1)(batch()).sum().backward()
    dashboard.step()
    print(step, flush=True)
"""


def test_a_program_that_ends_without_closing_has_every_step_and_the_last_picture(tmp_path):
    assert finish(LOOP, tmp_path) == (0, "")
    assert steps_in(tmp_path) == {1, 2, 3}
    assert set(Board(tmp_path).images) == {1, 3}


def test_an_uncaught_exception_has_every_step_and_the_last_picture(tmp_path):
    status, errors = finish(LOOP + "raise SystemExit(7)", tmp_path)
    assert (status, errors) == (7, "")
    assert set(Board(tmp_path).images) == {1, 3}


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_every_step_before(tmp_path, kill):
    process = start(LOOP + "import time; time.sleep(100)", tmp_path, stdout=subprocess.PIPE)
    try:
        assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        process.send_signal(kill)
        assert process.wait(30) == -kill
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    assert steps_in(tmp_path) == {1, 2, 3}


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = stack(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with MemoryDashboard(tmp_path / "file" / "run") as dashboard:
            for _ in range(3):
                model(batch()).sum().backward()
                dashboard.step()
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "cannot be written, and is not from here on: " in str(warning.message)
    assert "Training goes on.\nTo fix: give a folder that can be written" in str(warning.message)
    assert model[0].up.weight.grad is not None


def test_a_full_disk_is_one_warning_and_steps_before_stay(tmp_path):
    code = """
import resource, warnings
warnings.simplefilter("always")
with MemoryDashboard(sys.argv[1]) as dashboard:
    for step in range(12):
        if step == 6:  # no file may grow from here on
            size = max(path.stat().st_size for path in dashboard.log_dir.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
        stack(1)(batch()).sum().backward()
        dashboard.step()
print("trained")
"""
    process = start(code, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "trained\n"), errors
    assert errors.count("cannot be written") == 1
    assert "File too large" in errors
    assert steps_in(tmp_path) >= {1, 2, 3, 4, 5, 6}


def test_a_disk_that_is_full_from_the_start_is_one_warning(tmp_path):
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
with MemoryDashboard(sys.argv[1]) as dashboard:
    for step in range(3):
        stack(1)(batch()).sum().backward()
        dashboard.step()
"""
    status, errors = finish(code, tmp_path)
    assert status == 0, errors
    assert errors.count("cannot be written") == 1


def test_numbers_are_the_same_with_and_without_a_dashboard(tmp_path):
    def gradients(folder):
        torch.manual_seed(3)
        model, found = stack(3), []
        dashboard = MemoryDashboard(folder) if folder else None
        for _ in range(2):
            model(batch()).square().sum().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
            if dashboard:
                dashboard.step()
        if dashboard:
            dashboard.close()
        return found

    for plain, watched in zip(gradients(None), gradients(tmp_path), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert not remat.is_recomputing()


def test_nothing_runs_and_nothing_listens_without_a_dashboard():
    code = (
        "import torch_remat, sys\n"
        "from torch_remat.runtime import events\n"
        "assert not events.graph_made.listeners and not events.replay_ended.listeners\n"
        "assert 'torch_remat_tensorboard' not in sys.modules and 'tensorboard' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
