"""``explain`` of compiled code: what the partitioned graphs keep, by region, against what eager code keeps."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from contract.test_p3_kept_bytes import llama_block
from helpers.compiled import Graphs
from torch import Tensor

import torch_remat as remat
from torch_remat.diagnostics.explanation import CheckpointExplanation, Explanation

LINEAR = torch.nn.Linear(6, 6).double()


def by_region(one: CheckpointExplanation) -> dict[str | None, tuple[str, int]]:
    """Policy and kept bytes of every region."""
    return {region.name: (region.policy, region.kept_bytes) for region in (*one.regions, one.bare)}


def rows(explanation: Explanation, region: str) -> set[str]:
    """What is kept and rebuilt of a region, in all checkpoints."""
    found = [one for part in explanation.checkpoints for one in (*part.regions, part.bare) if one.name == region]
    return {f"{word} {row.what}" for one in found for word in ("kept", "rebuilt") for row in getattr(one, word)}


def stack(blocks: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Llama blocks in checkpoints, and an input for them."""
    layers = [llama_block(32, 4, 80)[0] for _ in range(blocks)]

    def model(x: Tensor) -> Tensor:
        for index, layer in enumerate(layers):
            x = remat.checkpoint(region_name=f"layers.{index}")(layer)(x)
        return x

    return model, torch.randn(2, 16, 32, requires_grad=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_p3_llama_blocks_keep_what_they_keep_in_eager_code(backend: str) -> None:
    """Region by region, input by input; the backend is not asked: graphs are partitioned as Inductor does."""
    model, x = stack(2)
    eager = remat.explain(model, x)
    compiled = remat.explain(torch.compile(model, backend=backend, fullgraph=True), x)
    assert compiled.kept_bytes == eager.kept_bytes > 0
    for one, other in zip(compiled.checkpoints, eager.checkpoints, strict=True):
        assert (one.name, one.kept_bytes) == (other.name, other.kept_bytes)
        assert by_region(one) == by_region(other)
        assert sum(row.bytes for row in one.inputs) == sum(row.bytes for row in other.inputs)
    assert compiled.outside == ()


def test_kept_is_what_the_backward_graph_gets(graphs: Graphs, x: Tensor) -> None:
    """The same as a backend of one's own sees: names of operations, bytes, and what is repeated."""

    def body(t: Tensor) -> Tensor:
        t = remat.region(torch.exp, "saved", recompute=False)(t.sin())
        with remat.name_scope("scope"):
            t = remat.region(lambda u: torch.tanh(u).cos(), "redone", recompute=True)(t)
        return F.dropout(t, 0.5) ** 2

    def step(t: Tensor) -> Tensor:
        return LINEAR(remat.checkpoint(region_name="block")(body)(LINEAR(t))).sin()

    found = remat.explain(graphs.compile(step), x)
    assert graphs.forward == [], "the user's own backend was not asked"
    (one,) = found.checkpoints
    assert one.name == "block"
    assert [(region.name, region.policy) for region in one.regions] == [
        ("saved", "save"),
        ("scope/redone", "recompute"),
    ]
    assert "kept exp" in rows(found, "saved")
    assert {"rebuilt tanh", "rebuilt cos"} >= rows(found, "scope/redone") != set()
    random = {"inductor_seeds", "run_and_save_rng_state[0]"}  # the one or the other, by the build of torch
    assert [row.what for row in one.inputs if row.bytes and row.what not in random] == ["addmm"]
    assert len([row for row in (*one.inputs, *one.bare.kept) if row.what in random]) == 1
    assert one.regions[1].kept_bytes == 0
    assert one.replay.runs
    assert "repeats" in one.replay.text
    assert sum(row.bytes for row in one.regions[0].kept) == one.regions[0].kept_bytes == x.nbytes
    assert [row.what for row in found.outside if row.bytes] == ["addmm"], "what the sine needs"
    assert Path(__file__).name in one.regions[0].kept[0].why
    assert "  saved (save): keeps 192 bytes" in str(found).splitlines()
    assert "code of graphs outside checkpoints: keeps" in str(found)
    text = json.loads(json.dumps(dataclasses.asdict(found)))
    assert text["checkpoints"][0]["regions"][0]["kept"][0]["what"] == "exp"

    graphs.compile(step)(x).sum().backward()
    kept = sum(graphs.kept[name] for name in ("exp", "addmm"))
    assert kept == one.regions[0].kept_bytes + sum(row.bytes for row in one.inputs if row.what not in random)


def test_p3_views_of_leaves_cost_nothing(x: Tensor) -> None:
    """The transposed weight that a product's backward reads is a view of what the caller has."""

    def body(t: Tensor, weight: Tensor) -> Tensor:
        return remat.region(torch.matmul, "product", recompute=False)(t.sin(), weight).cos()

    def step(t: Tensor, weight: Tensor) -> Tensor:
        return remat.checkpoint(region_name="b")(body)(t, weight)

    weight = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
    eager = remat.explain(step, x, weight)
    compiled = remat.explain(torch.compile(step, fullgraph=True), x, weight)
    assert compiled.kept_bytes == eager.kept_bytes == x.shape[0] * 3 * 8
    (view,) = [row for row in compiled.checkpoints[0].regions[0].kept if not row.bytes]
    assert "a view of a leaf" in view.why
    inner = remat.explain(torch.compile(lambda t, w: step(t, w * 2), fullgraph=True), x, weight)
    assert inner.kept_bytes == x.shape[0] * 3 * 8 + weight.nbytes, "what the graph makes is not the caller's"


class Block(torch.nn.Module):
    """A checkpoint of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).double()
        self.name = f"layers.{index}"

    def forward(self, t: Tensor) -> Tensor:
        return remat.checkpoint(region_name=self.name)(self.body)(t)

    def body(self, t: Tensor) -> Tensor:
        return t + remat.region(self.linear, "linear", recompute=False)(torch.tanh(t)).sin()


class Breaking(Block):
    """One that Dynamo cannot make one graph of."""

    def body(self, t: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().body(t)


@pytest.mark.parametrize("kind", [Block, Breaking])
@pytest.mark.parametrize("compiled", [range(10), (1,)], ids=["all", "one"])
def test_model_with_blocks_that_are_compiled(x: Tensor, compiled: tuple[int, ...], kind: type[Block]) -> None:
    """Regional compilation, or eager blocks among compiled ones: each block is explained, in order."""
    model = torch.nn.Sequential(*(kind(index) for index in range(10 if len(compiled) > 1 else 3)))
    expected = remat.explain(model, x)
    for index in compiled:
        model[index].compile(backend="aot_eager")
    found = remat.explain(model, x)
    assert [by_region(one) for one in found.checkpoints] == [by_region(one) for one in expected.checkpoints]
    assert found.kept_bytes == expected.kept_bytes
    names = [one.name for one in found.checkpoints]
    shared = kind is Block and len(compiled) > 1
    assert names == ([f"layers.{0 if shared else index}" for index in range(len(model))])


def test_asking_changes_nothing(graphs: Graphs, x: Tensor) -> None:
    """Compiled once, numbers as before, generators where they were; asked again, nothing is compiled again."""

    def body(t: Tensor) -> Tensor:
        return F.dropout(remat.region(LINEAR, "linear", recompute=False)(t.tanh()), 0.5).sin()

    call = graphs.compile(lambda t: remat.checkpoint(region_name="block")(body)(t))
    torch.manual_seed(3)
    expected = torch.autograd.grad(call(x).sum(), x)[0]
    state = torch.get_rng_state()
    first = remat.explain(call, x)
    compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert remat.explain(call, x) == first
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    torch.manual_seed(3)
    assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)
    assert len(graphs.forward) == 1


def test_lengths_that_change(x: Tensor) -> None:
    """Bytes are those of the call, whatever length the graph was made for."""
    body = lambda t: remat.region(torch.exp, "exp", recompute=False)(t.sin()).sin()
    call = torch.compile(lambda t: remat.checkpoint(region_name="block")(body)(t), backend="aot_eager")
    for rows_ in (4, 3, 2):
        leaf = x.detach()[:rows_].clone().requires_grad_()
        (one,) = remat.explain(call, leaf).checkpoints
        assert one.regions[0].kept_bytes == rows_ * 6 * 8


def test_plain_bodies_and_models_are_explained_as_ever(x: Tensor) -> None:
    """In a process that compiles, too."""
    body = lambda t: remat.region(torch.exp, "exp", recompute=False)(t.sin()).cos()
    assert [one.kept_bytes for one in remat.explain(body, x).checkpoints] == [x.nbytes]
    eager_body = torch.compile(lambda t: t.sin(), backend="aot_eager")
    (one,) = remat.explain(remat.checkpoint(region_name="b")(lambda t: body(eager_body(t))), x).checkpoints
    assert one.name == "b"
    assert one.regions[0].kept_bytes == x.nbytes


def test_p3_an_eager_checkpoint_around_a_compiled_part(x: Tensor) -> None:
    """The graph breaks at the SAVE region, which is kept: also when a function around the checkpoint is explained."""
    part = torch.compile(lambda t: remat.region(LINEAR, "l", recompute=False)(t.sin()).cos(), backend="aot_eager")
    checkpointed = remat.checkpoint(region_name="e")(part)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="SAVE region")  # nobody asked for one graph
        for function in (checkpointed, lambda t: checkpointed(t)):
            (found,) = remat.explain(function, x).checkpoints
            assert by_region(found) == {"l": ("save", x.numel() * 8), None: ("bare", 0)}
