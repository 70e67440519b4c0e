"""`BlockMeter` against sums derived from shapes, on blocks whose saves are known; needs no torchtitan."""

import pytest
import torch
from torch import nn

import torch_remat as remat
from torch_remat_titan.measure import BlockMeter

BATCH, DIM, HIDDEN, BLOCKS = 3, 8, 20, 4
STATE_BYTES, HIDDEN_BYTES = BATCH * DIM * 4, BATCH * HIDDEN * 4


class Block(nn.Module):
    """exp keeps its output, the projections keep their inputs, the residual add keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).exp())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.layers:
            x = block(x)
        return x


def measured(save: list[str] | None, steps: int = 2) -> tuple[Model, BlockMeter]:
    """A model after some steps, the last of them measured."""
    model = Model()
    if save is not None:
        remat.apply_policy(model, save=save)
    meter = BlockMeter(model, probe="norm")
    for step in range(steps):
        meter.reset_counts()
        if step == steps - 1:
            meter.arm()
        model(torch.ones(BATCH, DIM)).sum().backward()
    return model, meter


@pytest.mark.parametrize(
    ("save", "per_block"),
    [
        pytest.param(None, HIDDEN_BYTES, id="exp's output, which is also down's input"),
        pytest.param([], 0, id="nothing but the block's input"),
        pytest.param(["up"], HIDDEN_BYTES, id="up's output, which replay reads"),
        pytest.param(["down"], 0, id="down's input is rebuilt, its output not needed"),
    ],
)
def test_kept_bytes_are_block_inputs_and_saves(save, per_block):
    _, meter = measured(save)
    # The last block's output is the model's output, which the caller holds at that moment.
    assert meter.kept_bytes == BLOCKS * (STATE_BYTES + per_block) + STATE_BYTES


def test_views_of_one_storage_count_once_and_parameters_never():
    class Views(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.norm(x).exp()
            return x + one.t().t() * one.view(-1).view_as(one) * self.up.weight.t()[:DIM, 0]

    model = Model()
    model.layers = nn.ModuleList([Views()])
    meter = BlockMeter(model, probe="norm")
    meter.arm()
    model(torch.ones(BATCH, DIM)).sum().backward()
    # exp's output once for its three views; their product, kept for the gradient of the weight; the model's output.
    assert meter.kept_bytes == 3 * STATE_BYTES


def test_replays_and_forwards_are_counted_per_block():
    _, plain = measured(None)
    assert sum(plain.replays.values()) == 0
    assert plain.forwards == {f"layers.{index}": 1 for index in range(BLOCKS)}
    _, full = measured([])
    assert full.replays == {f"layers.{index}": 1 for index in range(BLOCKS)}
    assert full.forwards == plain.forwards


def test_a_measured_step_gives_the_same_gradients():
    torch.manual_seed(1)
    model, _ = measured(["up"], steps=1)
    torch.manual_seed(1)
    plain = Model()
    plain(torch.ones(BATCH, DIM)).sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
