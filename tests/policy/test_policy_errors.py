"""What a policy refuses, in whose words, and that a refused one leaves no trace."""

import pytest
from policy_models import model

import torch_remat as remat
from torch_remat.errors import RematError


def refusal(*args, **options) -> str:
    """The message of what `apply_policy` raises; the model must be as it was."""
    policed = args[0]
    before = [dict(vars(module)) for module in policed.modules()]
    with pytest.raises(RematError) as caught:
        remat.apply_policy(*args, **options)
    assert [dict(vars(module)) for module in policed.modules()] == before
    return str(caught.value)


def test_a_save_pattern_that_matches_nothing():
    assert refusal(model(), save=["attention.wo", "feedforward.w2"]) == (
        "save pattern 'feedforward.w2' matches no submodule of any block.\n"
        "To fix: name a module path relative to a block; the nearest are 'feed_forward.w2', 'feed_forward.w1', "
        "'feed_forward'."
    )


def test_a_recompute_pattern_that_matches_nothing():
    assert refusal(model(), recompute=["attn.wq"]).startswith("recompute pattern 'attn.wq' matches no submodule")


def test_a_blocks_pattern_that_matches_nothing():
    text = refusal(model(), "layer.*")
    assert text.startswith(
        "blocks pattern 'layer.*' matches no module of the model.\nTo fix: name modules by their path"
    )
    assert "'layers.0'" in text


def test_an_override_that_matches_nothing():
    text = refusal(model(), overrides={"layers.3": None})
    assert text.startswith("override 'layers.3' matches no block.\n")
    assert "'layers.2'" in text


def test_a_pattern_of_an_override_that_matches_nothing_in_its_blocks():
    text = refusal(model(), save=["norm"], overrides={"layers.1": {"save": ["attention.wv"]}})
    assert text.startswith("save pattern 'attention.wv' of the override 'layers.1' matches no submodule")


@pytest.mark.parametrize(
    "options", [{"save": "attention.wo"}, {"recompute": 3}, {"save": [3]}, {"save": [""]}], ids=repr
)
def test_patterns_of_the_wrong_kind(options):
    assert "expects" in refusal(model(), **options) or "empty pattern" in refusal(model(), **options)


@pytest.mark.parametrize(
    "overrides", [[("layers.0", None)], {"layers.0": ["norm"]}, {"layers.0": {"saves": []}}], ids=repr
)
def test_overrides_of_the_wrong_kind(overrides):
    assert "expects" in refusal(model(), overrides=overrides)


def test_options_of_checkpoints_are_checked_at_once():
    assert "determinism_check" in refusal(model(), determinism_check="sometimes")
    assert "saved_tensors_hooks" in refusal(model(), saved_tensors_hooks=len)
    assert "state hook" in refusal(model(), recompute_state_hooks=[3])
    assert "state hooks" in refusal(model(), recompute_state_hooks=3)


def test_a_second_policy_on_one_model():
    policed = model()
    remat.apply_policy(policed, save=["norm"])
    assert refusal(policed, save=["norm"]) == (
        "A policy was applied before: 'layers.0' is the checkpoint 'layers.0' already.\n"
        "To fix: apply one policy to a model, once; build the model again for another policy."
    )


def test_a_policy_on_blocks_inside_those_of_another():
    policed = model()
    remat.apply_policy(policed, "layers.*.attention", save=["wo"])
    assert "'layers.0.attention' is the region 'layers.0.attention'" in refusal(policed)


def test_a_shared_module_that_is_decided_twice():
    policed = model()
    policed.layers["1"].norm = policed.layers["0"].norm
    text = refusal(policed, save=["norm"], overrides={"layers.1": {"save": []}})
    assert text == (
        "One module is both layers.0.norm and layers.1.norm, and the policy makes it a SAVE region in the first place "
        "and bare in the second.\nTo fix: use patterns that decide the same for both."
    )


def test_what_is_no_module():
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module, got dict"):
        remat.apply_policy({}, save=["norm"])
