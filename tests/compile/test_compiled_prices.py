"""``profile_regions`` and ``verify_replay`` of compiled models: the checkpoints and regions of the model, no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ValuesDriftError


class Block(torch.nn.Module):
    """Something to price, and something that may drift."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 24).double()
        self.back = torch.nn.Linear(24, 6).double()
        self.drifts: list[float] = []

    def forward(self, t: Tensor) -> Tensor:
        t = t.sin()
        if self.drifts:
            t = t * self.drifts.pop()
        return t + self.back(self.linear(t).relu())


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    made = torch.nn.Sequential(Block(), Block())
    remat.apply_policy(made, "*", save=["linear"])
    return made


def blocks(one: torch.nn.Sequential, **how: Any) -> torch.nn.Sequential:
    for block in one:
        block.compile(backend="aot_eager", **how)
    return one


def only_one(one: torch.nn.Sequential) -> torch.nn.Sequential:
    one[1].compile(backend="aot_eager")
    return one


COMPILED: dict[str, Callable[[torch.nn.Sequential], Any]] = {
    "the model": lambda one: torch.compile(one, backend="aot_eager"),
    "its blocks": blocks,
    "its blocks, fullgraph": lambda one: blocks(one, fullgraph=True),
    "one block": only_one,
}


@pytest.mark.parametrize("how", COMPILED)
def test_prices_are_those_of_eager_code(x: Tensor, how: str) -> None:
    expected = remat.profile_regions(model(), x)
    made = model()
    compiled = COMPILED[how](made)
    got = remat.profile_regions(compiled, x)
    for one, other in zip(got.regions, expected.regions, strict=True):
        assert (one.checkpoint, one.region, one.policy) == (other.checkpoint, other.region, other.policy)
        assert (one.kept_bytes, one.flops) == (other.kept_bytes, other.flops)
        assert one.kept_bytes
    compiled(x).sum().backward()  # and it is compiled as ever


@pytest.mark.parametrize("how", COMPILED)
def test_replays_are_those_of_the_model_s_checkpoints(x: Tensor, how: str) -> None:
    expected = remat.verify_replay(model(), x)
    got = remat.verify_replay(COMPILED[how](model()), x)
    assert [(one.name, one.compared) for one in got.checkpoints] == [
        (one.name, one.compared) for one in expected.checkpoints
    ]
    assert got.compared > 0


@pytest.mark.parametrize("how", ["its blocks", "one block"])
def test_a_difference_is_found(x: Tensor, how: str) -> None:
    """One that eager code has: the compiler would have made no replay of it."""
    made = model()
    compiled = COMPILED[how](made)
    compiled(x)
    made[0].drifts = [2.0, 3.0, 4.0, 5.0]
    with pytest.raises(ValuesDriftError):
        remat.verify_replay(compiled, x)


def test_an_eager_checkpoint_around_compiled_code_replays_that_code(x: Tensor) -> None:
    """What is compared is what training runs: the compiled code, whose replay may differ from eager code's."""
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*given: Any) -> Any:
            ran.append("graph")
            return graph(*given)

        return run

    part = torch.compile(lambda t: t.sin().cos(), backend=backend)
    report = remat.verify_replay(lambda t: remat.checkpoint(region_name="b")(part)(t), x)
    assert [one.name for one in report.checkpoints] == ["b"]
    assert report.compared > 0
    assert ran == ["graph", "graph"]


def test_a_checkpoint_runs_twice_whatever_else_is_compiled(x: Tensor) -> None:
    """Forward and replay: there is no graph to look for."""
    runs: list[int] = []

    def body(t: Tensor) -> Tensor:
        runs.append(1)
        return t.sin().cos()

    torch.compile(lambda t: t + 1, backend="eager")(x)
    remat.verify_replay(remat.checkpoint(region_name="b")(body), x)
    assert len(runs) == 2
