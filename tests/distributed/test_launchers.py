"""The launcher for clusters, with two agents on this machine as two nodes of two ranks; and what its texts promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import free_port

PROJECT = Path(__file__).resolve().parents[2]
TORCHRUN, SLURM = PROJECT / "scripts" / "launch_torchrun.sh", PROJECT / "scripts" / "launch_slurm.sh"


def run_two_nodes(folder: Path) -> tuple[list[int], str]:
    """Exit codes and everything written, by two agents on one machine."""
    folder.mkdir()
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(PROJECT),
        "NODES": "2",
        "GPUS": "2",
        "RDZV_HOST": "127.0.0.1",
        "RDZV_PORT": str(free_port()),
        "JOB_ID": "two-nodes",
    }
    script = Path(__file__).with_name("train_two_steps.py")
    agents = []
    for node in range(2):
        settings = {**environment, "LOG_DIR": str(folder / f"logs{node}")}
        with (folder / f"node{node}.log").open("w") as log:
            command = [str(TORCHRUN), str(script)]
            agents.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=settings))
    try:
        codes = [agent.wait(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return codes, "".join(path.read_text() for path in sorted(folder.rglob("*.log")))


@pytest.mark.slow
def test_two_nodes_of_two_ranks_train_to_the_same_digits(tmp_path):
    codes, output = run_two_nodes(tmp_path / "first")
    if codes != [0, 0] and "The connection to the C10d store has failed" in output:
        # torchrun's agents lost each other: on a busy machine one may ask the store that the other has just closed.
        codes, output = run_two_nodes(tmp_path / "second")
    assert codes == [0, 0], output
    lines = re.findall(r"node (\d) rank (\d) of 4 equal True losses (\[.*\])", output)
    assert sorted(rank for _, rank, _ in lines) == ["0", "1", "2", "3"], output
    assert sorted(node for node, _, _ in lines) == ["0", "0", "1", "1"]
    assert len({losses for _, _, losses in lines}) == 1


@pytest.mark.parametrize("script", [TORCHRUN, SLURM], ids=lambda path: path.name)
def test_launchers_are_sound_shell_and_say_how_to_be_used(script):
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run([str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage: " in done.stderr


def test_every_parameter_of_the_launchers_is_explained():
    lines = TORCHRUN.read_text().splitlines()
    for index, line in enumerate(lines):
        if re.match(r"(export )?[A-Z_]+=\$\{", line):
            assert lines[index - 1].startswith("# "), line
    lines = SLURM.read_text().splitlines()
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) >= 8
    for index in options:
        assert re.match(r"# .*:$", lines[index - 1]), lines[index]


def test_the_batch_file_starts_one_launcher_per_node(tmp_path):
    """With `srun` and `scontrol` played by scripts: what the launcher is given."""
    commands = {
        "scontrol": "echo alpha; echo beta",
        "srun": 'echo "$@ NODES=$NODES GPUS=$GPUS RDZV=$RDZV_HOST:$RDZV_PORT ID=$JOB_ID LOGS=$LOG_DIR"',
    }
    for name, body in commands.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "[alpha,beta]",
        "SLURM_JOB_ID": "70001",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = subprocess.run([str(SLURM), "train.py", "--steps", "3"], capture_output=True, text=True, env=environment)
    assert done.stdout == (
        "--kill-on-bad-exit=1 scripts/launch_torchrun.sh train.py --steps 3 "
        "NODES=2 GPUS=8 RDZV=alpha:30001 ID=70001 LOGS=logs/70001\n"
    ), done.stderr
