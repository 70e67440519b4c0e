"""When Dynamo compiles again: where shapes or policies change, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compiled import Graphs, names
from helpers.events import Hidden
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import InvalidTypeError, InvalidValueError


def block(x: Tensor) -> Tensor:
    return remat.region(torch.exp, "e", recompute=False)(x.sin()).cos()


class Named(torch.nn.Module):
    """A block that has its names from where it stands in the model."""

    def __init__(self, index: int, where: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).double()
        self.name, self.region_name, self.where = f"layers.{index}", f"linear.{index}", where
        if where == "made before":
            self.region = remat.region(self.linear, self.region_name, recompute=False)
            self.run = remat.checkpoint(region_name=self.name)(self.body)

    def forward(self, t: Tensor) -> Tensor:
        if self.where == "policy":
            return self.body(t)
        if self.where == "made before":
            return self.run(t)
        return remat.checkpoint(region_name=self.name)(self.body)(t)

    def body(self, t: Tensor) -> Tensor:
        if self.where == "policy":
            return t + self.linear(torch.tanh(t)).sin()
        linear = getattr(self, "region", None) or remat.region(self.linear, self.region_name, recompute=False)
        return t + linear(torch.tanh(t)).sin()


class BreakInTheBody(Named):
    def body(self, t: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().body(t)


class BreakAtABranch(Named):
    def body(self, t: Tensor) -> Tensor:
        if t.sum() > 1e9:
            return t
        return super().body(t)


class BreakAfterARegionIsMade(Named):
    def body(self, t: Tensor) -> Tensor:
        linear = remat.region(self.linear, self.region_name, recompute=False)
        torch._dynamo.graph_break()
        return t + linear(torch.tanh(t)).sin()


BREAKING: dict[str, Callable[..., Any]] = {
    "in the body": BreakInTheBody,
    "at a branch": BreakAtABranch,
    "after a region is made": BreakAfterARegionIsMade,
}


class TestNames:
    """Blocks that differ by name only share what is compiled; what runs eagerly has its own name."""

    @pytest.mark.parametrize("fullgraph", [True, False])
    @pytest.mark.parametrize("where", ["made in forward", "made before", "policy"])
    def test_blocks_that_differ_by_name_only(self, graphs: Graphs, x: Tensor, where: str, fullgraph: bool) -> None:
        """Blocks compiled one by one: one graph serves them all, beyond Dynamo's limit of eight for one function."""
        model = torch.nn.Sequential(*(Named(index, where) for index in range(10)))
        if where == "policy":
            remat.apply_policy(model, "*", save=["linear"])
        plain = [one for block in model for one in (block.linear.weight, block.linear.bias)]
        expected = torch.autograd.grad(model(x).sum(), [x, *plain])
        for one in model:
            one.compile(backend=graphs.backend, fullgraph=fullgraph)
        got = torch.autograd.grad(model(x).sum(), [x, *plain])
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
        assert len(graphs.forward) == 1
        assert "tanh" in graphs.recomputed
        assert names(graphs.forward).count("addmm") == 1
        assert "addmm" not in names(graphs.backward)

    @pytest.mark.parametrize("where", ["made in forward", "made before"])
    @pytest.mark.parametrize("breaks", ["in the body", "at a branch", "after a region is made"])
    def test_names_of_what_runs_eagerly_are_its_own(self, graphs: Graphs, x: Tensor, breaks: str, where: str) -> None:
        """Where the graph breaks, blocks of one function have their own names, and share what is compiled of them."""
        model = torch.nn.Sequential(*(BREAKING[breaks](index, where) for index in range(10)))
        for one in model:
            one.compile(backend=graphs.backend)
        first = 0
        for _ in range(2):
            with remat.collect_trace() as trace:
                model(x).sum().backward()
            lines = [line.strip() for line in trace.format().splitlines()[1:]]
            assert lines == [f"linear.{index}: save" for index in range(10)]
            first = first or len(graphs.forward)
        assert len(graphs.forward) == first <= 3, "the parts of one block, whatever its names"

    def test_a_checkpoint_that_outlives_the_graph_has_its_own_name(self, x: Tensor) -> None:
        """Made in compiled code, and called or kept where the graph has ended."""
        seen: list[str] = []

        class Late(Named):
            def forward(self, t: Tensor) -> Tensor:
                self.kept = remat.checkpoint(region_name=self.name)(self.body)
                torch._dynamo.graph_break()
                torch._dynamo.disable(lambda: seen.append(repr(self.kept)))()
                return self.kept(t)

        for index in range(3):
            late = Late(index, "made in forward")
            late.compile(backend="aot_eager")
            late(x).sum().backward()
            assert f"<checkpoint layers.{index} of" in repr(late.kept)
        assert [line.split()[1] for line in seen] == ["layers.0", "layers.1", "layers.2"]

    def test_names_are_checked_though_nothing_depends_on_them(self, x: Tensor) -> None:
        for attribute, value in (("name", ""), ("region_name", ""), ("region_name", 3), ("name", 3)):
            block = Named(0, "made in forward")
            setattr(block, attribute, value)
            with pytest.raises((InvalidValueError, InvalidTypeError)):
                torch.compile(block, backend="aot_eager")(x)


class TestRecompilation:
    """Shapes, policies, threads."""

    def test_lengths(self, graphs: Graphs) -> None:
        call = graphs.compile(lambda t: remat.checkpoint(region_name="b")(block)(t))
        for index, length in enumerate((3, 5, 3, 7, 4)):
            leaf = torch.full((length, 6), 0.3, dtype=torch.float64, requires_grad=True)
            call(leaf).sum().backward()
            assert leaf.grad is not None
            (expected,) = torch.autograd.grad(block(leaf).sum(), leaf)
            assert torch.equal(leaf.grad, expected)
            assert len(graphs.forward) == min(index + 1, 2), "once for the first length, once for any length"

    def test_policy_toggled_at_run_time(self, graphs: Graphs, x: Tensor) -> None:
        policy = Hidden(recompute=False)

        def body(t: Tensor) -> Tensor:
            return remat.region(torch.exp, "e", recompute=policy["recompute"])(t.sin()).cos()

        call = graphs.compile(lambda t: remat.checkpoint(region_name="b")(body)(t))
        for index, recompute in enumerate((False, True, False, True)):
            policy["recompute"] = recompute
            call(x).sum().backward()
            assert len(graphs.forward) == min(index + 1, 2), "once for each policy"
        first, second = (set(names([graph])) for graph in graphs.backward)
        assert "exp" not in first
        assert "exp" in second

    def test_two_threads_compile_at_once(self, x: Tensor) -> None:
        """What is known while tracing belongs to a tracer: names of one thread are no duplicates in the other."""
        errors: list[BaseException] = []
        start = threading.Barrier(2)

        def work(index: int) -> None:
            def body(t: Tensor) -> Tensor:
                for name in ("a", "b", "c"):
                    t = remat.region(F.gelu, name, recompute=False)(t.sin() * (index + 1))
                return t

            try:
                leaf = x.detach().clone().requires_grad_()
                call = torch.compile(
                    lambda t: remat.checkpoint(region_name="b")(body)(t), backend="aot_eager", fullgraph=True
                )
                start.wait()
                call(leaf).sum().backward()
                (expected,) = torch.autograd.grad(body(leaf).sum(), leaf)
                assert leaf.grad is not None
                assert torch.equal(leaf.grad, expected)
            except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
