"""P3 when a program changes: calls 2, 3 and 5 take another way, right numbers in each, and the minimum again soon."""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker
from helpers.compare import assert_same_run, run_once
from helpers.engine import EagerEngine
from helpers.events import Hidden, under
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import ModifiedError, PlaceholderError

ROWS, COLUMNS, FLOAT = 8, 16, 4
T = ROWS * COLUMNS * FLOAT
NUMBERS = itertools.count()


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def leaf(rows: int = ROWS) -> Tensor:
    """``[rows, 16]``, requires a gradient."""
    return torch.linspace(-1, 1, rows * COLUMNS).reshape(rows, COLUMNS).requires_grad_()


def another_body(body: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as code that was never seen before."""
    body.__code__ = body.__code__.replace(co_name=f"{body.__code__.co_name}_{next(NUMBERS)}")
    return body


def alive(call: Callable[..., Any], *inputs: Any, ignore: tuple[Tensor, ...] = ()) -> int:
    """Bytes alive after ``call``, but for inputs and output."""
    tracker = StorageTracker()
    tracker.ignore(*(one for one in inputs if isinstance(one, Tensor)), *ignore)
    with tracker:
        output = call(*inputs)
    return tracker.alive_bytes(without=output)


# What a call does: a function of the argument and the call's state. The state is hidden from the runtime.
WAYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "another policy": lambda t, s: torch.sin(under("SR"[s % 2], lambda u: u * 3, "made")(t)),
    "a region or none": lambda t, s: torch.sin(under("S-"[s % 2], lambda u: u * 3, "made")(t)),
    "another region": lambda t, s: torch.sin(save(lambda u: u * 3, f"made{s}")(t)),
    "more regions": lambda t, s: torch.sin(_loop(t, 1 + s)),
    "other bare code": lambda t, s: (torch.sin, torch.exp, lambda u: torch.cos(u) * u, torch.tanh)[s % 4](
        save(lambda u: u * 3, "made")(t)
    ),
    "one more bare save": lambda t, s: _loop_bare(save(lambda u: u * 3, "made")(t), 1 + s),
    "a reader more": lambda t, s: _maybe_read(save(lambda u: u * 3, "made")(t), t, s % 2 == 1),
    "another region body": lambda t, s: torch.sin(save((lambda u: u * 3, torch.exp, torch.sin)[s % 3], "made")(t)),
    "another order": lambda t, s: _ordered(t, ("ab", "ba")[s % 2]),
    "another output taken": lambda t, s: torch.sin(save(lambda u: (u * 3, u * 5, u * 7), "made")(t)[s % 3]),
}


def _loop(t: Tensor, count: int) -> Tensor:
    for index in range(count):
        t = save(lambda u: u * 1.5, f"step{index}")(t)
    return t


def _loop_bare(t: Tensor, count: int) -> Tensor:
    for _ in range(count):
        t = torch.sin(t)
    return t


def _maybe_read(h: Tensor, t: Tensor, reads: bool) -> Tensor:
    return torch.sin(h) if reads else torch.sin(t) + h


def _ordered(t: Tensor, order: str) -> Tensor:
    functions = {"a": lambda u: u * 3, "b": lambda u: u + 2}
    for name in order:
        t = torch.sin(save(functions[name], name)(t))
    return t


# The state in each of seven calls: another one from call 2, 3 or 5 on, for one call only, and in turns.
SCHEDULES = {
    "from call 2 on": (0, 1, 1, 1, 1, 1, 1),
    "from call 3 on": (0, 0, 1, 1, 1, 1, 1),
    "from call 5 on": (0, 0, 0, 0, 1, 1, 1),
    "in calls 2, 3 and 5": (0, 1, 2, 0, 3, 0, 0),
    "in call 3 only": (0, 0, 1, 0, 0, 0, 0),
    "in turns": (0, 1, 0, 1, 0, 1, 0),
}

# Ways on which a call reads, on a path known for other reads, an output that was not kept.
UNSEEN = {"a reader more", "another output taken"}


class TestP3Ways:
    """Right numbers on every call; where nothing in the call's shape tells, one error, and then right again."""

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("way", WAYS)
    def test_p3_way_changes(self, engine: EagerEngine, way: str, schedule: str) -> None:
        state = Hidden(now=0)
        function = WAYS[way]

        @another_body
        def body(t: Tensor) -> Tensor:
            return function(t, state["now"])

        call = engine.checkpoint(body)
        refused: list[int] = []
        for number, now in enumerate(SCHEDULES[schedule], 1):
            state["now"] = now
            expected = run_once(body, [leaf()])
            actual = run_once(call, [leaf()], catch=(PlaceholderError,))
            if actual.error is None:
                assert_same_run(expected, actual, f"call {number}")
            else:
                refused.append(number)
                message = str(actual.error)
                assert "checkpoint block" in message
                assert "region block::made" in message
                assert "test_p3_changing_programs.py:" in message
                assert "recompute_needs_tensor" in message
                assert "recompute=True" in message
        assert not refused or way in UNSEEN
        if schedule.startswith("from"):
            assert len(refused) <= 1

    @pytest.mark.parametrize("schedule", SCHEDULES)
    @pytest.mark.parametrize("way", sorted(UNSEEN))
    def test_p3_way_changes_and_the_region_runs_again(self, engine: EagerEngine, way: str, schedule: str) -> None:
        """``on_missing="rerun"``: the same programs are right in every call, with warnings instead of errors."""
        state = Hidden(now=0)
        function = WAYS[way]

        @another_body
        def body(t: Tensor) -> Tensor:
            return function(t, state["now"])

        call = engine.checkpoint(body, on_missing="rerun")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, now in enumerate(SCHEDULES[schedule], 1):
                state["now"] = now
                assert_same_run(run_once(body, [leaf()]), run_once(call, [leaf()]), f"call {number}")
        assert caught
        assert all("made" in str(one.message) for one in caught)

    @pytest.mark.parametrize("way", WAYS)
    def test_p3_minimum_again_after_a_change(self, engine: EagerEngine, way: str) -> None:
        """Three calls after the change as much is kept as by a body that never did anything else."""
        state = Hidden(now=0)
        function = WAYS[way]

        def make() -> Callable[[Tensor], Tensor]:
            @another_body
            def body(t: Tensor) -> Tensor:
                return function(t, state["now"])

            return engine.checkpoint(body)

        x = leaf()
        changing = make()
        for now in (0, 0, 1, 1, 1):
            state["now"] = now
            output = changing(x)
            try:
                engine.backward([output.sum()])
            except PlaceholderError:
                assert way in UNSEEN
        fresh = make()
        alive(fresh, x)
        assert alive(changing, x) == alive(fresh, x)

    @pytest.mark.parametrize("rows", [(8, 8, 3, 8, 5), (8, 3, 3, 8, 5), (1, 8, 2, 1, 4)])
    def test_p3_other_shapes_are_the_same_path(self, engine: EagerEngine, rows: tuple[int, ...]) -> None:
        """Microbatches of other lengths: nothing is learned anew, and each call keeps the minimum of its shape."""

        @another_body
        def body(t: Tensor) -> Tensor:
            return t + save(lambda u: u * 5, "tail")(torch.sin(save(lambda u: u * 3, "made")(t)))

        call = engine.checkpoint(body)
        for number, count in enumerate(rows):
            assert alive(call, leaf(count)) == count * COLUMNS * FLOAT
            assert_same_run(run_once(body, [leaf(count)]), run_once(call, [leaf(count)]), f"call {number}")

    def test_p3_training_flag(self, engine: EagerEngine) -> None:
        """train() and eval() are two bodies: each is learned once and keeps its own minimum."""

        class Block(torch.nn.Module):
            def forward(self, t: Tensor) -> Tensor:
                hidden = save(lambda u: u * 3, "made")(t)
                return torch.sin(hidden) if self.training else torch.sin(t) + hidden

        block = Block()
        call = engine.checkpoint(block)
        x = leaf()
        for number, training in enumerate((True, True, False, True, False, False, True)):
            block.train(training)
            assert alive(call, x) == (T if training else 0)
            assert_same_run(run_once(block, [leaf()]), run_once(call, [leaf()]), f"call {number}")

    def test_p3_two_modules_share_code_with_other_flags(self, engine: EagerEngine) -> None:
        """Equal code and regions, another attribute: what one reads says nothing of the other."""

        class Block(torch.nn.Module):
            def __init__(self, reads: str, depth: int = 1) -> None:
                super().__init__()
                self.reads = reads
                self.inner = torch.nn.ModuleList([torch.nn.Identity() for _ in range(depth)])

            def forward(self, t: Tensor) -> Tensor:
                a = save(lambda u: u * 3, "a")(t)
                b = save(lambda u: u * 5, "b")(t)
                for _ in self.inner:
                    t = torch.sin({"a": a, "b": b, "both": a + b, "none": t}[self.reads])
                return t + a + b

        kept = {"a": T, "b": T, "both": 2 * T, "none": 0}
        blocks = [(Block(reads, depth), reads) for depth in (1, 2) for reads in kept]
        calls = [(engine.checkpoint(block, region_name=reads), block, reads) for block, reads in blocks]
        x = leaf()
        for _ in range(2):
            for call, block, reads in calls:
                assert alive(call, x) == kept[reads]
                assert_same_run(run_once(block, [leaf()]), run_once(call, [leaf()]), reads)

    def test_p3_microbatches_and_their_number(self, engine: EagerEngine) -> None:
        """Several forwards are open at once, their number changes, backwards in any order."""

        @another_body
        def body(t: Tensor) -> Tensor:
            return torch.sin(save(lambda u: u * 3, "made")(t)).sum()

        call = engine.checkpoint(body)
        order = random.Random(3)
        for count in (1, 3, 2, 5):
            inputs = [leaf(2 + index) for index in range(count)]
            outputs = [call(one) for one in inputs]
            for index in order.sample(range(count), count):
                engine.backward([outputs[index]])
            for one in inputs:
                assert torch.equal(one.grad, torch.autograd.grad(body(one), one)[0])

    @pytest.mark.parametrize("requires", [(True, False, True), (False, True, False)])
    def test_p3_arguments_with_and_without_a_gradient(self, engine: EagerEngine, requires: tuple[bool, ...]) -> None:
        weight = torch.full((COLUMNS,), 0.5, requires_grad=True)

        @another_body
        def body(t: Tensor) -> Tensor:
            return torch.sin(save(lambda u: u * 3, "made")(t)) * weight

        call = engine.checkpoint(body)
        for number, needs in enumerate(requires * 2):
            x = leaf().detach().requires_grad_(needs)
            expected = run_once(body, [x], params=[weight])
            assert_same_run(expected, run_once(call, [x], params=[weight]), f"call {number}")


class TestP3Alternating:
    """Programs that go back and forth: what was learned of one way is not lost to another."""

    def test_p3_ways_that_look_alike_settle(self) -> None:
        """One path, two readers, told apart by nothing that the runtime sees: each fails once at most."""
        state = Hidden(first=True)

        def body(t: Tensor) -> Tensor:
            one, two = save(lambda u: u * 2, "one")(t), save(lambda u: u * 3, "two")(t)
            return torch.exp((one if state["first"] else two).sin()) + (one + two)

        body, x = another_body(body), leaf()
        failed = []
        for call in range(12):
            state["first"] = call % 2 == 0
            output = remat.checkpoint(region_name="c")(body)(x)
            try:
                found = torch.autograd.grad(output.sum(), x)[0]
            except PlaceholderError:
                failed.append(call)
                continue
            assert torch.equal(found, torch.autograd.grad(body(x).sum(), x)[0])
        assert len(failed) <= 2

    @pytest.mark.parametrize("what", ["changes", "reads"])
    def test_p3_a_rare_way_fails_once(self, what: str) -> None:
        """One path, on which every twelfth call changes an output, or reads another one."""
        state = Hidden(rare=False)

        def body(t: Tensor) -> Tensor:
            one, two = save(lambda u: u * 2, "one")(t), save(lambda u: u * 3, "two")(t)
            if state["rare"] and what == "changes":
                one.add_(0.5)
            read = two if state["rare"] and what == "reads" else one
            return torch.exp(read.sin()) + (one + two)

        body, x = another_body(body), leaf()
        failed = []
        for call in range(40):
            state["rare"] = call % 12 == 5
            try:
                found = torch.autograd.grad(remat.checkpoint(region_name="c")(body)(x).sum(), x)[0]
            except (ModifiedError, PlaceholderError):
                failed.append(call)
                continue
            assert torch.equal(found, torch.autograd.grad(body(x).sum(), x)[0])
        assert failed == [5]

    @pytest.mark.parametrize("ways", [(0, 1, 2), (0, 0, 1, 1, 0, 1), (2, 0, 2, 1)])
    def test_p3_an_output_changed_in_place_on_every_way(self, ways: tuple[int, ...]) -> None:
        """Layers that differ in what the runtime does not see: nothing fails, in whatever order they come."""
        state = Hidden(way=0)

        def body(t: Tensor) -> Tensor:
            for _ in range(state["way"]):
                t = torch.tanh(t)
            return t + torch.relu_(save(lambda u: u * 2, "wide")(t)).sin()

        body, x = another_body(body), leaf()
        for way in ways * 3:
            state["way"] = way
            found = torch.autograd.grad(remat.checkpoint(region_name="c")(body)(x).sum(), x)[0]
            assert torch.equal(found, torch.autograd.grad(body(x).sum(), x)[0])

    def test_p3_an_output_that_is_first_changed_on_another_way(self) -> None:
        """Unforeseen on a path that is new: refused once, and no way of the body has to be learned again for it."""
        state = Hidden(way=0)

        def body(t: Tensor) -> Tensor:
            h = save(lambda u: u * 2, "wide")(t if state["way"] == 0 else t.tanh())
            if state["way"]:
                h.relu_()
            return t + h.sin()

        body, x = another_body(body), leaf()
        failed = 0
        for call in range(10):
            state["way"] = call % 2
            try:
                found = torch.autograd.grad(remat.checkpoint(region_name="c")(body)(x).sum(), x)[0]
            except ModifiedError:
                failed += 1
                continue
            assert torch.equal(found, torch.autograd.grad(body(x).sum(), x)[0])
        assert failed == 1


class TestP3RarePaths:
    """A path that comes too seldom to be observed, or a body whose captured values never stop changing."""

    def test_p3_in_place_on_an_output_is_refused_at_most_once(self) -> None:
        state = {"step": 0}

        def body(t: Tensor) -> Tensor:
            h = save(torch.cos, "cos")(t)
            return torch.exp(torch.sin(torch.relu_(h))) if state["step"] % 12 == 11 else torch.exp(h * 2)

        checkpointed = remat.checkpoint(region_name="c")(body)
        refused = []
        for step in range(60):
            state["step"] = step
            x, other = leaf(), leaf()
            other.data.copy_(x.data)
            try:
                checkpointed(x).sum().backward()
            except ModifiedError:
                refused.append(step)
                continue
            body(other).sum().backward()
            assert torch.equal(x.grad, other.grad), step
        assert refused in ([], [11])

    @pytest.mark.filterwarnings("ignore:torch_remat has seen")
    def test_p3_beyond_all_variants_too(self) -> None:
        refused = 0
        for step in range(1060):
            scale = 1.0 + step / 1024

            def body(t: Tensor, scale: float = scale) -> Tensor:
                return torch.exp(torch.relu_(save(torch.cos, "cos")(t)) / scale)

            x = leaf()
            try:
                remat.checkpoint(region_name="c")(body)(x).sum().backward()
            except ModifiedError:
                refused += 1
        assert refused <= 1


class TestP3Threads:
    """What is learned in one thread serves another; two that learn at once do each other no harm."""

    @pytest.mark.parametrize("shared", [True, False], ids=["one body", "two bodies"])
    def test_p3_two_threads(self, engine: EagerEngine, shared: bool) -> None:
        def make(factor: float) -> Callable[[Tensor], Tensor]:
            @another_body
            def body(t: Tensor) -> Tensor:
                hidden = save(lambda u: u * factor, "made")(t)
                return torch.sin(hidden) + save(lambda u: u * 5, "tail")(hidden)

            return body

        bodies = [make(3.0)] * 2 if shared else [make(3.0), make(4.0)]
        calls = [engine.checkpoint(body) for body in bodies]
        together = threading.Barrier(2, timeout=30)
        failures: list[BaseException] = []
        kept: list[int] = []

        def work(index: int) -> None:
            try:
                x = leaf()
                expected = torch.autograd.grad(bodies[index](x).sum(), x)[0]
                for number in range(12):
                    together.wait()
                    if number % 3 == 2:
                        kept.append(alive(calls[index], x))
                    else:
                        x.grad = None
                        torch.autograd.backward([calls[index](x).sum()])
                        assert torch.equal(x.grad, expected)
            except BaseException as error:  # noqa: BLE001 - told by the thread that waits
                failures.append(error)
                together.abort()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures, failures
        assert kept == [T] * 8

    def test_p3_forward_in_one_thread_backward_in_another(self, engine: EagerEngine) -> None:
        body = another_body(lambda t: torch.sin(save(lambda u: u * 3, "made")(t)))
        call = engine.checkpoint(body)
        x = leaf()
        expected = torch.autograd.grad(body(x).sum(), x)[0]
        for _ in range(3):
            x.grad = None
            output = call(x).sum()
            thread = threading.Thread(target=output.backward)
            thread.start()
            thread.join(60)
            assert torch.equal(x.grad, expected)


def dense(rng: random.Random) -> tuple[Callable[[Tensor], Tensor], int]:
    """A body of twenty regions in a row of bare code, and the bytes that it keeps.

    Every link saves nothing of its own or exactly its input, so the sum can be told link by link.
    """
    links: list[tuple[str, str]] = []
    for index in range(20):
        links.append((rng.choice("SSR"), rng.choice(["scale", "shift", "wave"])))
        if index % 3 == 2:
            links.append(("-", rng.choice(["scale", "wave", "wave"])))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "scale": lambda t: t * 0.5,
        "shift": lambda t: t + 0.25,
        "wave": torch.sin,
    }

    def body(t: Tensor) -> Tensor:
        for index, (letter, name) in enumerate(links):
            t = under(letter, functions[name], f"r{index}")(t)
        return t

    body.__code__ = body.__code__.replace(co_name=f"dense_{next(NUMBERS)}")
    # From the end: is the tensor between two links read by what replay has to make?
    kept, read = 0, False
    for index in reversed(range(len(links))):
        letter, name = links[index]
        made_by_save = index > 0 and links[index - 1][0] == "S"
        if letter == "S":
            saved, needed = name == "wave", False
        else:
            saved, needed = False, read or name == "wave"
        if made_by_save and (needed or saved):
            kept += T  # persisted, or the region's own save of another one's output
        if not made_by_save and saved:
            needed = True  # rebuilt in replay: what makes it has to run
        read = needed and not made_by_save
    return body, kept


class TestP3DenseBodies:
    """Many regions in one body."""

    @pytest.mark.parametrize("seed", range(50))
    def test_p3_twenty_regions(self, engine: EagerEngine, seed: int) -> None:
        body, kept = dense(random.Random(seed))
        call = engine.checkpoint(body)
        x = leaf()
        for number in range(3):
            assert alive(call, x) == kept, f"call {number}"
            assert_same_run(run_once(body, [leaf()]), run_once(call, [leaf()]), f"call {number}")

    def test_p3_layers_of_five_regions_each(self, engine: EagerEngine) -> None:
        """Four layers in one body, with name scopes: the sum of one layer, four times."""
        weights = [torch.randn(COLUMNS, COLUMNS).mul(0.3).requires_grad_() for _ in range(5)]

        @another_body
        def body(t: Tensor) -> Tensor:
            for layer in range(4):
                with remat.name_scope(f"layers.{layer}"):
                    normed = remat.region(lambda u: F.layer_norm(u, (COLUMNS,)), "norm", recompute=True)(t)
                    q = save(F.linear, "q")(normed, weights[0])
                    k = save(F.linear, "k")(normed, weights[1])
                    mixed = save(F.linear, "mix")(torch.sigmoid(q) * k, weights[2])
                    up = save(F.linear, "up")(mixed, weights[3])
                    t = t + save(F.linear, "down")(F.silu(up), weights[4])
            return t

        call = engine.checkpoint(body)
        x = leaf()
        # q, k, up are read by replay. mix: saved by the region "up" itself. down: read by the next layer's norm through
        # the residual; that of the last layer is only added.
        layer = 5 * T
        for _ in range(3):
            assert alive(call, x, ignore=tuple(weights)) == 4 * layer - T
        expected = run_once(body, [leaf()], params=weights)
        assert_same_run(expected, run_once(call, [leaf()], params=weights), "layers")
