"""The benchmark of the observed step: verdicts by hand, and a short real run that stays within the limits."""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_observe  # noqa: E402
from bench_memory_cases import Shape  # noqa: E402
from bench_observe import Held, Timed  # noqa: E402

from torch_remat.runtime import events  # noqa: E402

WITHIN = [Held("follows its plan", 100, 80), Held("observed", 110, 80), Held("persists everything", 110, 90)]


def test_verdict_within_the_limits() -> None:
    assert bench_observe.verdict([Timed("a", 10, 100)], WITHIN) == []


def test_verdict_over_the_limits() -> None:
    over = bench_observe.verdict(
        [Timed("a", 10, 101), Timed("b", 10, 20)],
        [WITHIN[0], Held("observed", 112, 81), WITHIN[2]],
    )
    assert over == [
        "a: 10.1x, over 10x",
        "an observed forward holds 2 bytes more than persisting all",
        "an observed forward ends with +1 bytes",
    ]


def test_observed_steps_are_observed_and_equal_layers_share_a_plan() -> None:
    learned: list[str] = []

    def listen(tape: object, plan: object) -> None:
        learned.append(str(tape))

    events.body_learned.subscribe(listen)
    try:
        rows = bench_observe.times(1)
    finally:
        events.body_learned.unsubscribe(listen)
    assert all(row.steady_us > 0 and row.observed_us > 0 for row in rows)
    # Warm-up and one forgotten step of the equal blocks; of the others every block, and what is learned again after it.
    assert len(learned) == (1 + 1) + (0 + 8 + 1) + (1 + 1) + (1 + 1)


@pytest.mark.parametrize("shape", [Shape(batch=1, seq=8, dim=16, heads=2, hidden=48, layers=2)])
def test_memory_of_an_observed_forward(shape: Shape) -> None:
    steady, observed, everything = bench_observe.bytes_held(shape)
    assert observed.kept == steady.kept == everything.kept - 2 * shape.residual_bytes
    assert steady.peak <= observed.peak <= everything.peak


@pytest.mark.slow
def test_script_within_its_limits() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_observe.py"), "--check", "--steps", "9"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within the limits" in done.stdout
