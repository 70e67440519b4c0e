"""`checkpoint_blocks` on a model of plain modules: needs no torchtitan."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torch_remat_titan.regions import RegionPolicy, checkpoint_blocks

DIM = 8


class FeedForward(nn.Module):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.w1, self.w2 = Counted("w1", calls, 2 * DIM), Counted("w2", calls, DIM, 2 * DIM)

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return self.w2(torch.nn.functional.gelu(self.w1(x)) * scale)


class Counted(nn.Linear):
    """A projection that counts how often its body runs."""

    def __init__(self, name: str, calls: Counter[str], out: int, into: int = DIM) -> None:
        super().__init__(into, out)
        self.name, self.calls = name, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[self.name] += 1
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(DIM), FeedForward(calls)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.feed_forward(self.norm(x), scale=scale)


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls: Counter[str] = Counter()
        self.layers = nn.ModuleDict({str(index): Block(self.calls) for index in range(blocks)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers.values():
            x = block(x, scale=0.5)
        return x


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients of a fixed loss, the input's first."""
    x = torch.linspace(-1, 1, 3 * DIM).reshape(3, DIM).requires_grad_()
    model.zero_grad()
    model(x).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def error_text(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("save", [(), ("feed_forward.w1",), ("feed_forward.*",), ("feed_forward",), ("*",)])
def test_p1_gradients_are_those_without_checkpointing(save):
    model = Model()
    names = checkpoint_blocks(model, RegionPolicy(save=save))
    assert names == ["layers.0", "layers.1"]
    for expected, got in zip(gradients(Model()), gradients(model), strict=True):
        assert torch.equal(expected, got)


@pytest.mark.parametrize(
    ("save", "w1", "w2"),
    [((), 2, 2), (("feed_forward.w1",), 1, 2), (("feed_forward.w[12]",), 1, 1), (("feed_forward",), 1, 1)],
)
def test_p2_calls_of_matching_modules_run_once_per_block(save, w1, w2):
    model = Model()
    checkpoint_blocks(model, RegionPolicy(save=save))
    gradients(model)  # the first step may learn
    model.calls.clear()
    gradients(model)
    assert model.calls["w1"] == 2 * w1
    # The block's last projection feeds only the residual: replay stops before it.
    assert model.calls["w2"] in ({2} if w2 == 1 else {2, 4})


def test_names_types_and_state_are_those_of_the_model(tmp_path):
    plain, model = Model(), Model()
    checkpoint_blocks(model, RegionPolicy(save=("feed_forward.*",)))
    assert list(plain.state_dict()) == list(model.state_dict())
    assert [(name, type(module)) for name, module in plain.named_modules()] == [
        (name, type(module)) for name, module in model.named_modules()
    ]
    torch.save(model.state_dict(), tmp_path / "state.pt")
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))


def test_a_deep_copy_runs_its_own_weights():
    model = Model()
    checkpoint_blocks(model, RegionPolicy(save=("feed_forward.w1",)))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    expected = Model()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.mul_(2)
    for one, other in zip(gradients(expected), gradients(twin), strict=True):
        assert torch.equal(one, other)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_on_a_block_stay_outside_the_replay():
    model = Model()
    checkpoint_blocks(model, RegionPolicy())
    seen = []
    model.layers["0"].register_forward_hook(lambda module, args, output: seen.append("block"))
    gradients(model)
    assert seen == ["block"]


def test_a_pipeline_part_without_blocks_is_left_alone():
    assert checkpoint_blocks(Model(blocks=0), RegionPolicy(save=("feed_forward.w1",))) == []


def test_a_pattern_that_matches_nothing_names_the_nearest_paths():
    text = error_text(lambda: checkpoint_blocks(Model(), RegionPolicy(save=("feed_forward.w1", "feedforward.w2"))))
    assert text == (
        "save pattern 'feedforward.w2' matches no submodule of any block.\n"
        "To fix: name a module path relative to a block; the nearest are 'feed_forward.w2', 'feed_forward.w1', "
        "'feed_forward'."
    )


def test_a_bad_pattern_leaves_the_model_as_it_was():
    model = Model()
    error_text(lambda: checkpoint_blocks(model, RegionPolicy(save=("feed_forward.w1", "nowhere"))))
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_second_policy_on_one_model_is_refused():
    model = Model()
    checkpoint_blocks(model, RegionPolicy())
    assert error_text(lambda: checkpoint_blocks(model, RegionPolicy())) == (
        "checkpoint 'layers.0': this block is a checkpoint already.\n"
        "To fix: apply one policy to a model once; build the model again for another policy."
    )
