"""P3 where tables do not reach: integers, inputs, in-place code, later blocks, hook pairs; bytes from shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker
from helpers.compare import compare
from helpers.engine import EagerEngine
from torch import Tensor

import torch_remat as remat

ROWS, COLUMNS, FLOAT, LONG = 8, 16, 4, 8
T = ROWS * COLUMNS * FLOAT


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def redo(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A RECOMPUTE region."""
    return remat.region(function, name, recompute=True)


def leaf() -> Tensor:
    """``[8, 16]``, requires a gradient."""
    return torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS).requires_grad_()


def kept(call: Callable[..., Tensor], *inputs: Tensor, watched: tuple[Tensor, ...] = ()) -> tuple[int, Tensor]:
    """Bytes alive after ``call``, the storages of ``watched`` among them; the output is returned to stay alive."""
    tracker = StorageTracker()
    tracker.watch(*watched)
    tracker.ignore(*(one for one in inputs if not any(one is other for other in watched)))
    with tracker:
        output = call(*inputs)
    return tracker.alive_bytes(without=output), output


def check(engine: EagerEngine, body: Callable[[Tensor], Tensor], expected: int) -> None:
    """Bits of eager; ``expected`` bytes after the first, observed, and later forwards."""
    x = leaf()
    compare(body, [x], engine=engine, calls=2)
    call = engine.checkpoint(body)
    for _ in range(3):
        alive, output = kept(call, x)
        assert alive == expected
        engine.backward([output.sum()])


# Integer and boolean outputs of a SAVE region: what makes them, and their bytes.
INTEGERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], int]] = {
    "argsort": (lambda t: t.detach().sum(1).argsort(), lambda made: made, ROWS * LONG),
    "one of two": (lambda t: t.topk(2, dim=1), lambda made: made.indices[:, 0], ROWS * 2 * LONG),
    "mask": (lambda t: t > 0, lambda made: made.any(1).long(), ROWS * COLUMNS),
    "int32": (lambda t: t.detach().argmax(1).int() % ROWS, lambda made: made, ROWS * 4),
    "in a dict": (lambda t: {"ids": t.argmax(1) % ROWS, "n": 3}, lambda made: made["ids"], ROWS * LONG),
}

INTEGER_READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda ids, t: torch.sin(t[ids % ROWS]),
    "index_select": lambda ids, t: torch.sin(t.index_select(0, ids % ROWS)),
    "region": lambda ids, t: redo(lambda u, i: torch.sin(u[i % ROWS]), "pick")(t, ids),
    "closure": lambda ids, t: redo(lambda u: torch.sin(u[ids % ROWS]), "pick")(t),
    "embedding": lambda ids, t: torch.sin(F.embedding(ids % ROWS, t)),
    "scatter": lambda ids, t: torch.sin(torch.zeros(ROWS, COLUMNS).index_add(0, ids % ROWS, t)),
    "mask": lambda ids, t: torch.sin(t * (ids > 2)[:, None]),
    "where": lambda ids, t: torch.where((ids > 2)[:, None], t, t * 2).exp(),
    "loop over values": lambda ids, t: sum(torch.sin(t[ids == one]).sum() for one in ids.unique()),  # type: ignore[return-value]
    "tolist": lambda ids, t: torch.sin(t * sum(ids.tolist())),
    "shape": lambda ids, t: torch.sin(t[: 1 + int((ids > 2).sum()) % 4]),
    "one hot": lambda ids, t: torch.sin(t * torch.eye(COLUMNS)[ids % COLUMNS]),
}

INTEGER_NO_READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "trailing": lambda ids, t: torch.sin(t).sum() + ids.sum(),
    # A histogram is no dead code: its shape depends on the data, and replay has to get past it.
    "dead": lambda ids, t: (ids.cumsum(0), torch.sin(t))[1],
    "metadata": lambda ids, t: torch.sin(t * ids.numel()),
    "not used": lambda ids, t: torch.sin(t),
    "SAVE": lambda ids, t: torch.sin(t).sum() + save(lambda i: i * 2, "twice")(ids).sum(),
}


class TestP3Integers:
    """Routing decisions and masks are small, kept where they are read, and not kept elsewhere."""

    @pytest.mark.parametrize("consumer", INTEGER_READERS)
    @pytest.mark.parametrize("producer", INTEGERS)
    def test_p3_integers_read(self, engine: EagerEngine, producer: str, consumer: str) -> None:
        function, pick, size = INTEGERS[producer]
        check(engine, lambda t: INTEGER_READERS[consumer](pick(save(function, "made")(t)), t), size)

    @pytest.mark.parametrize("consumer", INTEGER_NO_READERS)
    @pytest.mark.parametrize("producer", INTEGERS)
    def test_p3_integers_not_read(self, engine: EagerEngine, producer: str, consumer: str) -> None:
        function, pick, _ = INTEGERS[producer]

        def body(t: Tensor) -> Tensor:
            return INTEGER_NO_READERS[consumer](pick(save(function, "made")(t)), t)

        check(engine, body, 0)


# Bodies, and whether replay reads the body's input: then an activation is kept, else it is not pinned.
INPUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bare save": (torch.sin, T),
    "bare read": (lambda t: torch.sin(t + 1), T),
    "region": (lambda t: redo(torch.sin, "sin")(t), T),
    "closure": (lambda t: redo(lambda: torch.sin(t), "sin")(), T),
    "view": (lambda t: torch.sin(t.view(-1)[:4]), T),
    "SAVE that saves it": (lambda t: save(torch.sin, "sin")(t), T),
    "SAVE that saves it, and bare": (lambda t: save(torch.sin, "sin")(t) * torch.cos(t), 2 * T),  # and the factor
    "SAVE that saves a view of it": (lambda t: save(lambda u: torch.sin(u[:2]), "sin")(t), T),
    "SAVE that does not save it": (lambda t: save(lambda u: u * 3, "triple")(t), 0),
    "SAVE, then a reader of its output": (lambda t: torch.sin(save(lambda u: u * 3, "triple")(t)), T),
    "SAVE that returns it, then a reader": (lambda t: torch.sin(save(lambda u: u, "same")(t)), T),
    "SAVE that returns a view, then a reader": (lambda t: torch.sin(save(lambda u: u[:2], "part")(t)), T),
    "trailing": (lambda t: t + 1, 0),
    "trailing residual": (lambda t: t + save(lambda u: torch.tanh(u * 3), "tanh")(t), T),  # tanh's output
    "not used": (lambda t: torch.sin(OTHER), 0),
    "rebuilt argument": (lambda t: save(torch.sin, "sin")(t * 2), T),
}
OTHER = torch.ones(3, requires_grad=True)


class TestP3Inputs:
    """An activation that enters a checkpoint is pinned only where replay or a save reads it."""

    @pytest.mark.parametrize("name", INPUTS)
    def test_p3_input(self, engine: EagerEngine, name: str) -> None:
        body, expected = INPUTS[name]
        source = leaf()
        call = engine.checkpoint(body)
        for _ in range(3):
            x = source * 1
            tracker = StorageTracker()
            tracker.ignore(source, OTHER)
            tracker.watch(x)
            with tracker:
                output = call(x)
            del x
            assert tracker.alive_bytes(without=output) == expected
            engine.backward([output.sum()])
        compare(lambda t: body(t * 1), [source], engine=engine, calls=2)

    def test_p3_input_in_a_container_and_by_keyword(self, engine: EagerEngine) -> None:
        """Of four activations two are read: these are kept, the others are not."""

        def body(pair: tuple[Tensor, Tensor], *, more: dict[str, Tensor]) -> Tensor:
            total = save(lambda a, b: a + b, "sum")(pair[0], more["a"])
            return torch.sin(pair[1]) * torch.sin(more["b"]).sum() + total

        source = leaf()
        call = engine.checkpoint(body)
        for _ in range(3):
            activations = [source * (2 + index) for index in range(4)]
            tracker = StorageTracker()
            tracker.watch(*activations)
            tracker.ignore(source)
            with tracker:
                output = call((activations[0], activations[1]), more={"a": activations[2], "b": activations[3]})
            activations.clear()
            assert tracker.alive_bytes(without=output) == 2 * T
            engine.backward([output.sum()])

    def test_p3_parts_of_one_input_are_kept_once(self, engine: EagerEngine) -> None:
        source = leaf()
        call = engine.checkpoint(lambda a, b: torch.sin(a) * torch.cos(b))
        for _ in range(3):
            a, b = (source * 1).chunk(2)
            tracker = StorageTracker()
            tracker.watch(a)
            with tracker:
                output = call(a, b)
            del a, b
            assert tracker.alive_bytes(without=output) == T
            engine.backward([output.sum()])


class TestP3SecondBlock:
    """An output of one checkpoint that a second one reads is the second one's input: kept once, or not at all."""

    @pytest.mark.parametrize(
        ("second", "expected"),
        [
            (torch.sin, T),
            (lambda h: save(lambda u: u * 3, "triple")(h), 0),
            (lambda h: h + 1, 0),
            (lambda h: redo(lambda u: torch.sin(u + 1), "sin")(h), T),
            (lambda h: torch.sin(h) + save(torch.cos, "cos")(h), T),
        ],
    )
    @pytest.mark.parametrize(
        ("first", "own"),
        [
            (lambda t: save(lambda u: u * 3, "triple")(t), 0),
            (lambda t: save(lambda u: u * 3, "triple")(torch.sin(t)), 0),
            (lambda t: torch.sin(t) + save(lambda u: u * 3, "triple")(t), 0),
        ],
    )
    def test_p3_two_blocks(
        self,
        engine: EagerEngine,
        first: Callable[[Tensor], Tensor],
        own: int,
        second: Callable[[Tensor], Tensor],
        expected: int,
    ) -> None:
        x = leaf()
        one, two = engine.checkpoint(first), engine.checkpoint(second)
        for _ in range(3):
            alive, output = kept(lambda t: two(one(t)), x)
            assert alive == own + expected
            engine.backward([output.sum()])
        x.grad = None
        output = two(one(x))
        engine.backward([output.sum()])
        assert x.grad is not None
        assert torch.equal(x.grad, torch.autograd.grad(second(first(x)).sum(), x)[0])

    def test_p3_output_of_a_save_region_that_both_blocks_read(self, engine: EagerEngine) -> None:
        """Persisted by the first, pinned as the input of the second: one storage."""

        def first(t: Tensor) -> tuple[Tensor, Tensor]:
            hidden = save(lambda u: u * 3, "triple")(t)
            return hidden, torch.sin(hidden)

        x = leaf()
        one, two = engine.checkpoint(first), engine.checkpoint(lambda h, s: torch.cos(h) * s.sum())
        for _ in range(3):
            alive, output = kept(lambda t: two(*one(t)), x)
            assert alive == T + T  # the triple; and its sine, which the second block reads
            engine.backward([output.sum()])

    def test_p3_a_stack_keeps_one_tensor_per_boundary(self, engine: EagerEngine) -> None:
        """Eight blocks of linear (saved), gelu, linear (saved), residual: the input and the first linear's output."""
        weights = [torch.randn(COLUMNS, COLUMNS, requires_grad=True) for _ in range(2)]

        def block(t: Tensor) -> Tensor:
            hidden = save(F.linear, "in")(t, weights[0])
            return t + save(F.linear, "out")(F.gelu(hidden), weights[1])

        x = leaf()
        calls = [engine.checkpoint(block, region_name=f"layers.{index}") for index in range(8)]

        def model(t: Tensor) -> Tensor:
            for call in calls:
                t = call(t)
            return t

        for _ in range(2):
            tracker = StorageTracker()
            tracker.ignore(x, *weights)
            with tracker:
                output = model(x)
            assert tracker.alive_bytes(without=output) == 8 * T + 7 * T  # the first input is the leaf
            engine.backward([output.sum()])


class TestP3InPlace:
    """In-place code on SAVE outputs: a copy where the value of before is read, nothing where none is."""

    @pytest.mark.parametrize(
        ("tail", "expected"),
        [
            (lambda h, t: torch.sin(h.clone().mul_(2)), T),
            (lambda h, t: torch.sin(h.mul_(2)), T),
            (lambda h, t: h.mul_(2), 0),
            (lambda h, t: torch.sin(t).sum() + h.add_(1), 0),
            (lambda h, t: torch.sin(t).sum() + h.add_(1)[0].mul_(2), 0),
            (lambda h, t: torch.exp(h * 0.5) * h.add_(1).sin(), T),
            (lambda h, t: torch.sin(t + h.detach()).sum() + h, T),
            (lambda h, t: redo(lambda u: u.mul_(2).sin(), "change")(h), T),
            (lambda h, t: save(lambda u: u.mul_(2), "change")(h).sum(), 0),
        ],
    )
    def test_p3_save_output_modified(
        self, engine: EagerEngine, tail: Callable[[Tensor, Tensor], Tensor], expected: int
    ) -> None:
        check(engine, lambda t: tail(save(lambda u: u * 3, "made")(t), t), expected)

    def test_p3_chain_of_changes_keeps_the_last_one(self, engine: EagerEngine) -> None:
        """A SAVE region makes a tensor, another one changes it, recomputed code reads the result: one storage."""

        def body(t: Tensor) -> Tensor:
            hidden = save(lambda u: u * 3, "made")(t)
            save(lambda u: u.add_(1), "changed")(hidden)
            return torch.sin(hidden)

        check(engine, body, T)


class TestP3HookPairs:
    """What is packed, and how often, follows the same rules."""

    @pytest.mark.parametrize(
        ("body", "inputs", "saves", "outputs"),
        [
            (lambda t: torch.sin(save(lambda u: u * 3, "m")(t)), 1, 0, 1),
            (lambda t: save(lambda u: u * 3, "m")(t) + 1, 1, 0, 0),
            (lambda t: torch.sin(save(torch.tanh, "m")(t * 2)), 1, 1, 0),  # the save serves replay as well
            (lambda t: torch.sin(save(lambda u: (u * 3).chunk(2), "m")(t)[0]), 1, 0, 2),
            (lambda t: t + save(torch.exp, "m")(t * 2), 1, 1, 0),
        ],
    )
    def test_p3_packed(
        self, engine: EagerEngine, body: Callable[[Tensor], Tensor], inputs: int, saves: int, outputs: int
    ) -> None:
        kinds: list[remat.SavedTensorKind] = []

        def pack(tensor: Tensor) -> Tensor:
            kinds.append(remat.current_saved_tensor_info().kind)
            return tensor.detach().clone()

        pair = (pack, lambda tensor: tensor)
        x = leaf()
        compare(body, [x], engine=engine, options={"saved_tensors_hooks": pair}, calls=2)
        call = engine.checkpoint(body, saved_tensors_hooks=pair)
        for _ in range(3):
            kinds.clear()
            output = call(x)
            found = [kinds.count(kind) for kind in remat.SavedTensorKind]
            assert found == [inputs, saves, outputs]
            engine.backward([output.sum()])

    def test_p3_weights_are_not_packed(self, engine: EagerEngine) -> None:
        """Nor is a parameter that lies in a flat buffer."""
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        weight = torch.nn.Parameter(torch.randn(3 * COLUMNS).view(3, COLUMNS))
        call = engine.checkpoint(
            lambda t: F.silu(save(F.linear, "linear")(t, weight)), saved_tensors_hooks=(pack, lambda tensor: tensor)
        )
        for _ in range(2):
            shapes.clear()
            engine.backward([call(leaf()).sum()])
            assert shapes == [(ROWS, COLUMNS), (ROWS, 3)]  # the input, and the output that silu reads

    def test_p3_a_measuring_mode_around_the_body_changes_nothing(self, engine: EagerEngine) -> None:
        """A dispatch mode that looks at every argument's memory is not the body reading it."""
        x = leaf()

        def body(t: Tensor) -> Tensor:
            return save(lambda u: u * 3, "triple")(t * 2) + torch.sin(t)

        measured, output = kept(engine.checkpoint(body), x)  # observed under the mode
        assert measured == 0
        assert remat.explain(body, x).kept_bytes == 0
        engine.backward([output.sum()])
