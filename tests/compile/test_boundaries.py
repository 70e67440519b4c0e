"""Where compiled and eager code meet: compiled parts of eager checkpoints, graph breaks, and when Dynamo compiles."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import gc_off
from helpers.compare import compare, run_once
from helpers.compiled import Graphs, Ready, names
from torch import Tensor, library
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torch_remat as remat
from torch_remat.errors import SavesDriftError, UnsupportedError

WEIGHT = torch.nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))
RUNS: list[str] = []


@library.custom_op("remat_examples::noted", mutates_args=())
def noted(x: Tensor, name: str) -> Tensor:
    """``exp`` that notes its runs."""
    RUNS.append(name)
    return x.exp()


@noted.register_fake
def _(x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


noted.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def block(t: Tensor) -> Tensor:
    """A SAVE region between recomputed code, and a RECOMPUTE region."""
    t = remat.region(lambda u: noted(u @ WEIGHT, "save"), "save", recompute=False)(torch.sin(t))
    return remat.region(lambda u: noted(u, "rec"), "rec", recompute=True)(t * 0.1).cos()


def broken(t: Tensor) -> Tensor:
    """The same with a graph break in it."""
    t = remat.region(lambda u: noted(u @ WEIGHT, "save"), "save", recompute=False)(torch.sin(t))
    torch._dynamo.graph_break()
    return remat.region(lambda u: noted(u, "rec"), "rec", recompute=True)(t * 0.1).cos()


def plain_saves(t: Tensor) -> Tensor:
    """What plain code saves here in vain has the layout of what is needed, and no graph has it."""
    torch._dynamo.graph_break()
    aside = t.sin()
    return remat.region(torch.exp, "e", recompute=False)(t.sin()).cos() + 0 * aside


def fewer_saves_of_any_length(t: Tensor) -> Tensor:
    """Where the partitioner knows the length it saves less, or more."""
    wide = torch.cat([F.layer_norm(t, [6]), t.sin()])[: t.shape[0]]
    return F.gelu(wide) + torch.exp(-t * t).tanh()


def other_saves_of_any_length(t: Tensor) -> Tensor:
    """The same of a sum over the length."""
    centered = t - t.sum(0, keepdim=True) / 10
    return centered + centered.tanh() + t * centered


def _as_it_is(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph)


# Partitions as Inductor does and compiles nothing.
min_cut = aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=min_cut_rematerialization_partition)


class Passes(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def compiled_no_more() -> Iterator[None]:
    """Require that nothing is compiled in the block."""
    before = compilations()
    yield
    assert compilations() == before, "compiled again"


def compilations() -> int:
    """How many graphs Dynamo has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class TestCompiledPartsOfEagerCheckpoints:
    """``checkpoint()(torch.compile(block))``, compiled regions, compiled parts of a body."""

    def test_p2_policy_is_kept_where_the_graph_may_break(self, x: Tensor) -> None:
        call = remat.checkpoint(region_name="b")(torch.compile(block, backend="aot_eager"))
        compare(block, [x], params=[WEIGHT], engine=Ready(call))
        RUNS.clear()
        call(x).sum().backward()
        assert RUNS == ["save", "rec", "rec"]

    def test_replay_compiles_nothing(self, x: Tensor) -> None:
        call = remat.checkpoint(region_name="b")(torch.compile(block, backend="aot_eager"))
        output = call(x)
        with compiled_no_more():
            output.sum().backward()
            call(x).sum().backward()

    def test_fullgraph_warns_once_by_name(self, x: Tensor) -> None:
        call = remat.checkpoint(region_name="layers.0")(torch.compile(block, backend="aot_eager", fullgraph=True))
        with pytest.warns(UserWarning, match="SAVE region layers.0::save is recomputed") as caught:
            compare(block, [x], params=[WEIGHT], engine=Ready(call))
        assert len(caught) == 1
        assert "torch.compile(checkpoint(...)(fn))" in str(caught[0].message)
        RUNS.clear()
        call(x).sum().backward()
        assert RUNS == ["save", "rec", "save", "rec"]

    def test_compiled_function_as_a_region(self, x: Tensor) -> None:
        """Annotations in it are inert there: nothing to break a graph or to warn for."""
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)

        def body(t: Tensor) -> Tensor:
            return remat.region(compiled, "whole", recompute=False)(t.sin()).tanh()

        call = remat.checkpoint(region_name="b")(body)
        compare(lambda t: block(t.sin()).tanh(), [x], params=[WEIGHT], engine=Ready(call))
        RUNS.clear()
        call(x).sum().backward()
        assert RUNS == ["save", "rec"]

    def test_one_compiled_function_in_and_outside_checkpoints(self, x: Tensor) -> None:
        compiled = torch.compile(block, backend="aot_eager")
        expected = run_once(block, [x], params=[WEIGHT])
        checkpointed = remat.checkpoint(region_name="b")(compiled)
        for call, runs in ((compiled, 2), (checkpointed, 3), (compiled, 2), (checkpointed, 3)):
            RUNS.clear()
            actual = run_once(call, [x], params=[WEIGHT])
            assert len(RUNS) == runs
            torch.testing.assert_close(actual.input_grads, expected.input_grads, rtol=0, atol=0)
            torch.testing.assert_close(actual.param_grads, expected.param_grads, rtol=0, atol=0)

    def test_compiled_block_of_a_model_in_eager_checkpoint(self, x: Tensor) -> None:
        """Regional compilation: ``block.compile()``, and the checkpoint around the call of it."""
        block_module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU()).double()
        module = torch.nn.Sequential(torch.nn.LayerNorm(6).double(), block_module)
        parameters = list(module.parameters())
        expected = run_once(module, [x], params=parameters)
        block_module.compile(backend="aot_eager")
        actual = run_once(remat.checkpoint(region_name="b")(module), [x], params=parameters)
        torch.testing.assert_close(actual.param_grads, expected.param_grads, rtol=0, atol=0)

    def test_lengths_that_change(self) -> None:
        """R29: a compiled function in a RECOMPUTE and in a SAVE region, four microbatches, one backward over all."""
        compiled = torch.compile(lambda t: torch.relu(t @ WEIGHT).sin() * t.shape[0], backend="aot_eager")

        def body(t: Tensor) -> Tensor:
            t = remat.region(compiled, "rec", recompute=True)(t)
            return remat.region(compiled, "save", recompute=False)(t).cos()

        def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
            leaves = [torch.full((n, 6), 0.1 * n, dtype=torch.float64, requires_grad=True) for n in (3, 5, 3, 7)]
            WEIGHT.grad = None
            torch.stack([call(leaf).sum() for leaf in leaves]).sum().backward()
            return [leaf.grad for leaf in leaves if leaf.grad is not None] + [WEIGHT.grad.clone()]

        call = remat.checkpoint(region_name="b")(body)
        expected = gradients(body)
        for _ in range(2):
            torch.testing.assert_close(gradients(call), expected, rtol=0, atol=0)

    @pytest.mark.parametrize("threads", [False, True], ids=["", "backward in threads"])
    @pytest.mark.parametrize("check", ["default", "bitwise"])
    @pytest.mark.parametrize("part", [fewer_saves_of_any_length, other_saves_of_any_length])
    def test_p1_replay_runs_the_graph_of_forward(self, part: Any, check: Any, threads: bool) -> None:
        """What was compiled for one length saves other tensors than what is compiled later, for any length."""
        compiled = torch.compile(part, backend=min_cut)
        inner = remat.checkpoint(region_name="inner")(lambda t: compiled(t.cos()).tanh())
        call = remat.checkpoint(region_name="b", determinism_check=check)(
            lambda t: remat.region(inner, "inner", recompute=False)(compiled(t.sin())).cos()
        )
        leaves = [
            torch.linspace(-1, 1, n * 6, dtype=torch.float64).reshape(n, 6).requires_grad_() for n in (3, 5, 3, 7)
        ]
        expected = [torch.autograd.grad(part(part(leaf.sin()).cos()).tanh().cos().sum(), leaf)[0] for leaf in leaves]
        for _ in range(2):
            outputs = [call(leaf).sum() for leaf in leaves]
            got: dict[int, Tensor] = {}

            def backward(index: int, got: Any = got, outputs: Any = outputs) -> None:
                (got[index],) = torch.autograd.grad(outputs[index], leaves[index])

            workers = [threading.Thread(target=backward, args=(index,)) for index in range(4)]
            for worker in workers:
                worker.start() if threads else worker.run()
            for worker in workers:
                if threads:
                    worker.join()
            for index in range(4):
                torch.testing.assert_close(got[index], expected[index], rtol=1e-12, atol=1e-12)

    def test_is_recomputing_follows_the_pass(self, x: Tensor) -> None:
        seen: list[bool] = []

        @torch.compile(backend="aot_eager", fullgraph=True)
        def part(t: Tensor) -> tuple[Tensor, bool]:
            return torch.sin(t) * 2, remat.is_recomputing()

        def body(t: Tensor) -> Tensor:
            result, answer = part(t)
            seen.append(answer)
            return torch.exp(result)

        call = remat.checkpoint(region_name="b")(body)
        for _ in range(2):
            seen.clear()
            call(x).sum().backward()
            assert seen == [False, True]

    def test_p5_nothing_of_the_checkpoint_stays(self, x: Tensor) -> None:
        compiled = torch.compile(block, backend="aot_eager")
        made: list[weakref.ref[Any]] = []

        def body(t: Tensor) -> Tensor:
            frame = remat.runtime.frame.current_frame.get()
            if frame is not None and not frame.replaying:
                made.append(weakref.ref(frame.tape))
            return compiled(t)

        call = remat.checkpoint(region_name="b")(body)
        call(x).sum().backward()
        made.clear()
        with gc_off():
            call(x).sum().backward()
            assert [tape() for tape in made] == [None]


class Decorated(torch.nn.Module):
    """A module whose ``forward`` is a checkpoint."""

    @remat.checkpoint(region_name="decorated")
    def forward(self, t: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return block(t)


class Assigned(torch.nn.Module):
    """A module that got a checkpoint for its ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = remat.checkpoint(region_name="assigned")(block)


class TestEntryPoints:
    """Whatever is compiled, the checkpoint in it is part of the graph."""

    @pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", ""])
    @pytest.mark.parametrize("kind", ["object", "method", "decorated module", "assigned module", "module.compile"])
    def test_p2_policy_is_kept(self, graphs: Graphs, x: Tensor, kind: str, fullgraph: bool) -> None:
        call: Any = {
            "object": remat.checkpoint(region_name="b")(block),
            "method": Decorated().forward,
            "assigned module": Assigned(),
        }.get(kind, Decorated())
        if kind == "module.compile":
            call.compile(backend=graphs.backend, fullgraph=fullgraph)
        else:
            call = graphs.compile(call, fullgraph=fullgraph)
        compare(block, [x], params=[WEIGHT], engine=Ready(call))
        assert len(graphs.forward) == 1
        assert names(graphs.backward).count("noted") == 1, "the RECOMPUTE region"

    @pytest.mark.parametrize("fullgraph", [True, False])
    def test_p5_compilation_holds_nothing_of_its_caller(self, fullgraph: bool) -> None:
        """Not even until the caller returns, and in the very call that compiles."""
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        body = remat.checkpoint(region_name="b")(lambda t: torch.exp(remat.region(torch.sin, "s", recompute=False)(t)))
        call = torch.compile(lambda t: body(t), backend="aot_eager", fullgraph=fullgraph)
        with gc_off():
            given = x * 1
            ref = StorageWeakRef(given.untyped_storage())
            output = call(given)
            del given
            output.sum().backward()
            assert ref.expired()


class TestGraphBreaks:
    """What cannot be in a graph runs eagerly, with the same policy and the same numbers in both passes."""

    def test_p2_break_in_the_body_keeps_the_policy(self, x: Tensor) -> None:
        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(broken)(t) * 2, backend="aot_eager")
        compare(lambda t: broken(t) * 2, [x], params=[WEIGHT], engine=Ready(call))
        RUNS.clear()
        call(x).sum().backward()
        assert RUNS == ["save", "rec", "rec"]

    def test_p1_compiler_reset_between_forward_and_backward(self, x: Tensor) -> None:
        """Replay compiles the function again, to the same graph."""
        call = remat.checkpoint(region_name="b")(torch.compile(lambda t: t.sin().exp().tanh(), backend="aot_eager"))
        (expected,) = torch.autograd.grad(x.sin().exp().tanh().sum(), x)
        output = call(x).sum()
        torch._dynamo.reset()
        assert torch.equal(torch.autograd.grad(output, x)[0], expected)

    def test_double_backward_of_a_graph_is_refused(self, x: Tensor) -> None:
        """By AOTAutograd, where nothing can be left to Python: never a number."""
        call = torch.compile(remat.checkpoint(region_name="b")(block), backend="aot_eager", fullgraph=True)
        (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):
            gradient.sum().backward()

    def test_p1_replay_runs_what_forward_ran(self, x: Tensor) -> None:
        """Compiled and plain code save other tensors: a replay of the other kind would fill slots with wrong ones."""
        notes: list[str] = []

        def body(t: Tensor) -> Tensor:
            notes.append("run")
            aside = t.sin()
            return remat.region(torch.exp, "e", recompute=False)(t.sin()).cos() + 0 * aside

        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(body)(t), backend="aot_eager")
        compare(body, [x], engine=Ready(call), calls=3)
        assert len(notes) == 7, "one plain run, three forwards and their replays"

    def test_p1_forward_under_a_dispatch_mode(self, x: Tensor) -> None:
        """There nothing is compiled, so nothing is in replay either, which runs without the mode."""
        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(broken)(t), backend="aot_eager")
        (expected,) = torch.autograd.grad(broken(x).sum(), x)
        for _ in range(2):
            with FlopCounterMode(display=False):
                output = call(x)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
            assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)

    def test_p1_backward_in_another_thread(self, x: Tensor) -> None:
        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(broken)(t), backend="aot_eager")
        (expected,) = torch.autograd.grad(broken(x).sum(), x)
        got: list[Tensor] = []
        output = call(x).sum()
        thread = threading.Thread(target=lambda: got.extend(torch.autograd.grad(output, x)))
        thread.start()
        thread.join()
        assert torch.equal(got[0], expected)

    def test_p1_other_threads_and_their_dispatch_modes(self, x: Tensor) -> None:
        """Torch's own flag for being in a mode is one for all threads."""
        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(broken)(t), backend="aot_eager")
        (expected,) = torch.autograd.grad(broken(x).sum(), x)
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with Passes():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        try:
            for _ in range(2):
                assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)
        finally:
            leave.set()
            thread.join()

    @pytest.mark.parametrize("function", [plain_saves, broken], ids=["saves of one layout", "regions"])
    @pytest.mark.parametrize("where", ["around", "inside"])
    @pytest.mark.parametrize("how", ["mode", "stance"])
    @pytest.mark.parametrize("when", ["forward", "backward"])
    def test_p1_one_pass_compiled_and_the_other_not(
        self, x: Tensor, function: Any, where: str, how: str, when: str
    ) -> None:
        """An error wherever replay cannot run what forward ran, never a number."""
        if where == "around":
            call = torch.compile(lambda t: remat.checkpoint(region_name="b")(function)(t), backend="aot_eager")
        else:
            call = remat.checkpoint(region_name="b")(torch.compile(function, backend="aot_eager"))
        (expected,) = torch.autograd.grad(function(x).sum(), x)

        def plain() -> Any:
            return Passes() if how == "mode" else torch.compiler.set_stance("force_eager")

        torch.autograd.grad(call(x).sum(), x)
        for _ in range(2):
            with plain() if when == "forward" else contextlib.nullcontext():
                output = call(x).sum()
            with plain() if when == "backward" else contextlib.nullcontext():
                try:
                    got = torch.autograd.grad(output, x)
                except SavesDriftError as error:
                    got = error
            if isinstance(got, SavesDriftError):
                assert "To fix: run forward and backward under the same torch.compiler.set_stance" in str(got)
            else:
                assert torch.equal(got[0], expected)

    def test_p1_retry_of_a_replay_that_failed_while_dynamo_traced(self, x: Tensor) -> None:
        """Dynamo gives up a function in which an error is raised: what forward compiled cannot run again."""
        fails = [False]

        def fragile(t: Tensor) -> Tensor:
            if remat.is_recomputing() and fails[0]:
                raise ConnectionError("a collective failed")
            return t * 1.5

        def body(t: Tensor) -> Tensor:
            t = remat.region(torch.sin, "save", recompute=False)(t.cos())
            torch._dynamo.graph_break()
            return torch.exp(fragile(t))

        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(body)(t), backend="aot_eager")
        (expected,) = torch.autograd.grad(body(x).sum(), x)
        output = call(x).sum()
        fails[0] = True
        with pytest.raises(ConnectionError):
            torch.autograd.grad(output, x)
        fails[0] = False
        with pytest.raises(SavesDriftError, match="Dynamo may have given up the function"):
            torch.autograd.grad(output, x)
        torch._dynamo.reset()
        assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)

    def test_eager_checkpoint_whose_backward_runs_in_compiled_code(self, x: Tensor) -> None:
        """Forward was not compiled, so replay is not."""
        loss = remat.checkpoint(region_name="b")(block)(x).sum()
        (expected,) = torch.autograd.grad(block(x).sum(), x)

        def step(t: Tensor) -> Tensor:
            loss.backward()
            return t * 2

        x.grad = None
        with compiled_no_more():
            step(x)
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
        x.grad = None
        loss = remat.checkpoint(region_name="b")(block)(x).sum()
        torch.compile(step, backend="aot_eager")(x)
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


class TestNestedGraphBreaks:
    """Dynamo's option to break functions that others call, which leaves a checkpoint of a graph to eager code."""

    @pytest.fixture(autouse=True)
    def _nested(self) -> Iterator[None]:
        with torch._dynamo.config.patch(nested_graph_breaks=True):
            yield

    def test_refused_where_the_body_breaks(self, x: Tensor) -> None:
        call = torch.compile(lambda t: remat.checkpoint(region_name="b")(broken)(t), backend="aot_eager")
        with pytest.raises(UnsupportedError, match="nested_graph_breaks"):
            call(x)

    def test_p2_whole_or_eager(self, x: Tensor) -> None:
        (expected,) = torch.autograd.grad(block(x).sum(), x)
        whole = torch.compile(lambda t: remat.checkpoint(region_name="b")(block)(t), backend="aot_eager")
        for call in (whole, remat.checkpoint(region_name="b")(torch.compile(broken, backend="aot_eager"))):
            for _ in range(2):
                output = call(x)
                RUNS.clear()
                torch.testing.assert_close(torch.autograd.grad(output.sum(), x)[0], expected)
                assert RUNS == ["rec"]
