"""RematAC on torchtitan's real Llama 3 debug model: same bits, SAVE bodies once, kept bytes derived from shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from titan_hosts import needs_0_3

pytestmark = [needs_0_3, pytest.mark.slow]

PROJECT = Path(__file__).resolve().parents[2]
# Sizes of the debug model and of the batch in llama3_on_one_process.py.
BATCH, SEQ, DIM, HIDDEN, HEADS, FLOAT_BYTES = 2, 64, 256, 768, 16, 4
SAVED = ["attention.inner_attention", "attention.wo", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"]
HIDDEN_STATE = BATCH * SEQ * DIM * FLOAT_BYTES
"""Bytes of one tensor of shape [batch, seq, dim]."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    path = os.pathsep.join([str(PROJECT), str(PROJECT / "integrations")])
    script = Path(__file__).parent / "llama3_on_one_process.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("policy", ["full", "regions"])
def test_p1_loss_and_every_gradient_are_those_without_checkpointing(report, policy):
    assert report[policy]["loss"] == report["none"]["loss"]
    assert report[policy]["gradients"] == report["none"]["gradients"]
    assert len(set(report["none"]["gradients"].values())) > 6 * 7  # digests of real, distinct gradients


def test_p2_save_bodies_run_once_and_the_rest_twice(report):
    runs = report["regions"]["runs"]
    assert {path for path, count in runs.items() if count == 1} == set(SAVED)
    assert {count for path, count in runs.items() if path not in SAVED} == {2}
    assert set(report["full"]["runs"].values()) <= {1, 2}
    assert report["full"]["runs"]["attention.inner_attention"] == 2
    assert set(report["none"]["runs"].values()) == {1}


def test_p3_kept_bytes_are_the_sum_on_paper(report):
    blocks = report["none"]["blocks"]
    # Each block keeps its input; the last block's output is the input of the final norm.
    assert report["full"]["kept_bytes"] == (blocks + 1) * HIDDEN_STATE
    # Besides its input a block keeps: the attention core's output and logsumexp, which its backward needs; the outputs
    # of wo, w1 and w3, which replay reads; nothing of w2, whose output is only added to the residual.
    logsumexp = BATCH * HEADS * SEQ * FLOAT_BYTES
    hidden = BATCH * SEQ * HIDDEN * FLOAT_BYTES
    saved = HIDDEN_STATE + logsumexp + HIDDEN_STATE + 2 * hidden
    assert report["regions"]["kept_bytes"] == (blocks + 1) * HIDDEN_STATE + blocks * saved
    assert report["none"]["kept_bytes"] > report["regions"]["kept_bytes"]


@pytest.mark.parametrize("policy", ["full", "regions"])
def test_p4_one_replay_per_block(report, policy):
    assert report[policy]["replays"] == report[policy]["blocks"]
    assert report["none"]["replays"] == 0


def test_regions_are_named_by_module_path_in_the_order_they_run(report):
    assert report["regions"]["regions"] == SAVED


@pytest.mark.parametrize("policy", ["full", "regions"])
def test_state_dict_keys_and_module_names_are_unchanged(report, policy):
    assert report[policy]["same_shape"]


def test_host_options_that_regions_do_not_have_are_refused_with_the_fix(report):
    assert report["refused"] == {
        "preserve_rng_state": "RematAC does not save and restore random state around a whole block.\n"
        "To fix: leave preserve_rng_state=False; code that draws random numbers in recomputed parts needs a state hook "
        "(state_hooks) or belongs in a SAVE region.",
        "debug": "RematAC has no debug mode: its errors name the checkpoint, the region and the fix by themselves.\n"
        "To fix: leave debug=False.",
    }
