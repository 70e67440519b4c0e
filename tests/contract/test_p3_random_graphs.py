"""P3 on random graphs of regions: kept bytes against an oracle that knows what each operation saves.

The oracle works on the graph on paper and runs nothing: which saves are alive, where the last one stands, what is read
to make the recomputed ones, and so which outputs of SAVE regions and which saves of theirs stay.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.alive import StorageTracker
from helpers.engine import EagerEngine
from helpers.functions import SavesInternal
from torch import Tensor

import torch_remat as remat

ROWS, COLUMNS = 4, 6
T = ROWS * COLUMNS * 8


@dataclass(frozen=True)
class Op:
    """A function of one or two tensors of one shape.

    Attributes:
        saves: what it saves: "0" and "1" its arguments, "o" its output, "i" a tensor of its own.
        view: the output lies in the memory of the argument.
    """

    function: Callable[..., Tensor]
    arity: int
    saves: str
    view: bool = False


OPS = {
    "scale": Op(lambda a: a * 0.5, 1, ""),
    "shift": Op(lambda a: a + 0.25, 1, ""),
    "sin": Op(torch.sin, 1, "0"),
    "tanh": Op(torch.tanh, 1, "o"),
    "internal": Op(SavesInternal.apply, 1, "i"),
    "add": Op(torch.add, 2, ""),
    "sub": Op(torch.sub, 2, ""),
    "mul": Op(torch.mul, 2, "01"),
    "flip": Op(lambda a: a.flip(0), 1, ""),
    "view": Op(lambda a: a.view(COLUMNS, ROWS).view(ROWS, COLUMNS), 1, "", view=True),
    "transposed": Op(lambda a: a.t().t(), 1, "", view=True),
}


@dataclass
class Call:
    """One call of the body: an operation, its arguments by number (0 is the body's), its policy, how it is reached."""

    op: str
    arguments: tuple[int, ...]
    policy: str
    form: str


@dataclass
class Graph:
    """A body as data."""

    calls: list[Call] = field(default_factory=list)

    def body(self, t: Tensor) -> Tensor:
        """Run it."""
        values = [t]
        for number, call in enumerate(self.calls):
            values.append(self._call(number, call, [values[index] for index in call.arguments]))
        return values[-1]

    def _call(self, number: int, call: Call, arguments: list[Tensor]) -> Tensor:
        function = OPS[call.op].function
        if call.policy == "-":
            return function(*arguments)
        name, recompute = f"r{number}", call.policy == "R"
        if call.form == "closure":
            return remat.region(lambda: function(*arguments), name, recompute=recompute)()
        if call.form == "dict":
            return remat.region(
                lambda d: {"made": [function(*d["arguments"])]}, name, recompute=recompute
            )({"arguments": arguments})["made"][0]  # fmt: skip
        return remat.region(function, name, recompute=recompute)(*arguments)

    # --- On paper

    def kept(self) -> int:
        """Bytes that are alive after forward, but for the argument and the output."""
        reached = self._reached()
        root = self._roots()
        storages: set[Any] = set()
        slots: list[int] = []  # values that recomputed code or a SAVE region saves and replay makes
        for number, call in enumerate(self.calls, 1):
            if number not in reached:
                continue  # its autograd node dies with its output
            for letter in OPS[call.op].saves:
                if letter == "i":
                    if call.policy == "S":
                        storages.add(("internal", number))
                    else:
                        slots.append(number)  # replay has to run this very call
                    continue
                value = number if letter == "o" else call.arguments[int(letter)]
                if call.policy != "S" or (letter != "o" and self._is_rebuilt(value, call)):
                    slots.append(value if call.policy == "S" or letter != "o" else number)
                elif root[value] != 0:
                    storages.add(root[value])
        needed: set[int] = set()
        pending = list(slots)
        while pending:
            value = pending.pop()
            if value in needed or value == 0:
                continue
            needed.add(value)
            call = self.calls[value - 1]
            if call.policy == "S" and not OPS[call.op].view:
                storages.add(value)
            else:
                pending.extend(call.arguments)
        storages.discard(root[len(self.calls)])
        return T * len(storages)

    def _is_rebuilt(self, value: int, call: Call) -> bool:
        """Whether replay makes what a SAVE region saves: an argument, not a captured one, that recomputed code made."""
        source = value
        while source and OPS[self.calls[source - 1].op].view:
            source = self.calls[source - 1].arguments[0]
        return call.form != "closure" and source != 0 and self.calls[source - 1].policy != "S"

    def _reached(self) -> set[int]:
        reached: set[int] = set()
        pending = [len(self.calls)]
        while pending:
            number = pending.pop()
            if number and number not in reached:
                reached.add(number)
                pending.extend(self.calls[number - 1].arguments)
        return reached

    def _roots(self) -> list[int]:
        """For each value the one whose storage it lies in."""
        root = [0]
        for number, call in enumerate(self.calls, 1):
            root.append(root[call.arguments[0]] if OPS[call.op].view else number)
        return root


def draw(rng: random.Random) -> Graph:
    """A graph of three to fourteen calls."""
    graph = Graph()
    for number in range(rng.randint(3, 14)):
        op = rng.choice(list(OPS))
        recent = [max(0, number - rng.randint(0, 3)) for _ in range(OPS[op].arity)]
        policy, form = rng.choice("SSR--"), rng.choice(["direct", "direct", "closure", "dict"])
        if policy == "S" and OPS[op].view:
            form = "direct"  # a view of a captured tensor is kept whether or not it is read
        graph.calls.append(Call(op, tuple(recent), policy, form))
    return graph


@pytest.mark.parametrize("part", range(10))
def test_p3_random_graphs(engine: EagerEngine, part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        graph = draw(random.Random(seed))
        where = f"seed {seed}: {graph.calls}"

        def body(t: Tensor, graph: Graph = graph) -> Tensor:
            return graph.body(t)

        body.__code__ = body.__code__.replace(co_name=f"graph_{seed}")
        call = engine.checkpoint(body)
        x = torch.linspace(-1, 1, ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS).clone().requires_grad_()
        expected = torch.autograd.grad(body(x).sum(), x)[0]
        for _ in range(2):
            tracker = StorageTracker()
            tracker.ignore(x)
            with tracker:
                output = call(x)
            assert tracker.alive_bytes(without=output) == graph.kept(), where
            x.grad = None
            engine.backward([output.sum()])
            assert torch.equal(x.grad, expected), where
