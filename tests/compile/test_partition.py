"""One graph: SAVE regions are absent from the backward graph, recomputed code is in it, and the numbers are eager's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract.test_p3_kept_bytes import KEPT
from helpers.compare import compare, run_once
from helpers.compiled import Graphs, Ready, names, operations
from helpers.functions import SavesInternal
from torch import Tensor, library
from torch.nn.attention.flex_attention import flex_attention

import torch_remat as remat

WEIGHT = torch.nn.Parameter(torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6))


@library.custom_op("remat_examples::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    """A kernel that the compiler cannot look into."""
    RUNS.append("triple")
    return x * 3


RUNS: list[str] = []


@triple.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)


def _triple_backward(ctx: Any, grad: Tensor) -> Tensor:
    (output,) = ctx.saved_tensors
    return grad * 3 + output * 0


triple.register_autograd(_triple_backward, setup_context=_setup)


class Exponential(torch.autograd.Function):
    """A custom function that saves its output under a name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        remat.save_for_backward(ctx, {"y": y})
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0]


def attention(q: Tensor) -> Tensor:
    """Attention of a matrix with itself."""
    return F.scaled_dot_product_attention(q[None, None], q[None, None] * 2, q[None, None].tanh())[0, 0]


# What a region may be made of, and the operations of it that cost something.
REGIONS: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "aten": (torch.tanh, {"tanh"}),
    "composite": (lambda t: F.gelu(F.layer_norm(t, [6])) @ WEIGHT, {"native_layer_norm", "gelu", "mm"}),
    "linear": (lambda t: F.linear(t, WEIGHT), {"mm"}),
    "custom operator": (torch.ops.remat_examples.triple, {"triple"}),
    "autograd.Function": (Exponential.apply, {"exp"}),
    "attention": (attention, {"_scaled_dot_product_flash_attention_for_cpu", "tanh"}),
    "in place": (lambda t: t.clone().mul_(2).exp_(), {"exp"}),
    "control flow": (lambda t: torch.cond(t.sum() > 99, torch.sin, torch.exp, (t,)), {"cond"}),
    "module": (torch.nn.Softmax(-1), {"_softmax"}),
}


def checkpointed(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that calls ``body`` in a checkpoint."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return remat.checkpoint(region_name="block", **options)(body)(*args, **kwargs)

    return step


def compare_compiled(graphs: Graphs, body: Callable[..., Any], inputs: list[Any], **options: Any) -> None:
    """Compile ``body`` in a checkpoint into one graph; it must leave the bits of plain code, twice."""
    expected = run_once(body, inputs, params=[WEIGHT])
    call = graphs.compile(checkpointed(body, **options))
    for _ in range(2):
        actual = run_once(call, inputs, params=[WEIGHT])
        for kind in ("outputs", "input_grads", "param_grads", "inputs_after"):
            torch.testing.assert_close(getattr(actual, kind), getattr(expected, kind), rtol=0, atol=0)


class TestPartition:
    """Where the partitioner puts what a region computes."""

    @pytest.mark.parametrize("kind", sorted(REGIONS))
    def test_p2_save_region_is_not_in_the_backward_graph(self, graphs: Graphs, x: Tensor, kind: str) -> None:
        function, work = REGIONS[kind]

        def body(t: Tensor) -> Tensor:
            return torch.cos(remat.region(function, "r", recompute=False)(torch.sin(t)))

        compare_compiled(graphs, body, [x])
        assert work <= set(names(graphs.forward))
        assert not any(node.split("_1")[0] in work for node in graphs.recomputed), graphs.recomputed
        assert "sin" not in graphs.kept, "bare code is recomputed"

    @pytest.mark.parametrize("kind", sorted(set(REGIONS) - {"control flow"}))
    def test_recompute_region_and_bare_code_are_in_the_backward_graph(
        self, graphs: Graphs, x: Tensor, kind: str
    ) -> None:
        function, work = REGIONS[kind]
        for wrapped in (function, remat.region(function, "r", recompute=True)):
            torch._dynamo.reset()
            graphs.clear()
            compare_compiled(graphs, lambda t, wrapped=wrapped: torch.cos(wrapped(torch.sin(t))), [x])
            again = names(graphs.backward)
            if "run_with_rng_state" in again:  # what runs there is attention, which could have dropout in it
                again.append("_scaled_dot_product_flash_attention_for_cpu")
            assert work <= set(again)
            assert set(graphs.kept) <= {"rng_state_output_0"}, "else the input only"

    def test_p2_save_region_in_a_branch_of_control_flow(self, graphs: Graphs, x: Tensor) -> None:
        """The operator is kept as a whole, if there is a SAVE region in one of its branches."""

        def body(t: Tensor, wrap: Callable[..., Any]) -> Tensor:
            inside = torch.cond(
                t.sum() > 99, lambda u: u.cos() * 3, lambda u: wrap(torch.exp, "e")(u.sin()).cos(), (t,)
            )
            return inside.sin()

        plain = lambda function, name: function
        save = lambda function, name: remat.region(function, name, recompute=False)
        for wrap, kept in ((save, True), (plain, False)):
            torch._dynamo.reset()
            graphs.clear()
            compare_compiled(graphs, lambda t, wrap=wrap: body(t, wrap), [x])
            assert ("cond" in names(graphs.forward), "cond" in graphs.recomputed) == (True, not kept)

    def test_custom_operator_runs_once_in_a_save_region(self, graphs: Graphs, x: Tensor) -> None:
        counts = {}
        for recompute in (False, True):
            torch._dynamo.reset()
            wrapped = remat.region(torch.ops.remat_examples.triple, "r", recompute=recompute)
            call = graphs.compile(checkpointed(lambda t, wrapped=wrapped: wrapped(t.sin()).cos()))
            RUNS.clear()
            call(x).sum().backward()
            counts[recompute] = len(RUNS)
        assert counts == {False: 1, True: 2}

    @pytest.mark.parametrize("policy", sorted(KEPT))
    def test_p3_no_more_is_kept_than_in_eager_code(self, graphs: Graphs, x: Tensor, policy: str) -> None:
        """The table of the eager runtime: A, B, C keep p, q, r inside and give y, z and the output.

        What only backward reads, as the cosine here, the partitioner computes in backward, once, from what is there.
        """

        def body(t: Tensor) -> Tensor:
            for name, letter in zip("ABC", policy, strict=True):
                t = (
                    SavesInternal.apply(t)
                    if letter == "-"
                    else remat.region(SavesInternal.apply, name, recompute=letter == "R")(t)
                )
            return t

        compare_compiled(graphs, body, [x])
        assert len(graphs.kept) <= len(KEPT[policy])
        nodes = [node.name for node in operations(graphs.forward[0])] + [n.name for n in operations(graphs.backward[0])]
        for position, letter in enumerate(policy):
            suffix = f"_{position}" if position else ""
            if letter == "S":
                assert nodes.count(f"sin{suffix}") == nodes.count(f"cos{suffix}") == 1, "a SAVE body runs once"

    def test_p3_view_in_a_save_region_pins_nothing(self, graphs: Graphs, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            hidden = torch.exp(torch.sin(t))
            return remat.region(lambda u: u.t().reshape(4, 6), "views", recompute=False)(hidden).cos()

        compare_compiled(graphs, body, [x])
        assert len(graphs.kept) == 1, "the copy that reshape makes is work of the region; its argument is not"
        assert {"sin", "exp"} & set(graphs.recomputed)

    def test_p3_last_projection_is_not_kept(self, graphs: Graphs, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            wide = remat.region(lambda u: F.linear(u, WEIGHT), "w1", recompute=False)(F.layer_norm(t, [6]))
            return t + remat.region(lambda u: F.linear(u, WEIGHT), "w2", recompute=False)(F.gelu(wide))

        compare_compiled(graphs, body, [x])
        assert list(graphs.kept) == ["mm"], "the first projection; the second is only added"

    def test_p2_flex_attention(self, graphs: Graphs, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        """On CPU torch refuses its backward, although the operator has one: placement and numbers can be looked at."""
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)

        def attend(t: Tensor) -> Tensor:
            q = t.float().reshape(1, 2, 6, 2)
            return flex_attention(q, q * 2, q.tanh(), score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j)).sum()

        def body(t: Tensor, wrap: Callable[..., Any]) -> Tensor:
            return wrap(attend)(t.sin()).cos()

        expected = torch.autograd.grad(graphs.compile(lambda t: body(t, lambda f: f))(x), x)
        for recompute in (False, True):
            graphs.clear()
            wrap = functools.partial(remat.region, name="attention", recompute=recompute)
            got = torch.autograd.grad(graphs.compile(checkpointed(lambda t, wrap=wrap: body(t, wrap)))(x), x)
            torch.testing.assert_close(got, expected)
            assert names(graphs.forward).count("flex_attention") == 1
            assert names(graphs.backward).count("flex_attention") == int(recompute)
            assert names(graphs.backward).count("flex_attention_backward") == 1

    def test_nested_checkpoints_and_regions(self, graphs: Graphs, x: Tensor) -> None:
        def inner(t: Tensor) -> Tensor:
            return remat.region(torch.tanh, "tanh", recompute=False)(t.sin())

        def outer_save(t: Tensor) -> Tensor:
            return remat.region(torch.exp, "tanh", recompute=True)(remat.checkpoint(region_name="i")(inner)(t)) * 1

        def body(t: Tensor) -> Tensor:
            t = remat.checkpoint(region_name="inner")(inner)(t)
            t = remat.checkpoint(region_name="inner")(inner)(t)
            t = remat.region(lambda u: inner(u).cos(), "rec", recompute=True)(t)
            return remat.region(outer_save, "save", recompute=False)(t).cos()

        compare_compiled(graphs, body, [x])
        assert names(graphs.forward).count("tanh") == 4
        assert not {"tanh", "exp"} & set(names(graphs.backward)), "kept by their own regions or by the outer one"
        assert "sin" not in graphs.kept

    def test_no_checkpoint_no_mark(self, graphs: Graphs, x: Tensor) -> None:
        """Regions outside checkpoints are the plain function, and without gradients so are checkpoints."""
        region = remat.region(torch.exp, "r", recompute=False)
        call = graphs.compile(lambda t: region(region(t)))  # one name twice: nobody minds
        assert torch.equal(call(x), x.exp().exp())
        with torch.no_grad():
            assert torch.equal(graphs.compile(checkpointed(region))(x), x.exp())
        for graph in graphs.forward:
            assert not any("recompute" in node.meta for node in graph.graph.nodes)

    def test_changes_in_place_and_buffers(self, graphs: Graphs, x: Tensor) -> None:
        norm = torch.nn.BatchNorm1d(6).double()

        def body(t: Tensor) -> Tensor:
            hidden = remat.region(lambda u: u * 3, "made", recompute=False)(torch.sin(t))
            hidden.mul_(2)
            remat.region(lambda u: u.add_(1), "changed", recompute=False)(hidden)
            return torch.exp(remat.region(norm, "norm", recompute=True)(hidden * 0.1))

        compare_compiled(graphs, body, [x])
        assert norm.num_batches_tracked == 3, "once for each forward: the plain one and two compiled"

    def test_any_tree_and_options_named_like_torchs(self, graphs: Graphs, x: Tensor) -> None:
        def body(t: Tensor, *, debug: float, use_reentrant: Tensor) -> Any:
            got = remat.region(
                lambda d: {"a": d["t"].exp(), "none": None, "i": d["t"].argmax(-1)}, "r", recompute=False
            )({"t": t.sin()})
            return {"out": (got["a"] * debug, got["none"]), "index": got["i"], "other": [use_reentrant * t]}

        def step(t: Tensor, u: Tensor) -> Any:
            return remat.checkpoint()(body)(t, debug=2.0, use_reentrant=u)

        expected = run_once(lambda t, u: body(t, debug=2.0, use_reentrant=u), [x, x * 2])
        actual = run_once(graphs.compile(step), [x, x * 2])
        assert actual.outputs["out"][1] is None
        assert torch.equal(actual.outputs["out"][0], expected.outputs["out"][0])
        assert torch.equal(actual.outputs["index"], expected.outputs["index"])
        torch.testing.assert_close(actual.input_grads[:1], expected.input_grads[:1], rtol=0, atol=0)


class TestOtherBackends:
    """Backends that decompose differently, or do not partition."""

    def test_decomposing_backend(self, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            wide = remat.region(lambda u: F.gelu(F.layer_norm(u, [6])) @ WEIGHT, "a", recompute=False)(t.sin())
            return remat.region(attention, "b", recompute=True)(wide).cos()

        expected = run_once(body, [x], params=[WEIGHT])
        call = torch.compile(checkpointed(body), backend="aot_eager_decomp_partition", fullgraph=True)
        actual = run_once(call, [x], params=[WEIGHT])
        torch.testing.assert_close(actual.input_grads, expected.input_grads)
        torch.testing.assert_close(actual.param_grads, expected.param_grads)

    def test_backend_without_partitioner_recomputes_all_and_says_so(self, x: Tensor) -> None:
        """Changes in place and random numbers are right there, too."""

        def body(t: Tensor) -> Tensor:
            kept = remat.region(lambda u: F.dropout(u.clone().mul_(2), 0.5), "a", recompute=False)(t.sin())
            return torch.exp(F.dropout(kept, 0.3))

        call = torch.compile(checkpointed(body), backend="eager", fullgraph=True)
        with pytest.warns(UserWarning, match="without AOTAutograd"):
            compare(body, [x], engine=Ready(call))
