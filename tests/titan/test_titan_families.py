"""Every model family of the installed torchtitan, built on the meta device: names, coverage, policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from titan_hosts import SERIES, environment, needs_any

pytestmark = [needs_any, pytest.mark.slow]

FAMILIES = {
    "0.2": ["llama3", "llama4", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "flux"],
    "0.3": ["llama3", "qwen3", "qwen3_moe", "qwen3_5", "deepseek_v3", "gpt_oss", "kimi_k2_7", "flux", "muse_glimmer"],
}
MOE = ["llama4", "qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_k2_7"]
ATTENTION = {"flux": {"inner_attention", "img_attn.proj", "linear2"}, "qwen3_5": {"attn.inner_attention", "attn.wo"}}
"""Among what the preset saves; the other families name these modules in one way."""


@pytest.fixture(scope="module")
def families():
    command = [sys.executable, str(Path(__file__).parent / "families_on_meta.py")]
    # On machines with GPUs too: nothing is trained, and the meta device needs none.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment(CUDA_VISIBLE_DEVICES="")
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def saved(blocks):
    return {name for block in blocks for name in block["save"]}


@pytest.mark.parametrize("family", FAMILIES.get(SERIES or "", []))
def test_a_family(families, family):
    found = families[family]
    assert "error" not in found, found
    assert found["same_keys"]
    blocks = found["all"]
    assert len(blocks) >= 4
    assert all(block["checkpoint"] for block in blocks)
    attention = ATTENTION.get(family, {"attention.inner_attention", "attention.wo"})
    assert attention <= saved(found["attention"])
    assert saved(found["attention"]) - {"moe.router"} < saved(found["matmuls"])
    assert all(block["save"] for block in found["matmuls"])
    assert all(block["save"] for block in found["communication"])
    # `all` saves the children of a block, whole
    assert not any("." in name for name in saved(blocks))
    if family == "flux":
        assert found["blocks"] == ["double_blocks.*", "single_blocks.*"]
    elif family in MOE:
        # the preset `none` with the MoE layer recomputed by name: the router is saved all the same
        with_experts = [block for block in found["none"] if block["save"]]
        assert {(tuple(block["save"]), tuple(block["recompute"])) for block in with_experts} == {
            (("moe.router",), ("moe",))
        }
        assert len(with_experts) >= 3
    else:
        assert saved(found["none"]) == set()


RECIPES = {
    "0.2": {"llama3_debug": 6, "llama3_8b": 32},
    "0.3": {
        "llama3_debugmodel_remat": 6,
        "llama3_8b_remat": 32,
        "deepseek_v3_debugmodel_remat": 6,
        "qwen3_debugmodel_remat": 8,
    },
}


def test_the_recipes_are_all_looked_at(families):
    assert set(families["recipes"]) == set(RECIPES[SERIES])


@pytest.mark.parametrize("recipe", RECIPES.get(SERIES or "", {}))
def test_a_recipe(families, recipe):
    """It finds its regions in the model that it is for, the large ones included, and saves something in every block."""
    blocks = families["recipes"][recipe]
    assert len(blocks) == RECIPES[SERIES][recipe]
    off = [block["name"] for block in blocks if not block["checkpoint"]]
    assert off == (["layers.31"] if "8b" in recipe else [])
    for block in blocks:
        if block["checkpoint"]:
            assert {"attention.inner_attention", "attention.wo"} <= set(block["save"])
            assert any(name.startswith(("feed_forward", "moe.")) for name in block["save"])


@pytest.mark.job
def test_one_step_of_flux():
    """Its trainer needs text encoders and images; the model computes without them."""
    command = [sys.executable, str(Path(__file__).parent / "flux_on_cpu.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment(CUDA_VISIBLE_DEVICES="")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("nonzero")
    blocks = ["single_blocks.1", "single_blocks.0", "double_blocks.1", "double_blocks.0"]
    assert found == {
        preset: {"same": True, "replayed": blocks} for preset in ("none", "attention", "matmuls", "communication")
    }
