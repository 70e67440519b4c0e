"""Replay of a function that Dynamo has compiled once more: refused unless both graphs save the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.compare import compare
from helpers.compiled import Graphs, Ready
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

import torch_remat as remat
from torch_remat.errors import SavesDriftError

WEIGHT = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)


def work(t: Tensor, keep: Callable[[Tensor], Any]) -> Tensor:
    """If ``keep`` takes the first result out of the graph the partitioner saves it, otherwise what it is made of."""
    first = t + 1
    keep(first)
    product = (first * first) @ WEIGHT
    return first + (product + torch.sin(product) @ WEIGHT)


class TestCompiledAgain:
    """Forward and replay run codes of one function that differ."""

    def _call(self, graphs: Graphs, keep: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
        part = graphs.compile(lambda t: work(t, keep), fullgraph=False)
        return remat.checkpoint(region_name="b")(lambda t: part(t.sin()).cos())

    def test_p1_a_graph_with_another_output_is_refused(self, graphs: Graphs, x: Tensor) -> None:
        """The two save other tensors, of the same layout, in the same number."""
        kept: list[Tensor] = []

        def keep(t: Tensor) -> None:
            if not remat.is_recomputing():
                kept.append(t)

        call = self._call(graphs, keep)
        for _ in range(2):
            kept.clear()
            with pytest.raises(SavesDriftError, match="was compiled once more for replay") as caught:
                call(x).sum().backward()
            assert "checkpoint b" in str(caught.value)
            assert "is_recomputing" in str(caught.value)

    @pytest.mark.parametrize("kind", ["flag", "counter", "number", "list", "text"])
    def test_p1_graphs_of_one_program_are_as_good(self, graphs: Graphs, x: Tensor, kind: str) -> None:
        """What differs are constants, or what Python does around the graph."""
        notes: list[Any] = []
        counter = {"runs": 0}
        module: Any = torch.nn.Module()
        module.runs = 0

        def keep(t: Tensor) -> None:
            if kind == "flag":
                notes[:] = [remat.is_recomputing()]
            elif kind == "counter":
                module.runs = module.runs + 1
            elif kind == "number":
                counter["runs"] += 1
            elif kind == "list":
                notes.append(t.shape)
            else:
                counter["last"] = "replay" if remat.is_recomputing() else "forward"  # type: ignore[assignment]

        compare(lambda t: work(t.sin(), lambda _: None).cos(), [x], engine=Ready(self._call(graphs, keep)), calls=2)

    def test_p1_a_graph_of_any_length_is_no_graph_of_one_length(self, graphs: Graphs) -> None:
        """The counter makes Dynamo compile again when the length is known to vary."""
        counter = {"runs": 0}

        def keep(t: Tensor) -> None:
            counter["runs"] += 1

        call = self._call(graphs, keep)
        leaves = [torch.full((n, 6), 0.1 * n, dtype=torch.float64, requires_grad=True) for n in (3, 5)]
        outputs = [call(leaf).sum() for leaf in leaves]
        with pytest.raises(SavesDriftError, match="lengths that vary"):
            outputs[0].backward()


class Doubled(TorchFunctionMode):
    """``sin`` gives twice as much."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class TestFunctionModes:
    """Torch leaves function modes out of checkpoints in graphs; a default device is one."""

    @pytest.mark.parametrize("mode", [Doubled, lambda: torch.device("meta")], ids=["own", "device"])
    def test_p1_mode_around_the_checkpoint(self, x: Tensor, mode: Callable[[], Any]) -> None:
        def body(t: Tensor) -> Tensor:
            made = torch.ones(6)
            return remat.region(torch.exp, "e", recompute=False)(torch.sin(t)).cos() * (2 if made.is_meta else 3)

        def model(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(t: Tensor) -> Tensor:
                with mode():
                    return call(t)

            return run

        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(body)(t), backend="aot_eager")
        compare(model(body), [x], engine=Ready(model(call)))

    def test_refused_in_one_graph(self, x: Tensor) -> None:
        call = torch.compile(lambda t: remat.checkpoint()(torch.sin)(t), backend="aot_eager", fullgraph=True)
        with Doubled(), pytest.raises(RuntimeError, match="inside a torch function mode"):
            call(x)


def _one_region(t: Tensor, scale: float) -> Tensor:
    return remat.region(torch.exp, "e", recompute=False)(t.sin()) * scale


def _read_twice(t: Tensor, scale: float) -> Tensor:
    return _one_region(t, scale).tanh() * scale


def _two_regions(t: Tensor, scale: float) -> Tensor:
    return remat.region(torch.exp, "second", recompute=False)(_read_twice(t, scale)) * scale


def _read_from_a_tensor(t: Tensor, scale: float) -> Tensor:
    return _one_region(t, torch.tensor(scale).item())


class TestNumbersThatChange:
    """Dynamo compiles again where it sees that a number changes, and the new code saves and reads more than the old."""

    @pytest.mark.parametrize("body", [_one_region, _read_twice, _two_regions, _read_from_a_tensor])
    @pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (4, 4, 6, 6, 7, 7), (4, 6, 4, 6)], ids=str)
    def test_p1_next_to_the_output_of_a_save_region(
        self, graphs: Graphs, body: Callable[[Tensor, float], Tensor], lengths: tuple[int, ...]
    ) -> None:
        """No plan knows what code needs that is compiled in this very call: it gets what forward had."""
        call = remat.checkpoint(region_name="b")(graphs.compile(body, fullgraph=False))
        for step, length in enumerate(lengths):
            x = torch.linspace(0, 1, length, dtype=torch.float64).requires_grad_()
            (got,) = torch.autograd.grad(call(x, step + 0.5).sum(), x)
            (expected,) = torch.autograd.grad(body(x, step + 0.5).sum(), x)
            assert torch.equal(got, expected)

    def test_p3_what_the_code_does_not_need_is_dropped_after_forward(self, graphs: Graphs, x: Tensor) -> None:
        made: list[StorageWeakRef] = []

        def saved(t: Tensor) -> Tensor:
            result = t + 1
            made.append(StorageWeakRef(result.untyped_storage()))
            return result

        def body(t: Tensor) -> Tensor:
            return remat.region(torch._dynamo.disable(saved), "r", recompute=False)(t.sin()) * 2

        call = remat.checkpoint(region_name="b")(graphs.compile(body, fullgraph=False))
        for _ in range(3):
            out = call(x)
            assert made.pop().expired()
            out.sum().backward()

    def test_p1_a_number_that_changes_and_a_length_that_is_new(self, graphs: Graphs) -> None:
        """Of the number the compiled function makes a tensor of its own, in each pass another."""
        call = remat.checkpoint(region_name="b")(graphs.compile(lambda t, s: t.sin() * s, fullgraph=False))
        for step, length in enumerate((4, 4, 4, 6, 7)):
            x = torch.linspace(0, 1, length, dtype=torch.float64).requires_grad_()
            got = torch.autograd.grad(call(x, step + 0.5).square().sum(), x)[0]
            assert torch.equal(got, torch.autograd.grad((x.sin() * (step + 0.5)).square().sum(), x)[0])
