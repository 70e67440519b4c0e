"""The options behind both versions, what the presets save, and options on a model; needs no torchtitan."""

import pytest
import torch
from small_model import Router, gradients, model
from torch import nn

import torch_remat as remat
from torch_remat_titan import options as titan_options
from torch_remat_titan import versions
from torch_remat_titan.apply import apply_options, check_options, list_regions
from torch_remat_titan.options import LayerOverride, RematOptions
from torch_remat_titan.train import take_options


def error_text(call, kind=ValueError):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


NONE = frozenset()


@pytest.mark.parametrize(
    ("preset", "parallel", "saved"),
    [
        ("none", NONE, ["moe.router"]),
        ("attention", NONE, ["attention.wo", "attention.inner_attention", "moe.router"]),
        (
            "matmuls",
            NONE,
            ["attention.wq", "attention.wo", "attention.inner_attention", "moe.router", "moe.experts"],
        ),
        ("communication", NONE, ["moe.router"]),
        ("communication", frozenset({"tp"}), ["attention", "moe"]),
        ("communication", frozenset({"cp"}), ["attention.inner_attention", "moe.router"]),
        ("communication", frozenset({"ep"}), ["moe.router", "moe.experts"]),
        ("all", NONE, ["attention_norm", "attention", "moe"]),
    ],
)
def test_what_a_preset_saves(preset, parallel, saved):
    policed, expected = model(), gradients(model())
    options = RematOptions(preset=preset)
    check_options(policed, options, parallel)
    report = apply_options(policed, options, parallel)
    assert [list(block.save) for block in report.blocks] == [saved] * 3
    for one, other in zip(gradients(policed), expected, strict=True):
        assert torch.equal(one, other)


def test_router_decisions_are_saved_whatever_is_recomputed():
    policed = model()
    apply_options(policed, RematOptions(preset="none", recompute_regions=("*",)), NONE)
    Router.runs = 0
    gradients(policed)
    assert Router.runs == 3


def test_replay_does_not_count_tokens_again():
    policed, plain = model(), model()
    apply_options(policed, RematOptions(preset="none"), NONE)
    for _ in range(2):
        gradients(policed)
        gradients(plain)
    for one, other in zip(policed.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
        assert one.sum() == 2 * 3 * 2  # two steps of three tokens with two experts each


def test_patterns_presets_and_overrides_add_up():
    options = RematOptions.of(
        {
            "preset": "attention",
            "save_regions": "moe.experts, attention_norm",
            "recompute_regions": "attention.wo",
            "layer_overrides": "layers.0=off, layers.2=@matmuls+!attention.wq",
        }
    )
    report = apply_options(model(), options, NONE)
    assert str(report).splitlines()[1:] == [
        "layers.0: no checkpoint",
        "layers.1: save attention_norm, attention.inner_attention, moe.router, moe.experts; recompute attention.wo",
        "layers.2: save attention.wo, attention.inner_attention, moe.router, moe.experts; recompute attention.wq",
    ]


def test_a_stage_may_have_other_layers_or_none():
    stage = model()
    del stage.layers["1"]
    options = RematOptions(save_regions=("attention.wo",), layer_overrides=("layers.1=off",))
    assert [block.name for block in apply_options(stage, options, NONE).blocks] == ["layers.0", "layers.2"]
    assert apply_options(model(blocks=0), options, NONE).blocks == ()


def test_a_typo_is_found_on_the_whole_model_which_stays_as_it_is():
    whole = model()
    text = error_text(lambda: check_options(whole, RematOptions(save_regions=("attention.w0",)), NONE))
    assert text.startswith("save pattern 'attention.w0' matches no submodule of any block.\n")
    assert "'attention.wo'" in text
    text = error_text(lambda: check_options(whole, RematOptions(preset="all", layer_overrides=("layers.7=off",)), NONE))
    assert text.startswith("override 'layers.7' matches no block.\n")
    check_options(whole, RematOptions(preset="all"), NONE)
    assert all("forward" not in vars(module) for module in whole.modules())


def test_a_model_without_blocks_is_named():
    text = error_text(lambda: check_options(nn.Linear(2, 2), RematOptions(preset="all"), NONE))
    assert text.startswith("Linear has no blocks where torchtitan's models have them: layers.*, ")


def test_state_hooks_are_found_by_name(monkeypatch):
    seen = []

    class Hook:
        def snapshot(self):
            seen.append("snapshot")

        def restore(self, state):
            seen.append("restore")

    monkeypatch.setattr(titan_options, "hook", Hook(), raising=False)
    monkeypatch.setattr(titan_options, "hooks_of", lambda block: [Hook()], raising=False)
    name = "torch_remat_titan.options"
    policed = model(blocks=1)
    apply_options(policed, RematOptions(preset="none", state_hooks=(f"{name}:hook", f"{name}:hooks_of")), NONE)
    gradients(policed)
    assert seen.count("restore") >= 4


def test_the_listing_has_every_region_name():
    assert list_regions(model()).splitlines() == [
        "torch_remat regions",
        "layers.0, layers.1, layers.2:",
        *(f"  {name}" for name in remat.available_regions(model()).names),
    ]


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ({}, "activation_checkpoint.mode is remat and nothing says what to save.\nTo fix: give"),
        ({"preset": "matmul"}, "activation_checkpoint.preset is 'matmul'.\nTo fix: one of none, attention, matmuls"),
        ({"preset": "all", "layer_overrides": "layers.3"}, "activation_checkpoint.layer_overrides has the entry"),
        (
            {"preset": "all", "layer_overrides": "layers.3=@matmul"},
            "activation_checkpoint.layer_overrides has the entry",
        ),
    ],
)
def test_bad_options_are_refused_with_the_fix(values, start):
    assert error_text(lambda: RematOptions.of(values)).startswith(start)


def test_bad_state_hooks_are_refused_with_the_fix():
    assert "package.module:name" in error_text(RematOptions(preset="all", state_hooks=("nowhere",)).hooks)


def test_layer_overrides_are_taken_apart():
    assert LayerOverride.parse("layers.31=off") == LayerOverride("layers.31", None)
    assert LayerOverride.parse("layers.* = attention.wo + !moe + @attention") == LayerOverride(
        "layers.*", ("attention.wo",), ("moe",), ("attention",)
    )


def test_the_command_line_of_0_3_is_split_between_the_host_and_us():
    rest, options = take_options(
        [
            *("--module", "llama3", "--activation_checkpoint.mode", "remat", "--training.steps=3"),
            *(
                "--activation-checkpoint.save-regions=attention.wo,feed_forward.*",
                "--activation_checkpoint.preset",
                "none",
            ),
        ]
    )
    assert rest == ["--module", "llama3", "--training.steps=3"]
    assert options == RematOptions(save_regions=("attention.wo", "feed_forward.*"), preset="none")
    assert take_options(["--activation_checkpoint.mode=remat", "--activation_checkpoint.list_regions"])[
        1
    ] == RematOptions(list_regions=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--training.steps=3", "activation-checkpoint:full"],
        ["activation-checkpoint:remat", "--activation-checkpoint.save-regions", "attention.wo"],
        ["activation-checkpoint:full", "--activation-checkpoint.determinism-check", "none"],
    ],
    ids=repr,
)
def test_the_subcommands_of_0_3_are_left_to_the_host(arguments):
    assert take_options(arguments) == (arguments, None)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--activation_checkpoint.mode", "full"], "activation-checkpoint:full"),
        (["--activation_checkpoint.mode=remat", "activation-checkpoint:full"], "activation-checkpoint:full"),
        (["--activation_checkpoint.mode"], "lacks its value"),
        (
            ["--activation_checkpoint.mode=remat", "--activation-checkpoint.save-region=attention.wo"],
            "is no option of activation_checkpoint.mode remat.\nTo fix: --activation_checkpoint.save_regions?",
        ),
    ],
    ids=repr,
)
def test_a_command_line_of_0_3_that_mixes_both_is_refused(arguments, part):
    assert part in error_text(lambda: take_options(arguments))


@pytest.mark.parametrize("found", ["0.1.0", "0.4.1", "none"])
def test_another_torchtitan_is_refused_by_name(monkeypatch, found):
    def version(name):
        if found == "none":
            raise versions.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(versions, "version", version)
    versions.host_series.cache_clear()
    try:
        text = error_text(versions.host_series, versions.UnsupportedHostError)
    finally:
        versions.host_series.cache_clear()
    assert text == (
        f"torch_remat_titan works with torchtitan 0.2.x and 0.3.x, installed is {found}.\n"
        "To fix: pip install 'torchtitan==0.3.0' (torch 2.14 and later) or 'torchtitan==0.2.2' (torch 2.13)."
    )
