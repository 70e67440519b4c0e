"""Models with a policy attached, compiled: in one graph, block by block, and whatever is compiled first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compiled import Graphs, names
from torch import Tensor, nn

import torch_remat as remat


class Attention(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(torch.tanh(self.wq(x)))


class Block(nn.Module):
    """An attention that is called twice, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Attention()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = x + self.attention(self.norm(x)).sin() * scale
        return x + self.attention(x).sin()


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, blocks: int, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model(blocks: int, block: Callable[[], nn.Module] = Block) -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    return Model(blocks, block).double()


def step(call: Callable[..., Tensor], parameters: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(1)
    output = call(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *parameters])]


def compiled(graphs: Graphs, made: Any, how: str) -> Any:
    """``made``, compiled with ``fullgraph=True``."""
    if how == "model":
        return graphs.compile(made)
    if how == "model.compile()":
        made.compile(backend=graphs.backend, fullgraph=True)
    elif how == "block.compile()":
        for layer in made.layers:
            layer.compile(backend=graphs.backend, fullgraph=True)
    else:
        made.layers = nn.ModuleList(graphs.compile(layer) for layer in made.layers)
    return made


HOW = {"model": (2, 2), "model.compile()": (1, 1), "block.compile()": (9, 1), "compile(block)": (9, 1)}
"""What is compiled, in how many blocks, and how many there are in a graph. Dynamo compiles one function eight times."""


@pytest.mark.parametrize("how", sorted(HOW))
def test_p2_policy_is_in_the_graph(graphs: Graphs, x: Tensor, how: str) -> None:
    """SAVE: the first projection of both calls. The second one is recomputed, as nobody named it."""
    blocks, together = HOW[how]
    made = model(blocks)
    parameters = list(made.parameters())
    expected = step(made, parameters, x)
    remat.apply_policy(made, blocks="layers.*", save=["attention.wq"])
    got = step(compiled(graphs, made, how), parameters, x)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert len(graphs.forward) == 1
    assert names(graphs.forward).count("addmm") == 4 * together
    again = names(graphs.backward)
    assert (again.count("addmm"), again.count("tanh")) == (2 * together, 2 * together), "the second projections only"


@pytest.mark.parametrize("how", ["model.compile()", "block.compile()"])
def test_p2_policy_attached_after_compilation(graphs: Graphs, x: Tensor, how: str) -> None:
    """Compiled and run before there is a policy: the next call compiles again, with it."""
    made = model(1)
    parameters = list(made.parameters())
    call = compiled(graphs, made, how)
    expected = step(call, parameters, x)
    graphs.clear()
    remat.apply_policy(made, blocks="layers.*", save=["attention.wq"])
    got = step(call, parameters, x)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert "tanh" in names(graphs.backward)


def test_p2_blocks_with_policies_of_their_own(graphs: Graphs, x: Tensor) -> None:
    """A graph for each policy, and no more."""
    made = model(4)
    parameters = list(made.parameters())
    expected = step(made, parameters, x)
    remat.apply_policy(made, blocks="layers.[01]", save=["attention.wq", "attention.wo"])
    remat.apply_policy(made, blocks="layers.[23]", save=["attention"], recompute=["norm"])
    got = step(compiled(graphs, made, "block.compile()"), parameters, x)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert len(graphs.forward) == 2
    assert "addmm" not in names(graphs.backward)
    assert names(graphs.backward).count("tanh") == 2, "the first two blocks', which share a graph"
    assert {"torch_remat_save"} <= {key for graph in graphs.forward for key in _marks(graph)}


def _marks(graph: torch.fx.GraphModule) -> set[str]:
    return {key for node in graph.graph.nodes for key in node.meta.get("custom", {})}


class Dropping(Block):
    """A block with random numbers."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.dropout(super().forward(x, scale=scale), 0.3) ** 2


@pytest.mark.parametrize("hooks", [(remat.GeneratorHook(),), lambda module: [remat.GeneratorHook()]], ids=["", "made"])
def test_p1_state_hooks_of_a_policy(x: Tensor, hooks: Any) -> None:
    made = model(1, Dropping)
    parameters = list(made.parameters())
    expected = step(made, parameters, x)
    remat.apply_policy(made, blocks="layers.*", save=["attention.wq"], recompute_state_hooks=hooks)
    got = step(torch.compile(made, backend="aot_eager", fullgraph=True), parameters, x)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_policy_of_a_copy_and_graph_breaks(x: Tensor) -> None:
    """A copy compiles with its own weights; a block that breaks the graph runs eagerly, with its policy."""

    class Broken(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x, scale=scale)

    for kind, fullgraph in ((Block, True), (Broken, False)):
        made = model(1, kind)
        remat.apply_policy(made, blocks="layers.*", save=["attention.wq"])
        other = copy.deepcopy(made)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        for one in (made, other):
            parameters = list(one.parameters())
            expected = step(one, parameters, x)
            got = step(torch.compile(one, backend="aot_eager", fullgraph=fullgraph), parameters, x)
            assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
