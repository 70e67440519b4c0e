"""``explain``: bytes are those found alive, reasons name the line, and nothing is changed by asking."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import random
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker, gc_off, live_tensors
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

import torch_remat as remat
from torch_remat.diagnostics.explanation import CheckpointExplanation, ExplainedTensor, Explanation
from torch_remat.runtime import events

WIDE = torch.nn.Linear(6, 8, dtype=torch.float64)
LEAF = "a leaf that requires a gradient, held at no cost"
NARROW = torch.nn.Linear(8, 6, dtype=torch.float64)


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def redo(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A RECOMPUTE region."""
    return remat.region(function, name, recompute=True)


def block(x: Tensor) -> Tensor:
    """Norm (recomputed), projection (saved), activation (bare), projection (saved), residual."""
    normed = redo(lambda t: F.layer_norm(t, (6,)), "norm")(x)
    hidden = save(WIDE, "wide")(normed)
    activated = F.silu(hidden)
    return x + save(NARROW, "narrow")(activated)


def only(explanation: Explanation) -> CheckpointExplanation:
    """The one checkpoint of an explanation."""
    (found,) = explanation.checkpoints
    return found


def line_of(function: Callable[..., Any], text: str) -> str:
    """``test_explain.py:N`` of the first line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"test_explain.py:{first + next(index for index, line in enumerate(lines) if text in line)} "


def two_outputs(x: Tensor) -> Tensor:
    """A SAVE region with two views of one storage, one of them read."""
    left, _right = save(lambda t: (t * 2).chunk(2), "split")(x)
    return torch.exp(torch.sin(left))


def saves_own_output(x: Tensor) -> Tensor:
    """A SAVE output that the region's own save keeps, and recomputed code reads."""
    return torch.sin(save(torch.tanh, "tanh")(x * 2))


def nothing_recomputed(x: Tensor) -> Tensor:
    """Everything is in a SAVE region."""
    return save(lambda t: torch.exp(torch.sin(t)) * 2, "all")(x)


def bare_only(x: Tensor) -> Tensor:
    """No region at all."""
    return torch.exp(torch.sin(x))


def input_of_save_only(x: Tensor) -> Tensor:
    """The input feeds a SAVE region that does not save it."""
    return torch.exp(torch.sin(save(lambda t: t * 3, "triple")(x)))


def changes_argument(x: Tensor) -> Tensor:
    """A SAVE region modifies a recomputed argument, which recomputed code reads."""
    hidden = x * 2
    save(lambda t: t.mul_(3), "scale")(hidden)
    return torch.exp(torch.sin(hidden))


def modified_output(x: Tensor) -> Tensor:
    """Bare code modifies a SAVE output after reading it."""
    hidden = save(lambda t: t * 2, "double")(x)
    first = torch.exp(hidden * 0.5)
    return first * hidden.add_(1).sin()


def integers(x: Tensor) -> Tensor:
    """A SAVE region returns int64 indices."""
    return torch.sin(x[save(lambda t: t.detach().sum(1).argsort(), "order")(x)])


def escaping_graph(x: Tensor) -> Tensor:
    """A SAVE region keeps something of its own beside its argument."""
    return torch.sin(save(lambda t: torch.exp(t * 2).sum(0, keepdim=True) * t, "own")(torch.cos(x)))


BODIES = [
    block, two_outputs, saves_own_output, nothing_recomputed, bare_only, input_of_save_only, changes_argument,
    modified_output, integers, escaping_graph,
]  # fmt: skip


class TestBytes:
    """What is reported is what is found alive."""

    @pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "activation"])
    def test_kept_bytes_are_those_found_alive(self, body: Callable[[Tensor], Tensor], leaf: bool) -> None:
        source = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        make = (lambda: source) if leaf else (lambda: source * 1)
        explained = only(remat.explain(body, make()))
        call = remat.checkpoint()(body)
        for _ in range(2):
            tracker = StorageTracker()
            tracker.ignore(source, *WIDE.parameters(), *NARROW.parameters())
            with tracker:
                x = make()
                tracker.watch(*(() if leaf else (x,)))
                output = call(x)
                del x
            assert explained.kept_bytes == tracker.alive_bytes(without=output)
            output.sum().backward()

    @pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
    def test_rows_add_up(self, body: Callable[[Tensor], Tensor]) -> None:
        explained = only(remat.explain(body, torch.randn(4, 6, dtype=torch.float64, requires_grad=True) * 1))
        for region in explained.regions:
            assert region.kept_bytes == sum(row.bytes for row in region.kept)
        in_regions = sum(region.kept_bytes for region in explained.regions)
        assert explained.kept_bytes == in_regions + sum(row.bytes for row in explained.inputs)
        rebuilt = [row.bytes for region in (*explained.regions, explained.bare) for row in region.rebuilt]
        assert explained.rebuilt_bytes == sum(rebuilt)

    def test_block_on_paper(self) -> None:
        explained = only(remat.explain(block, torch.randn(4, 6, dtype=torch.float64, requires_grad=True) * 1))
        norm, wide, narrow = explained.regions
        assert [row.bytes for row in explained.inputs] == [4 * 6 * 8]
        assert (norm.kept_bytes, wide.kept_bytes, narrow.kept_bytes) == (0, 4 * 8 * 8, 0)
        assert explained.kept_bytes == 4 * 6 * 8 + 4 * 8 * 8
        # layer_norm's mean and inverse deviation; the inputs of both projections. silu saves the output of "wide".
        assert [row.bytes for row in norm.rebuilt] == [4 * 8, 4 * 8]
        assert [row.bytes for row in wide.rebuilt] == [4 * 6 * 8]
        assert [row.bytes for row in narrow.rebuilt] == [4 * 8 * 8]
        assert explained.rebuilt_bytes == 2 * 4 * 8 + 4 * 6 * 8 + 4 * 8 * 8
        assert [row.bytes for row in narrow.placeholders] == [4 * 6 * 8]

    def test_a_storage_counts_once_over_all_checkpoints(self) -> None:
        shared = torch.randn(4, 6, dtype=torch.float64)

        def model(x: Tensor) -> Tensor:
            for name in ("a", "b"):
                x = remat.checkpoint(region_name=name)(lambda t, u: torch.exp(t * torch.sin(u)))(x, shared)
            return x

        explained = remat.explain(model, torch.randn(4, 6, dtype=torch.float64, requires_grad=True))
        first, second = explained.checkpoints
        assert first.kept_bytes == 4 * 6 * 8  # the leaf is held at no cost
        assert second.kept_bytes == 2 * 4 * 6 * 8
        assert explained.kept_bytes == 2 * 4 * 6 * 8

    def test_captured_tensors_cost_nothing(self) -> None:
        """Frozen weights and buffers that a SAVE region saves or returns belong to whoever holds them."""
        frozen, table = torch.randn(6, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)

        def body(x: Tensor) -> Tensor:
            rows = save(lambda: table[:4], "table")()
            return torch.sin(save(F.linear, "linear")(torch.sin(x), frozen)) * rows

        explained = only(remat.explain(body, torch.ones(4, 6, dtype=torch.float64, requires_grad=True)))
        rows, linear = explained.regions
        assert rows.kept_bytes == 0
        assert linear.kept_bytes == explained.kept_bytes == 4 * 6 * 8  # the output, which sin reads
        assert [row.why.endswith("a captured tensor, held at no cost") for row in linear.kept] == [False, True]


class TestReasons:
    """Who reads it, on which line; where replay stops."""

    def test_reader_of_a_persisted_output(self) -> None:
        explained = only(remat.explain(block, torch.randn(4, 6, dtype=torch.float64, requires_grad=True)))
        wide = explained.regions[1]
        assert (wide.name, wide.policy) == ("wide", "save")
        (kept,) = wide.kept
        assert kept.what == "output"
        assert (kept.shape, kept.dtype) == ((4, 8), "float64")
        assert kept.why.startswith("read by `silu` at ")
        assert line_of(block, "F.silu(hidden)") in kept.why

    def test_reader_that_saves_nothing(self) -> None:
        def body(x: Tensor) -> Tensor:
            hidden = save(lambda t: t * 2, "double")(x)
            shifted = hidden + 1
            return torch.sin(shifted)

        (kept,) = only(remat.explain(body, torch.ones(3, requires_grad=True))).regions[0].kept
        assert kept.why.startswith("read by `add` at ")
        assert line_of(body, "hidden + 1") in kept.why

    def test_reader_in_a_custom_function(self) -> None:
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                made = torch.from_numpy(x.detach().numpy() * 2)
                ctx.save_for_backward(made)
                return made

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                return grad * ctx.saved_tensors[0]

        explained = only(
            remat.explain(lambda x: Doubled.apply(save(torch.sin, "sin")(x)), torch.ones(3).requires_grad_())
        )
        (kept,) = [row for row in explained.regions[0].kept if row.what == "output"]
        assert "read by" in kept.why

    def test_where_replay_stops_and_what_is_not_run(self) -> None:
        def body(x: Tensor) -> Tensor:
            hidden = redo(torch.sin, "sin")(x)
            wave = torch.exp(hidden)
            return redo(lambda t: t + 1, "tail")(wave) * 2

        replay = only(remat.explain(body, torch.ones(3, requires_grad=True))).replay
        assert (replay.runs, replay.to_end, replay.not_run) == (True, False, ("tail",))
        assert replay.text.startswith("stops after `exp` at ")
        assert replay.where is not None
        assert line_of(body, "torch.exp") in replay.where + " "
        assert replay.region is None

    def test_operations_on_one_line_are_told_apart(self) -> None:
        def body(x: Tensor) -> Tensor:
            left, right = save(lambda t: (t * 2, t * 3), "two")(x)
            return torch.tanh(torch.sin(left) + 1) + torch.exp(right).sum() * 2  # fmt: skip

        explained = only(remat.explain(body, torch.ones(3, requires_grad=True)))
        assert [row.why.split(" at ")[0] for row in explained.regions[0].kept] == ["read by `sin`", "read by `exp`"]
        assert [row.why.split(" at ")[0] for row in explained.bare.rebuilt] == ["saved by `tanh`", "saved by `exp`"]
        assert explained.replay.text.startswith("stops after `exp` at ")

    def test_replay_stops_inside_a_region(self) -> None:
        replay = only(remat.explain(lambda x: redo(torch.sin, "sin")(x * 2) + 1, torch.ones(3).requires_grad_())).replay
        assert replay.region == "sin"
        assert replay.text.endswith("in region sin")

    def test_replay_stops_at_a_region_that_saves_its_argument(self) -> None:
        replay = only(remat.explain(block, torch.ones(4, 6, dtype=torch.float64, requires_grad=True))).replay
        assert (replay.region, replay.text) == ("narrow", "stops at region narrow, which saves its argument 0")

    def test_no_replay(self) -> None:
        explained = only(remat.explain(nothing_recomputed, torch.ones(3, requires_grad=True)))
        assert explained.replay.runs is False
        assert explained.replay.text == "none, nothing has to be recomputed"

    def test_replay_to_the_end(self) -> None:
        with set_checkpoint_early_stop(False):
            replay = only(remat.explain(bare_only, torch.ones(3, requires_grad=True))).replay
        assert replay.to_end

    def test_nothing_requires_a_gradient(self) -> None:
        explained = only(remat.explain(lambda x: torch.exp(save(torch.sin, "sin")(x)), torch.ones(3)))
        assert (explained.kept_bytes, explained.replay.runs) == (0, False)
        assert [row.bytes for row in explained.inputs] == [0]

    def test_declared(self) -> None:
        def body(x: Tensor) -> Tensor:
            hidden = save(lambda t: t * 2, "double")(torch.sin(x))
            remat.recompute_needs_tensor(hidden)
            return torch.sin(x) + hidden

        (kept,) = only(remat.explain(body, torch.ones(3, requires_grad=True))).regions[0].kept
        assert kept.why.startswith("named in recompute_needs_tensor at ")
        assert line_of(body, "recompute_needs_tensor") in kept.why + " "

    def test_views_arguments_and_free_placeholders(self) -> None:
        def body(x: Tensor) -> Tensor:
            hidden = torch.sin(x)
            same, row = save(lambda t: (t, t[0]), "through")(hidden)
            tail = save(torch.tanh, "tanh")(same)
            return torch.exp(same * row) + tail

        through, tanh = only(remat.explain(body, torch.ones(3, 2, requires_grad=True))).regions
        assert [(row.what, row.bytes, row.why) for row in through.rebuilt] == [
            ("output[0]", 0, "is argument 0, which replay has"),
            ("output[1]", 0, "is a view of argument 0, which replay has"),
        ]
        assert through.kept == ()
        (placeholder,) = tanh.placeholders
        assert "the region's own saves keep" in placeholder.why

    def test_labels_of_inputs_and_outputs(self) -> None:
        class Pair(NamedTuple):
            gate: Tensor
            up: Tensor

        @dataclasses.dataclass
        class Cache:
            key: Tensor
            length: int

        def body(x: Tensor, pair: tuple[Tensor, Tensor], *, flags: dict[str, Any], cache: Cache) -> Tensor:
            made = save(lambda t: {"a": t * 2, "b": Pair(t * 3, t * 4)}, "made")(x)
            return torch.exp(made["a"] * torch.sin(made["b"].up * pair[1] * flags["mask"] * cache.key))

        ones = [torch.ones(2) for _ in range(4)]
        explained = only(
            remat.explain(
                body,
                torch.ones(2, requires_grad=True),
                (ones[0], ones[1]),
                flags={"mask": ones[2], "causal": True},
                cache=Cache(ones[3], 3),
            )
        )
        labels = [row.what for row in explained.inputs]
        assert labels == ["input x", "input pair[0]", "input pair[1]", "input flags['mask']", "input cache.key"]
        assert [row.bytes for row in explained.inputs] == [0, 0, 8, 8, 8]
        (made,) = explained.regions
        assert [row.what for row in made.kept] == ["output['a']", "output['b'].up"]
        assert [row.what for row in made.placeholders] == ["output['b'].gate"]

    def test_hook_pair(self) -> None:
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            packed.append(tensor)
            return len(packed) - 1

        pair = (pack, packed.__getitem__)
        call = remat.checkpoint(region_name="b", saved_tensors_hooks=pair)(
            lambda x: torch.exp(save(torch.tanh, "t")(x))
        )
        explained = only(remat.explain(call, torch.ones(3, requires_grad=True) * 1))
        assert explained.kept_bytes == 0
        assert all(row.why.endswith("packed by the hook pair") for row in explained.regions[0].kept)
        assert explained.regions[0].kept[0].shape == (3,)

    def test_text(self) -> None:
        text = str(
            remat.explain(remat.checkpoint(region_name="layers.0")(block), torch.ones(4, 6).double().requires_grad_())
        )
        path = __file__
        norm, wide, silu, narrow = (
            f"{path}:{line_of(block, part).strip().rpartition(':')[2]}" for part in ("norm", "WIDE", "silu", "NARROW")
        )
        assert text.splitlines() == [
            "1 checkpoint(s) keep 256 bytes",
            "layers.0: keeps 256 bytes, replay makes 512 bytes again",
            f"  input x [4, 6] float64, 0 bytes: read by `native_layer_norm` at {norm} in <lambda>; {LEAF}",
            "  norm (recompute): keeps 0 bytes",
            f"    rebuilt: saved tensor [4, 1] float64, 32 bytes: saved by `native_layer_norm` at {norm} in <lambda>",
            f"    rebuilt: saved tensor [4, 1] float64, 32 bytes: saved by `native_layer_norm` at {norm} in <lambda>",
            "  wide (save): keeps 256 bytes",
            f"    kept: output [4, 8] float64, 256 bytes: read by `silu` at {silu} in block",
            f"    rebuilt: argument 0 [4, 6] float64, 192 bytes: saved by the region, code at {wide} in block",
            "  narrow (save): keeps 0 bytes",
            f"    rebuilt: argument 0 [4, 8] float64, 256 bytes: saved by the region, code at {narrow} in block",
            "    placeholder: output [4, 6] float64, 192 bytes: nothing that backward needs is made from it",
            "  replay: stops at region narrow, which saves its argument 0",
        ]

    def test_json(self) -> None:
        explained = remat.explain(block, torch.ones(4, 6).double().requires_grad_())
        read = json.loads(explained.to_json())
        assert read["checkpoints"][0]["regions"][1]["kept"][0]["bytes"] == 256
        with pytest.raises(dataclasses.FrozenInstanceError):
            explained.kept_bytes = 0  # type: ignore[misc]
        assert isinstance(explained.checkpoints[0].inputs[0], ExplainedTensor)


class TestRandom:
    """Random operations are reported, and leave no mark."""

    def test_operations_and_whether_a_hook_carries_them(self) -> None:
        own = torch.Generator()

        def body(x: Tensor) -> Tensor:
            x = redo(lambda t: F.dropout(t, 0.5), "drop")(x)
            x = save(lambda t: F.dropout(t, 0.5), "saved")(x)
            return torch.exp(x * torch.rand(3, generator=own))

        x = torch.ones(3, requires_grad=True)
        for hooks, carried in (
            ((), [False, False]),
            ((remat.GeneratorHook(),), [True, False]),
            ((remat.GeneratorHook("cpu", own),), [True, True]),
        ):
            explained = only(remat.explain(remat.checkpoint(recompute_state_hooks=hooks)(body), x))
            assert [draw.carried for draw in explained.random] == carried
            assert [draw.region for draw in explained.random] == ["drop", None]
            assert line_of(body, "F.dropout") in explained.random[0].where + " "

    def test_python_and_numpy(self) -> None:
        def body(x: Tensor) -> Tensor:
            return torch.exp(torch.sin(x) * random.random() * np.random.rand())

        explained = only(remat.explain(body, torch.ones(3, requires_grad=True)))
        assert [draw.operation for draw in explained.random] == ["Python's random module"]
        assert "NOT carried" in str(remat.explain(body, torch.ones(3, requires_grad=True)))

    def test_generators_are_where_they_were(self) -> None:
        own = torch.Generator()

        def body(x: Tensor) -> Tensor:
            x = save(lambda t: t * torch.rand(3, generator=own) * torch.rand(3), "saved")(x)
            return torch.exp(x * torch.rand(3, generator=own) * torch.rand(3) * random.random() * np.random.rand())

        def states() -> list[Any]:
            numbers = np.random.get_state()
            return [own.get_state().tolist(), torch.get_rng_state().tolist(), random.getstate(), str(numbers)]

        before = states()
        remat.explain(body, torch.ones(3, requires_grad=True))
        assert states() == before


class TestNothingIsChanged:
    """Asking changes no later call, no gradient, and leaves nothing alive."""

    def test_body_runs_once(self) -> None:
        runs: list[bool] = []

        def body(x: Tensor) -> Tensor:
            runs.append(remat.is_recomputing())
            return torch.exp(save(torch.sin, "sin")(x))

        remat.explain(body, torch.ones(3, requires_grad=True))
        remat.explain(remat.checkpoint()(body), torch.ones(3, requires_grad=True))
        assert runs == [False, False]

    @pytest.mark.parametrize("before", [0, 1, 3])
    def test_later_calls_do_what_they_would_have_done(self, before: int) -> None:
        def body(x: Tensor) -> Tensor:
            return torch.exp(save(lambda t: t * 2, "double")(torch.sin(x)) * (before + 1))  # another body each time

        learned: list[Any] = []

        def listen(tape: Any, plan: Any) -> None:
            learned.append(tape.name)

        call = remat.checkpoint(region_name="real")(body)
        x = torch.ones(3, requires_grad=True)
        events.body_learned.subscribe(listen)
        try:
            for _ in range(before):
                call(x).sum().backward()
            remat.explain(remat.checkpoint(region_name="asked")(body), x)
            for _ in range(3):
                call(x).sum().backward()
        finally:
            events.body_learned.unsubscribe(listen)
        assert learned.count("real") == 1
        assert x.grad is not None
        expected = torch.autograd.grad(body(x).sum(), x)[0] * (3 + before)
        assert torch.allclose(x.grad, expected)

    def test_no_gradient_and_no_tensor_is_left(self) -> None:
        x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
        WIDE.weight.grad = None
        remat.explain(block, x)
        held: list[weakref.ref[Tensor]] = []

        def watched(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 2, "double")(torch.sin(t))
            held.append(weakref.ref(hidden))
            return torch.exp(hidden)

        explained = remat.explain(watched, x)  # the first one imports parts of torch
        with gc_off():
            before = live_tensors()
            for _ in range(3):
                explained = remat.explain(watched, x)
            assert live_tensors() == before
            assert all(reference() is None for reference in held)
        assert explained.checkpoints
        assert x.grad is None
        assert WIDE.weight.grad is None
        gc.collect()

    def test_body_that_raises(self) -> None:
        def body(x: Tensor) -> Tensor:
            save(torch.sin, "sin")(x)
            torch.rand(3)
            raise ValueError("no")

        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="no"):
            remat.explain(body, torch.ones(3, requires_grad=True))
        assert torch.equal(torch.get_rng_state(), state)
        assert not remat.is_recomputing()
        assert only(remat.explain(bare_only, torch.ones(3, requires_grad=True))).replay.runs

    def test_gradients_are_on_under_no_grad(self) -> None:
        with torch.no_grad():
            explained = only(remat.explain(block, torch.ones(4, 6).double().requires_grad_()))
        assert explained.kept_bytes == 256

    def test_what_no_replay_reproduces_is_refused_as_in_a_call(self) -> None:
        count = torch.zeros(3)

        def body(x: Tensor) -> Tensor:
            return torch.exp(x * count.add_(1))

        for call in (lambda x: remat.checkpoint()(body)(x), lambda x: remat.explain(body, x)):
            with pytest.raises(RuntimeError, match="modifies a tensor from outside"):
                call(torch.ones(3, requires_grad=True))


class TestWhatIsCalled:
    """Bodies, checkpoints, modules and whole models."""

    def test_name_of_a_body(self) -> None:
        assert only(remat.explain(block, torch.ones(4, 6).double().requires_grad_())).name == "block"

    def test_module_as_body(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.GELU())
        explained = only(remat.explain(module, torch.ones(2, 3)))
        assert (explained.name, explained.inputs[0].what) == ("Sequential", "input input")

    def test_model_of_checkpoints(self) -> None:
        def model(x: Tensor) -> Tensor:
            runs.append(1)
            x = x * torch.rand(6, dtype=torch.float64)
            for index in range(3):
                x = remat.checkpoint(region_name=f"layers.{index}")(block)(x)
            return x.sum()

        runs: list[int] = []
        state = torch.get_rng_state()
        explained = remat.explain(model, torch.ones(4, 6).double().requires_grad_())
        assert [one.name for one in explained.checkpoints] == ["layers.0", "layers.1", "layers.2"]
        assert len(runs) == 2  # what comes before the first checkpoint runs twice
        assert torch.equal(torch.get_rng_state(), state)
        each = 4 * 6 * 8 + 4 * 8 * 8
        assert [one.kept_bytes for one in explained.checkpoints] == [each] * 3
        assert "layers.0 ... layers.2 (3 alike, each): keeps 448 bytes" in str(explained)

    def test_module_whose_forward_is_a_checkpoint(self) -> None:
        module = torch.nn.Linear(3, 3)
        module.forward = remat.checkpoint(region_name="layers.0")(module.forward)  # type: ignore[method-assign]
        explained = remat.explain(torch.nn.Sequential(module, torch.nn.Tanh()), torch.ones(2, 3))
        assert [one.name for one in explained.checkpoints] == ["layers.0"]

    def test_checkpoint_inside_a_checkpoint_is_a_part_of_it(self) -> None:
        def outer(x: Tensor) -> Tensor:
            return torch.sin(remat.checkpoint(region_name="inner")(block)(x))

        explained = only(remat.explain(remat.checkpoint(region_name="outer")(outer), torch.ones(4, 6).double()))
        assert [region.name for region in explained.regions] == ["inner/norm", "inner/wide", "inner/narrow"]

    def test_method(self) -> None:
        class Model:
            @remat.checkpoint(region_name="step")
            def step(self, x: Tensor) -> Tensor:
                return torch.exp(torch.sin(x))

        explained = only(remat.explain(Model().step, torch.ones(3, requires_grad=True)))
        assert (explained.name, explained.inputs[0].what) == ("step", "input x")

    def test_function_that_runs_nothing_with_gradients(self) -> None:
        def model(x: Tensor) -> Tensor:
            with torch.no_grad():
                return remat.checkpoint()(block)(x)

        explained = remat.explain(model, torch.ones(4, 6).double())
        assert (explained.checkpoints, explained.kept_bytes) == ((), 0)
        assert str(explained) == "no checkpoint ran with gradients enabled: nothing is kept by one"

    def test_inside_a_checkpoint(self) -> None:
        def body(x: Tensor) -> Tensor:
            remat.explain(block, x)
            return torch.sin(x)

        with pytest.raises(RuntimeError, match="inside a checkpoint"):
            remat.checkpoint()(body)(torch.ones(3, requires_grad=True))

    def test_not_callable(self) -> None:
        with pytest.raises(TypeError, match="explain expects a function, got Tensor"):
            remat.explain(torch.ones(3))  # type: ignore[arg-type]
