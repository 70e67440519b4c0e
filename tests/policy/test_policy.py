"""What a policy does: numbers, runs, names, and what stays as it was."""

import copy
import dataclasses
import gc
import inspect
import io
import json
import pickle
import weakref

import pytest
import torch
from policy_models import RUNS, Block, Model, Projection, assert_same, gradients, model
from torch import nn

import torch_remat as remat

# Dynamo looks at the grad of whatever a graph break hands it.
non_leaf = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
SAVE = ["attention.wo", "feed_forward.*"]


def trace_of(of: nn.Module) -> list[tuple[str, str]]:
    with remat.collect_trace() as trace:
        gradients(of)
    return [(entry.name, entry.policy) for entry in trace.entries]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"save": SAVE},
        {"save": ["*"]},
        {"save": ["attention"], "recompute": ["attention.wq"]},
        {"save": SAVE, "overrides": {"layers.1": {"save": []}, "layers.2": None}},
    ],
    ids=repr,
)
def test_p1_loss_and_gradients_are_those_without_a_policy(options):
    expected = gradients(model())
    policed = model()
    remat.apply_policy(policed, **options)
    for _ in range(3):
        assert_same(gradients(policed), expected)


def test_saved_modules_run_once_and_the_others_twice():
    policed = model()
    remat.apply_policy(policed, save=SAVE)
    gradients(policed)
    # wo, w1 and w2 are saved in each of three blocks; wq is recomputed
    assert RUNS == {"8x6": 6, "6x8": 3, "8x16": 3, "16x8": 3}


def test_the_report_says_block_by_block_what_was_done():
    report = remat.apply_policy(
        model(),
        save=SAVE,
        recompute=["norm"],
        overrides={"layers.1": {"recompute": ["feed_forward.w2"]}, "layers.2": None},
    )
    assert str(report) == (
        "torch_remat policy\n"
        "layers.0: save attention.wo, feed_forward.w1, feed_forward.w2; recompute norm\n"
        "layers.1: save attention.wo, feed_forward.w1; recompute feed_forward.w2\n"
        "layers.2: no checkpoint"
    )
    assert json.loads(json.dumps(dataclasses.asdict(report)))["blocks"][1] == {
        "name": "layers.1",
        "save": ["attention.wo", "feed_forward.w1"],
        "recompute": ["feed_forward.w2"],
        "checkpoint": True,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.blocks = ()


def test_equal_blocks_share_a_line_of_the_report():
    assert str(remat.apply_policy(model(blocks=5), save=["norm"])).splitlines()[1:] == [
        "layers.0, layers.1 ... layers.4 (5 blocks): save norm"
    ]


def test_regions_are_named_by_path_and_a_second_call_is_numbered():
    policed = model(blocks=1)
    remat.apply_policy(policed, save=["attention", "feed_forward.w?"], recompute=["norm"])
    expected = [
        ("norm", "recompute"),
        ("attention", "save"),
        ("norm#2", "recompute"),
        ("feed_forward.w1", "save"),
        ("feed_forward.w2", "save"),
    ]
    assert trace_of(policed) == expected


def test_recompute_wins_and_opens_what_is_around_it():
    policed = model(blocks=1)
    report = remat.apply_policy(policed, save=["*"], recompute=["feed_forward.w1"])
    assert report.blocks[0].save == ("norm", "attention", "feed_forward.w2")
    assert report.blocks[0].recompute == ("feed_forward.w1",)


def test_recompute_of_a_module_wins_over_save_of_what_is_in_it():
    report = remat.apply_policy(model(blocks=1), save=["feed_forward.w1"], recompute=["feed_forward"])
    assert (report.blocks[0].save, report.blocks[0].recompute) == ((), ("feed_forward",))


def test_required_wins_over_recompute_and_need_not_match():
    report = remat.apply_policy(model(blocks=1), recompute=["attention"], required=["*.wq", "*.router"])
    assert (report.blocks[0].save, report.blocks[0].recompute) == (("attention.wq",), ("attention",))


def test_a_required_region_inside_a_recomputed_one_runs_once():
    policed, expected = model(blocks=1), gradients(model(blocks=1))
    remat.apply_policy(policed, recompute=["attention"], required=["attention.wq"])
    assert_same(gradients(policed), expected)
    assert RUNS["8x6"] == 1


def test_the_last_override_that_matches_holds():
    overrides = {"layers.*": {"save": ["norm"]}, "layers.[12]": {"save": ["attention"]}, "layers.2": None}
    report = remat.apply_policy(model(), save=SAVE, overrides=overrides)
    assert [block.save for block in report.blocks] == [("norm",), ("attention",), ()]
    assert [block.checkpoint for block in report.blocks] == [True, True, False]


def test_a_pattern_may_name_a_container():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Projection(8, 8) for _ in range(2))

        def forward(self, x):
            return sum(torch.tanh(expert(x)) for expert in self.experts)

    policed, expected = model(block=Experts), gradients(model(block=Experts))
    report = remat.apply_policy(policed, save=["experts"])
    assert report.blocks[0].save == ("experts.0", "experts.1")
    assert_same(gradients(policed), expected)


def test_hooks_of_a_region_are_inside_it_whenever_they_were_registered():
    policed = model(blocks=1)
    wo, w1 = policed.layers["0"].attention.wo, policed.layers["0"].feed_forward.w1
    seen = []
    wo.register_forward_pre_hook(lambda module, args: seen.append("wo pre"))
    remat.apply_policy(policed, save=["attention.wo"])
    wo.register_forward_hook(lambda module, args, output: seen.append("wo"))
    w1.register_forward_hook(lambda module, args, output: seen.append("w1"))
    gradients(policed)
    assert seen == ["wo pre", "wo", "w1", "w1"]


def test_hooks_of_a_block_stay_outside_the_replay():
    policed = model(blocks=1)
    seen = []
    policed.layers["0"].register_forward_pre_hook(lambda module, args: seen.append("before"))
    remat.apply_policy(policed)
    policed.layers["0"].register_forward_hook(lambda module, args, output: seen.append("after"))
    gradients(policed)
    assert seen == ["before", "after"]


def test_the_model_looks_as_before():
    plain, policed = model(), model()
    remat.apply_policy(policed, save=SAVE)
    assert list(policed.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in policed.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in policed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert repr(policed) == repr(plain)
    for one, other in zip(policed.modules(), plain.modules(), strict=True):
        assert type(one) is type(other)
        assert inspect.signature(one.forward) == inspect.signature(other.forward)
    assert isinstance(policed.layers["0"], Block)


def test_state_goes_back_and_forth():
    plain, policed = model(), model()
    remat.apply_policy(policed, save=SAVE)
    with torch.no_grad():
        for parameter in policed.parameters():
            parameter.mul_(0.5)
    plain.load_state_dict(policed.state_dict())
    assert_same(gradients(policed), gradients(plain))


def pickled(of: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(of))


def saved_and_loaded(of: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(of, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_and_loaded], ids=lambda one: one.__name__)
def test_a_copy_has_the_policy_and_runs_on_its_own_weights(copied):
    plain, policed = model(), model()
    remat.apply_policy(policed, save=SAVE, recompute_state_hooks=(remat.GeneratorHook(),))
    gradients(policed)
    twin = copied(policed)
    with torch.no_grad():
        for parameter in (*twin.parameters(), *plain.parameters()):
            parameter.mul_(0.5)
    expected = gradients(plain)
    assert_same(gradients(twin), expected)
    assert RUNS["8x6"] == 6
    assert RUNS["6x8"] == 3
    assert_same(gradients(policed), gradients(model()))
    alone = weakref.ref(policed)
    expected = gradients(twin)
    del policed
    gc.collect()
    assert alone() is None
    assert_same(gradients(twin), expected)


def test_a_copied_block_works_without_its_model():
    policed = model()
    remat.apply_policy(policed, save=["attention.wo"])
    block = copy.deepcopy(policed.layers["1"])
    del policed
    x = torch.randn(2, 8, requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None


def test_p5_a_policy_makes_no_reference_cycle():
    policed = model()
    remat.apply_policy(policed, save=SAVE)
    gradients(policed)
    alone = weakref.ref(policed.layers["0"])
    gc.disable()
    try:
        del policed
        assert alone() is None
    finally:
        gc.enable()


def test_keyword_arguments_no_grad_and_eval():
    plain, policed = model().layers["0"], model()
    remat.apply_policy(policed, save=SAVE)
    block = policed.layers["0"]
    x = torch.randn(2, 8)
    assert torch.equal(block(x, scale=2.0), plain(x, scale=2.0))
    with torch.no_grad():
        assert torch.equal(block.eval()(x), plain.eval()(x))


@non_leaf
def test_torch_compile_of_a_block_gives_an_optimized_block():
    plain, policed = model().layers["0"], model()
    remat.apply_policy(policed, save=SAVE)
    torch._dynamo.reset()
    compiled = torch.compile(policed.layers["0"], backend="eager")
    assert compiled._orig_mod is policed.layers["0"]
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in plain.state_dict()]
    x, other = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    other = x.detach().clone().requires_grad_()
    plain(other).sum().backward()  # first: a counter that compiled code starts in forward is not refused in replay then
    compiled(x).sum().backward()
    assert torch.equal(x.grad, other.grad)


@non_leaf
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_submodule_compiled_in_place_is_still_a_region(when):
    policed, expected = model(blocks=1), gradients(model(blocks=1))
    torch._dynamo.reset()
    wo = policed.layers["0"].attention.wo
    if when == "before":
        wo.compile(backend="eager")
    remat.apply_policy(policed, save=["attention.wo"])
    if when == "after":
        wo.compile(backend="eager")
    assert trace_of(policed) == [("attention.wo", "save")]
    assert_same(gradients(policed), expected)


def test_manual_regions_go_on_working_in_blocks():
    class Marked(Block):
        def forward(self, x):
            x = x + self.attention(self.norm(x))
            return x + remat.region(self.feed_forward, "ff", recompute=False)(x)

    policed, expected = model(block=Marked), gradients(model(block=Marked))
    remat.apply_policy(policed, save=["attention.wo"])
    assert trace_of(policed)[:2] == [("attention.wo", "save"), ("ff", "save")]
    assert_same(gradients(policed), expected)


def test_one_block_in_several_places():
    policed, plain = model(blocks=1), model(blocks=1)
    for one in (policed, plain):
        one.layers["1"] = one.layers["0"]
    assert [block.name for block in remat.apply_policy(policed, save=SAVE).blocks] == ["layers.0"]
    assert_same(gradients(policed), gradients(plain))


def test_one_submodule_in_all_blocks():
    def shared() -> Model:
        made = model()
        for layer in made.layers.values():
            layer.norm = made.layers["0"].norm
        return made

    policed, expected = shared(), gradients(shared())
    remat.apply_policy(policed, save=["norm"])
    assert_same(gradients(policed), expected)


def test_state_hooks_may_be_made_for_each_block():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    class Calls:
        def __init__(self, block):
            self.block = block

        def snapshot(self):
            return self.block.calls.clone()

        def restore(self, state):
            self.block.calls.copy_(state)

    policed = model(block=Counting)
    remat.apply_policy(policed, save=SAVE, recompute_state_hooks=lambda block: [Calls(block)])
    gradients(policed)
    twin = copy.deepcopy(policed)
    gradients(twin)
    assert [layer.calls.item() for layer in policed.layers.values()] == [1, 1, 1]
    assert [layer.calls.item() for layer in twin.layers.values()] == [2, 2, 2]


def test_available_regions_reads_a_meta_model():
    with torch.device("meta"):
        listing = remat.available_regions(Model(blocks=4))
    names = ("norm", "attention", "attention.wq", "attention.wo", "feed_forward", "feed_forward.w1", "feed_forward.w2")
    assert listing.names == names
    assert [block.name for block in listing.blocks] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert str(listing) == "torch_remat regions\nlayers.0, layers.1 ... layers.3 (4 blocks):\n  " + "\n  ".join(names)


def test_a_policy_on_a_meta_model_is_there_when_it_gets_its_weights():
    with torch.device("meta"):
        policed = Model()
    remat.apply_policy(policed, save=SAVE)
    policed.to_empty(device="cpu")
    policed.load_state_dict(model().state_dict())
    assert_same(gradients(policed), gradients(model()))


def test_a_block_that_saves_nothing_and_a_frozen_model_are_reported(caplog):
    frozen = model(blocks=2).requires_grad_(False)
    frozen.layers["1"] = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False))
    report = remat.apply_policy(frozen, save=["attention.wo"])
    assert report.notes == (
        "layers.1 saves nothing although the policy has save patterns: recomputed whole.",
        "no parameter of the model requires grad: backward enters a block only if its input does.",
    )
    assert [record.message for record in caplog.records if record.name == "torch_remat"] == list(report.notes)
    assert str(report).endswith("note: " + report.notes[1])


def test_a_part_without_blocks_or_matches_is_left_alone():
    empty = model(blocks=0)
    assert remat.apply_policy(empty, save=["nowhere"], overrides={"layers.7": None}, part=True).blocks == ()
    report = remat.apply_policy(model(blocks=1), save=["attention.wo", "moe.*"], part=True)
    assert report.blocks[0].save == ("attention.wo",)
