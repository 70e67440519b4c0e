"""P4: one replay per forward call, started before the first backward node, from any door into the graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers.compare import assert_same_run, compare, grad_weight, run_once
from helpers.engine import EagerEngine
from helpers.events import EventLog, chain, under
from helpers.trees import tensors_of
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import torch_remat as remat

SCHEDULES = {
    "RSR": ["fwd A", "fwd B", "fwd C", "replay A", "replay C", "bwd C", "bwd B", "bwd A"],
    "RRR": ["fwd A", "fwd B", "fwd C", "replay A", "replay B", "replay C", "bwd C", "bwd B", "bwd A"],
    "---": ["fwd A", "fwd B", "fwd C", "replay A", "replay B", "replay C", "bwd C", "bwd B", "bwd A"],
    "SSS": ["fwd A", "fwd B", "fwd C", "bwd C", "bwd B", "bwd A"],
    "SRS": ["fwd A", "fwd B", "fwd C", "replay B", "bwd C", "bwd B", "bwd A"],
    "S-S": ["fwd A", "fwd B", "fwd C", "replay B", "bwd C", "bwd B", "bwd A"],
    "SSR": ["fwd A", "fwd B", "fwd C", "replay C", "bwd C", "bwd B", "bwd A"],
    "RSS": ["fwd A", "fwd B", "fwd C", "replay A", "bwd C", "bwd B", "bwd A"],
}


class TestP4Schedule:
    """Exact orders of region runs."""

    @pytest.mark.parametrize("policy", sorted(SCHEDULES))
    def test_p4_event_order(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        log = EventLog()
        call = engine.checkpoint(chain(log, policy))
        for _ in range(3):
            log.clear()
            engine.backward([call(x).sum()])
            assert log == SCHEDULES[policy]

    def test_p4_replay_starts_before_the_first_node_and_stops_early(self, engine: EagerEngine, x: Tensor) -> None:
        """The tail saves nothing: its backward node runs first, yet replay has started, and the tail does not rerun."""
        log = EventLog()
        head, tail = log.op("head"), log.nothing_saving_op("tail")
        call = engine.checkpoint(lambda t: tail(head(t)))
        for _ in range(3):
            log.clear()
            engine.backward([call(x).sum()])
            assert log == ["fwd head", "fwd tail", "replay head", "bwd tail", "bwd head"]

    def test_p4_two_blocks_replay_one_after_the_other(self, engine: EagerEngine, x: Tensor) -> None:
        log = EventLog()
        blocks = [engine.checkpoint(log.op(name), region_name=name) for name in ("first", "second")]
        for _ in range(3):
            log.clear()
            engine.backward([blocks[1](blocks[0](x)).sum()])
            assert log == [
                "fwd first", "fwd second", "replay second", "bwd second", "replay first", "bwd first",
            ]  # fmt: skip

    def test_p4_nothing_to_recompute_no_replay(self, engine: EagerEngine, x: Tensor) -> None:
        runs: list[bool] = []

        def scaled(t: Tensor) -> Tensor:
            runs.append(remat.is_recomputing())
            return t * 2

        def only_saves(t: Tensor) -> Tensor:
            runs.append(remat.is_recomputing())
            t = remat.region(F.gelu, "gelu", recompute=False)(t)
            return remat.region(torch.tanh, "tanh", recompute=False)(t) + t

        for body in (scaled, only_saves):
            call = engine.checkpoint(body)
            for _ in range(3):
                runs.clear()
                engine.backward([call(x).sum()])
                assert runs == [False]

    def test_p4_is_recomputing_is_true_in_replay_alone(self, engine: EagerEngine, x: Tensor) -> None:
        phases: list[tuple[str, bool]] = []

        class Probe(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                phases.append(("forward", remat.is_recomputing()))
                ctx.save_for_backward(t)
                return t * t

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                phases.append(("backward", remat.is_recomputing()))
                (t,) = ctx.saved_tensors
                return grad * t * 2

        assert not remat.is_recomputing()
        engine.backward([engine.checkpoint(lambda t: Probe.apply(torch.sin(t)))(x).sum()])
        assert not remat.is_recomputing()
        assert phases == [("forward", False), ("forward", True), ("backward", False)]

    def test_p4_nested_checkpoint_joins_the_outer_replay(self, engine: EagerEngine, x: Tensor) -> None:
        log = EventLog()
        a, b, c = log.op("A"), log.op("B"), log.op("C")

        def inner(t: Tensor) -> Tensor:
            return remat.region(b, "B", recompute=False)(torch.exp(t))

        def body(t: Tensor) -> Tensor:
            return c(remat.checkpoint(region_name="inner")(inner)(a(t)))

        compare(body, [x], engine=engine)
        for _ in range(3):
            log.clear()
            engine.backward([engine.checkpoint(body)(x).sum()])
            assert log == ["fwd A", "fwd B", "fwd C", "replay A", "replay C", "bwd C", "bwd B", "bwd A"]


class TestP4Doors:
    """Every way into the graph other than through an output."""

    def _body(self, log: EventLog, escaped: list[Tensor]) -> Callable[[Tensor], Tensor]:
        a, b, c = log.input_saving_op("A"), log.op("B"), log.op("C")

        def body(t: Tensor) -> Tensor:
            t = a(torch.exp(t))
            if not remat.is_recomputing():
                escaped.append(t)
            t = remat.region(b, "B", recompute=False)(t)
            if not remat.is_recomputing():
                escaped.append(t)
            return c(t)

        return body

    @pytest.mark.parametrize("which", [0, 1])
    def test_p4_escaped_intermediate_alone(self, engine: EagerEngine, x: Tensor, which: int) -> None:
        log, escaped = EventLog(), list[Tensor]()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            engine.backward([escaped[which]], [grad_weight(escaped[which])])
            escaped.clear()

        compare(self._body(log, escaped), [x], backward=backward, engine=engine)
        assert log.tally("replay A") == 3
        assert log.tally("replay B") == 0

    @pytest.mark.parametrize("order", [(0, 2), (2, 0), (1, 0, 2), (1, 2), (2, 1, 0)])
    def test_p4_escaped_intermediates_and_output_in_turn(
        self, engine: EagerEngine, x: Tensor, order: tuple[int, ...]
    ) -> None:
        log, escaped = EventLog(), list[Tensor]()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            doors = [*escaped, outputs]
            for position, door in enumerate(order):
                engine.backward([doors[door].sum()], retain_graph=position < len(order) - 1)
            escaped.clear()

        compare(self._body(log, escaped), [x], backward=backward, engine=engine)
        assert log.tally("replay B") == 0

    def test_p4_disjoint_outputs_one_after_the_other(self, engine: EagerEngine, x: Tensor) -> None:
        """Two branches that share nothing but the input: two backward calls without ``retain_graph``."""
        log = EventLog()
        a, b = log.op("A"), log.op("B")

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            left = a(remat.region(F.gelu, "left", recompute=False)(t))
            right = b(remat.region(F.silu, "right", recompute=False)(t))
            return left, right

        for order in ((0, 1), (1, 0)):

            def backward(outputs: Any, inputs: list[Tensor], order: tuple[int, ...] = order) -> None:
                for index in order:
                    engine.backward([outputs[index].sum()])

            compare(body, [x], backward=backward, engine=engine)

    def test_p4_disjoint_outputs_through_one_saved_region(self, engine: EagerEngine, x: Tensor) -> None:
        """The region's two outputs are read by two disjoint branches."""

        def split(t: Tensor) -> tuple[Tensor, Tensor]:
            return t * 2, t * 3

        def body(t: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                scale, shift = remat.region(split, "split", recompute=False)(t)
            return torch.exp(u * scale.sin()), torch.tanh(t * shift.cos()).exp()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            engine.backward([outputs[0].sum()])
            engine.backward([outputs[1].sum()])

        compare(body, [x, x.detach().clone().requires_grad_()], backward=backward, engine=engine)

    def test_p4_autograd_grad_per_input(self, engine: EagerEngine, x: Tensor) -> None:
        weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            t = remat.region(F.linear, "linear", recompute=False)(torch.tanh(t), weight)
            return torch.exp(torch.sin(t))

        def backward(outputs: Any, inputs: list[Tensor]) -> Any:
            (first,) = torch.autograd.grad(outputs.sum(), inputs[0], retain_graph=True)
            (second,) = torch.autograd.grad(outputs.sum(), weight)
            return first, second

        run = compare(body, [x], params=[weight], backward=backward, engine=engine)
        assert run.param_grads == [None]

    @pytest.mark.parametrize("region", [True, False])
    def test_p4_autograd_grad_inside_the_body(self, engine: EagerEngine, x: Tensor, region: bool) -> None:
        """Forces from an energy: the gradient inside the body is part of the output."""

        def energy_and_force(t: Tensor) -> tuple[Tensor, Tensor]:
            energy = torch.sin(torch.exp(t) * t).sum()
            (force,) = torch.autograd.grad(energy, t, create_graph=True)
            return energy, force

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            t = torch.tanh(t)
            call = remat.region(energy_and_force, "force", recompute=False) if region else energy_and_force
            energy, force = call(t)
            return torch.exp(energy / 50), torch.sin(force)

        compare(body, [x], engine=engine)

    def test_p4_autograd_grad_in_save_region_reaches_recomputed_code(self, engine: EagerEngine, x: Tensor) -> None:
        """Backward is entered in the middle of forward, from a SAVE region, through bare code that saves tensors."""

        def body(t: Tensor) -> Tensor:
            hidden = torch.exp(torch.sin(t))

            def gradient(h: Tensor) -> Tensor:
                (grad,) = torch.autograd.grad((h * h).sum(), t, create_graph=True)
                return grad

            return torch.tanh(remat.region(gradient, "gradient", recompute=False)(hidden)) * hidden

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("policy", ["-", "S", "R", "S-", "-S", "RS", "-S-", "SS"])
    def test_p4_double_backward(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        def cube(t: Tensor) -> Tensor:
            return (t * t * t).sin()

        def body(t: Tensor) -> Tensor:
            for index, letter in enumerate(policy):
                t = under(letter, cube, f"c{index}")(t)
            return t

        def backward(outputs: Any, inputs: list[Tensor]) -> Any:
            (first,) = torch.autograd.grad(outputs, inputs[0], grad_weight(outputs), create_graph=True)
            (second,) = torch.autograd.grad(first, inputs[0], grad_weight(first), create_graph=True)
            engine.backward([(second * second).sum() + first.sum()])
            return first.detach(), second.detach()

        compare(body, [x], backward=backward, engine=engine)

    @pytest.mark.parametrize("policy", ["--", "SR", "RS", "-S-"])
    def test_p4_retry_after_failed_replay(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        """The replay fails once in the middle; the same backward, run again, gives eager's numbers."""
        state = {"fail": False}
        log = EventLog()

        def fragile(t: Tensor) -> Tensor:
            if remat.is_recomputing() and state["fail"]:
                raise ConnectionError("a collective failed")
            return t * 1.5

        inner = chain(log, policy)

        def body(t: Tensor) -> Tensor:
            return torch.exp(fragile(inner(torch.sin(t))))

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            if state["fail"]:
                with pytest.raises(ConnectionError, match="a collective failed"):
                    engine.backward([outputs.sum()])
                state["fail"] = False
                assert not remat.is_recomputing()
            engine.backward([outputs.sum()])

        call = engine.checkpoint(body)
        expected = run_once(body, [x], backward=backward)
        for attempt in range(4):
            state["fail"] = attempt % 2 == 1
            assert_same_run(expected, run_once(call, [x], backward=backward), f"attempt {attempt}")

    def test_p4_backward_in_another_thread(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t)).tanh())

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            failures: list[BaseException] = []

            def work() -> None:
                try:
                    engine.backward([outputs.sum()])
                except BaseException as error:  # noqa: BLE001
                    failures.append(error)

            worker = threading.Thread(target=work)
            worker.start()
            worker.join(10)
            assert not failures

        compare(body, [x], backward=backward, engine=engine)

    def test_p4_backward_inside_another_body(self, engine: EagerEngine, x: Tensor) -> None:
        """A backward of one checkpoint that runs inside the forward body of another."""
        other = engine.checkpoint(lambda t: torch.exp(torch.sin(t)), region_name="other")
        plain = {"plain": True}

        def body(t: Tensor) -> Tensor:
            t = torch.tanh(t)
            leaf = t.detach().requires_grad_()
            inner = torch.exp(torch.sin(leaf)) if plain["plain"] else other(leaf)
            (grad,) = torch.autograd.grad(inner.sum(), leaf)
            return torch.exp(t * grad).sin()

        expected = run_once(body, [x])
        plain["plain"] = False
        call = engine.checkpoint(body)
        for index in range(3):
            assert_same_run(expected, run_once(call, [x]), f"call {index}")


class TestP4SavedTensors:
    """Reading saved tensors more than once, retained graphs and split backwards."""

    @pytest.mark.parametrize("policy", ["-", "S", "R", "-S", "S-"])
    def test_p4_saved_tensors_read_twice(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                cos = t.cos()
                ctx.save_for_backward(t, cos)
                return t.sin()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                t, cos = ctx.saved_tensors
                again, cos_again = ctx.saved_tensors
                assert torch.equal(t, again)
                assert torch.equal(cos, cos_again)
                return grad * cos_again + 0 * again + 0 * t

        def body(t: Tensor) -> Tensor:
            t = torch.tanh(t)
            for index, letter in enumerate(policy):
                call = Twice.apply
                t = under(letter, call, f"r{index}")(t)
            return t.exp()

        compare(body, [x], engine=engine)

    def test_p4_retained_full_backward_replays_again(self, engine: EagerEngine, x: Tensor) -> None:
        log = EventLog()

        def backward(outputs: Any, inputs: list[Tensor]) -> None:
            for last in (False, False, True):
                engine.backward([outputs.sum()], retain_graph=not last)

        compare(chain(log, "RSR"), [x], backward=backward, engine=engine)
        log.clear()
        output = engine.checkpoint(chain(log, "RSR"))(x).sum()
        engine.backward([output], retain_graph=True)
        engine.backward([output])
        backward_events = ["replay A", "replay C", "bwd C", "bwd B", "bwd A"]
        assert log == ["fwd A", "fwd B", "fwd C", *backward_events, *backward_events]
        with pytest.raises(RuntimeError, match="second time"):
            engine.backward([output])

    @pytest.mark.parametrize("policy", ["----", "SSSS", "RSRS", "S--S", "RRRR"])
    def test_p4_split_backward_replays_once(self, engine: EagerEngine, policy: str) -> None:
        """Input half and weight half of a zero-bubble schedule: the body runs exactly twice."""
        torch.manual_seed(3)
        weights = [torch.nn.Parameter(torch.randn(6, 6, dtype=torch.float64)) for _ in policy]
        runs: list[bool] = []

        def layer(t: Tensor, weight: Tensor) -> Tensor:
            return torch.tanh(F.linear(t, weight) * 0.5)

        def body(t: Tensor) -> Tensor:
            runs.append(remat.is_recomputing())
            t = F.gelu(t)
            for index, letter in enumerate(policy):
                call = under(letter, layer, f"l{index}")
                t = t + call(t, weights[index])
            return t

        def halves(outputs: Any, inputs: list[Tensor]) -> Any:
            loss = (outputs * grad_weight(outputs)).sum()
            input_grads, groups = stage_backward_input([loss], None, inputs, iter(weights))
            weight_grads = stage_backward_weight(iter(weights), groups)
            return input_grads, weight_grads

        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        expected = run_once(body, [x], params=weights, backward=halves)
        call = engine.checkpoint(body)
        for index in range(3):
            runs.clear()
            actual = run_once(call, [x], params=weights, backward=halves)
            assert_same_run(expected, actual, f"call {index}")
            assert runs == [False, True]

    def test_p4_split_backward_interleaves_microbatches(self, engine: EagerEngine) -> None:
        """Input halves of three microbatches first, the weight halves later: still two body runs for each."""
        torch.manual_seed(4)
        weights = [torch.nn.Parameter(torch.randn(6, 6, dtype=torch.float64)) for _ in range(2)]
        runs: list[bool] = []

        def body(t: Tensor) -> Tensor:
            runs.append(remat.is_recomputing())
            t = torch.tanh(F.linear(t, weights[0]))
            return remat.region(F.linear, "second", recompute=False)(F.gelu(t), weights[1]).sin()

        inputs = [torch.randn(3, 6, dtype=torch.float64) for _ in range(3)]

        def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
            leaves = [t.clone().requires_grad_() for t in inputs]
            for weight in weights:
                weight.grad = None
            losses = [(call(leaf) ** 2).sum() for leaf in leaves]
            groups = [
                stage_backward_input([loss], None, [leaf], iter(weights))[1]
                for loss, leaf in zip(losses, leaves, strict=True)
            ]
            for group in groups:
                stage_backward_weight(iter(weights), group)
            return [grad.clone() for grad in (t.grad for t in [*leaves, *weights]) if grad is not None]

        expected = step(body)
        call = engine.checkpoint(body)
        for _ in range(2):
            runs.clear()
            actual = step(call)
            assert len(expected) == len(actual) == 5
            assert all(torch.equal(left, right) for left, right in zip(expected, actual, strict=True))
            assert runs.count(True) == 3
            assert runs.count(False) == 3

    def test_p4_early_stop_switch_of_torch_is_honoured(self, engine: EagerEngine, x: Tensor) -> None:
        """``set_checkpoint_early_stop(False)`` around the forward makes replay run to the end of the body."""
        log = EventLog()
        head, tail = log.op("head"), log.nothing_saving_op("tail")

        def body(t: Tensor) -> Tensor:
            return tail(head(t))

        for _ in range(2):
            log.clear()
            with torch.utils.checkpoint.set_checkpoint_early_stop(False):
                output = engine.checkpoint(body)(x)
            engine.backward([output.sum()])
            assert log == ["fwd head", "fwd tail", "replay head", "replay tail", "bwd tail", "bwd head"]
        log.clear()
        engine.backward([engine.checkpoint(body)(x).sum()])
        assert log.tally("replay tail") == 0

    def test_p4_unused_outputs_and_partial_backward(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            return torch.exp(a), torch.tanh(a), torch.sigmoid(t)

        for index in range(3):

            def backward(outputs: Any, inputs: list[Tensor], index: int = index) -> None:
                engine.backward([tensors_of(outputs)[index].sum()])

            compare(body, [x], backward=backward, engine=engine)
