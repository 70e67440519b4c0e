"""P3 as tables: what produces a tensor, what consumes it, where the consumer stands; kept bytes derived from shapes.

Every body is ``consumer(producer(t))`` with the producer a SAVE region. ``T`` is the size of the argument, a leaf
``[8, 16]`` in float32, which costs nothing to hold. A producer that saves nothing keeps its output's storage exactly
where replay reads it to make something that backward needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker
from helpers.engine import EagerEngine
from helpers.functions import SavesInternal
from torch import Tensor

import torch_remat as remat

ROWS, COLUMNS, FLOAT, LONG = 8, 16, 4, 8
T = ROWS * COLUMNS * FLOAT
NUMBERS = itertools.count()
FROZEN = torch.linspace(-1, 1, COLUMNS * COLUMNS).reshape(COLUMNS, COLUMNS)


def save(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def redo(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A RECOMPUTE region."""
    return remat.region(function, name, recompute=True)


@dataclasses.dataclass
class Outputs:
    """A container that regions may return."""

    first: Tensor
    second: Tensor
    note: str = "kept as it is"


class Pair(NamedTuple):
    """Another one."""

    left: Tensor
    right: Tensor


class SavesNothing(torch.autograd.Function):
    """Doubles."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class SavesInput(torch.autograd.Function):
    """``sin`` that saves its input."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].cos()


class ReadsUnseen(torch.autograd.Function):
    """``sin`` by numpy, which the dispatcher does not see; saves what it made."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        values = torch.from_numpy(t.detach().numpy().copy())
        ctx.save_for_backward(values)
        return values.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].cos()


@dataclasses.dataclass(frozen=True)
class Producer:
    """A SAVE region's function, what of its result is consumed, and bytes.

    Attributes:
        storage: bytes of the storage under what is consumed.
        own: bytes that the region's own saves keep, whatever consumes the result.
        owns_output: the consumed storage is among these.
    """

    function: Callable[[Tensor], Any]
    pick: Callable[[Any], Tensor] = lambda made: made
    storage: int = T
    own: int = 0
    owns_output: bool = False


def attention(t: Tensor) -> Tensor:
    """Two heads of width 8 over 8 positions."""
    q = t.view(1, ROWS, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


PRODUCERS = {
    "single": Producer(lambda t: t * 3),
    "tuple": Producer(lambda t: (t * 3, t * 5), lambda made: made[0]),
    "one storage": Producer(lambda t: (t * 3).chunk(2, dim=1), lambda made: made[1]),
    "list": Producer(lambda t: [t * 3, None, t * 5], lambda made: made[2]),
    "dict": Producer(lambda t: {"a": t * 3, "b": t * 5}, lambda made: made["b"]),
    "dataclass": Producer(lambda t: Outputs(t * 3, t * 5), lambda made: made.second),
    "named tuple": Producer(lambda t: Pair(t * 3, t * 5), lambda made: made.left),
    "nested": Producer(lambda t: ({"k": [t * 3]}, t * 5), lambda made: made[0]["k"][0]),
    "twice": Producer(lambda t: (t * 3,) * 2, lambda made: made[1]),
    "view of input": Producer(lambda t: t.view(COLUMNS, ROWS), storage=0),
    "slice of input": Producer(lambda t: t[2:4], storage=0),
    "input": Producer(lambda t: t, storage=0),
    "input in tuple": Producer(lambda t: (t, t * 3), lambda made: made[0], storage=0),
    "transposed": Producer(lambda t: (t * 3).t()),
    "part of a storage": Producer(lambda t: (t * 3)[1:3]),
    "expanded": Producer(lambda t: (t * 3).sum(0).expand(ROWS, COLUMNS), storage=COLUMNS * FLOAT),
    "double": Producer(lambda t: t.double(), storage=2 * T),
    "scalar": Producer(lambda t: t.sum(), storage=FLOAT),
    "without a gradient": Producer(lambda t: t.detach() * 3),
    "function": Producer(SavesNothing.apply),
    "function with an internal": Producer(SavesInternal.apply, own=T),
    "saves its output": Producer(torch.tanh, own=T, owns_output=True),
    "saves its output in double": Producer(lambda t: t.double().exp(), storage=2 * T, own=2 * T, owns_output=True),
    # q is a view of the leaf, at no cost. Attention saves its output and a float32 per head and position.
    "attention": Producer(attention, own=T + 2 * ROWS * FLOAT, owns_output=True),
    "frozen projection": Producer(lambda t: F.linear(t, FROZEN)),
    "no-grad code": Producer(lambda t: torch.no_grad()(lambda: t * 3)()),
}

NO_GRADIENT = {"without a gradient", "no-grad code"}


class Holder:
    """An object with an attribute."""

    def __init__(self, h: Tensor) -> None:
        self.h = h

    def wave(self, t: Tensor) -> Tensor:
        """Reads the attribute."""
        return torch.sin(self.h) * t.sum()


def item(h: Tensor, t: Tensor) -> Tensor:
    """A branch on the value of ``h``."""
    return torch.sin(t * 2) if h.detach().sum().item() > 1e6 else torch.sin(t * 3)


def compared(h: Tensor, t: Tensor) -> Tensor:
    """A branch on a comparison."""
    return torch.sin(t * 2) if (h.detach() > 1e6).any() else torch.sin(t * 3)


def under_no_grad(h: Tensor, t: Tensor) -> Tensor:
    """``h`` matters through a statistic taken without gradients."""
    with torch.no_grad():
        mean = h.mean().float()
    return torch.sin(t) * mean


def in_place_on_a_copy(h: Tensor, t: Tensor) -> Tensor:
    """A copy of ``h`` is changed."""
    copy = h.clone()
    copy.mul_(2)
    return torch.sin(copy)


def in_place_into_a_buffer(h: Tensor, t: Tensor) -> Tensor:
    """``h`` is written into a tensor of the body's own."""
    buffer = torch.zeros(h.shape, dtype=h.dtype)
    buffer.copy_(h)
    return torch.sin(buffer)


def in_place_row(h: Tensor, t: Tensor) -> Tensor:
    """``h`` is added to a part of another tensor."""
    buffer = t * 2
    buffer[0, 0].add_(h.sum().float())
    return torch.sin(buffer)


def indices(h: Tensor, t: Tensor) -> Tensor:
    """Integers made from ``h`` choose from the argument."""
    order = h.detach().flatten().argsort(stable=True) % COLUMNS
    return t.flatten().index_select(0, order).exp()


def mask(h: Tensor, t: Tensor) -> Tensor:
    """Booleans made from ``h``."""
    return torch.where(h.detach().sum() > 0, t, t * 2).exp()


def masked_by_shape(h: Tensor, t: Tensor) -> Tensor:
    """A shape that depends on the data of ``h``."""
    return torch.sin(t * (h.detach() > 0).nonzero().shape[0])


# Consumers that make replay read `h`.
READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bare, saves it": lambda h, t: torch.sin(h),
    "bare, saves what it makes": lambda h, t: torch.exp(h),
    "bare chain": lambda h, t: torch.sin(h + 1),
    "bare product": lambda h, t: h * t.sum(),
    "region": lambda h, t: redo(torch.sin, "sin")(h),
    "region chain": lambda h, t: redo(lambda u: torch.sin(u + 1), "sin")(h),
    "keyword": lambda h, t: redo(lambda *, u: torch.sin(u), "sin")(u=h),
    "dict": lambda h, t: redo(lambda d: torch.sin(d["h"]), "sin")({"h": h, "n": 3}),
    "nested": lambda h, t: redo(lambda d: torch.sin(d[0]["h"][1]), "sin")([{"h": (None, h)}]),
    "dataclass": lambda h, t: redo(lambda o: torch.sin(o.first) * o.second.sum(), "sin")(Outputs(h, t)),
    "closure": lambda h, t: redo(lambda u: torch.sin(h) * u.sum(), "sin")(t),
    "attribute": lambda h, t: redo(Holder(h).wave, "sin")(t),
    "view": lambda h, t: torch.sin(h.reshape(-1)),
    "view in a region": lambda h, t: redo(lambda u: torch.sin(u.reshape(-1)), "sin")(h),
    "slice": lambda h, t: torch.sin(h.reshape(-1)[:1]),
    "transposed": lambda h, t: torch.sin(h.reshape(1, -1).t()),
    "copy": lambda h, t: torch.sin(torch.cat([h.reshape(-1), h.reshape(-1)])),
    "cast": lambda h, t: torch.sin(h.to(torch.bfloat16)),
    "function that saves it": lambda h, t: SavesInput.apply(h),
    "function that saves an internal": lambda h, t: SavesInternal.apply(h),
    "function in a region": lambda h, t: redo(SavesInput.apply, "sin")(h),
    "unseen kernel": lambda h, t: ReadsUnseen.apply(h),
    "no_grad": under_no_grad,
    "item": item,
    "comparison": compared,
    "integers": indices,
    "booleans": mask,
    "shape": masked_by_shape,
    "in place on a copy": in_place_on_a_copy,
    "in place into a buffer": in_place_into_a_buffer,
    "in place into a row": in_place_row,
    "read, then trailing": lambda h, t: torch.sin(h) + h.sum(),
    "two readers": lambda h, t: torch.sin(h) * torch.cos(h),
    "nested checkpoint": lambda h, t: remat.checkpoint(region_name="inner")(torch.sin)(h),
}

# Of these, the ones through which no gradient reaches `h`: the graph of the SAVE region dies, with what it saved.
CUT = {"no_grad", "item", "comparison", "integers", "booleans", "shape"}

# And the ones that have a gradient although `h` has none.
MIXED = {*CUT, "bare product", "dataclass", "closure", "attribute", "in place into a row"}

# Consumers from which backward needs nothing of `h`.
NO_READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "trailing": lambda h, t: h + 1,
    "returned": lambda h, t: h.sum(),
    "trailing residual": lambda h, t: t.sum() + h,
    "trailing region": lambda h, t: redo(lambda u: u * 2 - 1, "tail")(h),
    "trailing view": lambda h, t: h.reshape(-1)[:1] * 2,
    "trailing after work": lambda h, t: torch.sin(t).sum() + h,
    "trailing copy": lambda h, t: torch.cat([h.reshape(-1), h.reshape(-1)]),
    "trailing in place": lambda h, t: torch.sin(t).sum().add_(h.sum().float()),
    "trailing projection without a gradient": lambda h, t: h.reshape(-1)[:1].float() @ FROZEN[:1],
    "trailing function": lambda h, t: SavesNothing.apply(h),
    "trailing function after work": lambda h, t: torch.sin(t).sum() + SavesNothing.apply(h),
    "metadata": lambda h, t: torch.sin(t) * h.numel() * len(h.shape),
    "like": lambda h, t: torch.sin(t).sum() + torch.zeros_like(h),
    "dead code": lambda h, t: (torch.sin(h.detach()), torch.sin(t))[1],
    "SAVE region that does not save it": lambda h, t: save(lambda u: u * 2, "double")(h),
    "chain of SAVE regions": lambda h, t: save(lambda u: u - 1, "c")(save(lambda u: u * 2, "b")(h)),
    "not used": lambda h, t: torch.sin(t),
}

CUT |= {"metadata", "like", "dead code", "not used"}


def bodies(producer: Producer, consumer: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The body of a cell of the table."""

    def body(t: Tensor) -> Tensor:
        return consumer(producer.pick(save(producer.function, "made")(t)), t)

    # One function with a thousand captured values would be one body that never stops changing.
    body.__code__ = body.__code__.replace(co_name=f"cell_{next(NUMBERS)}")
    return body


def check(engine: EagerEngine, body: Callable[[Tensor], Tensor], kept: int) -> None:
    """Bits of eager, and exactly ``kept`` bytes alive after the first, observed, and later forwards."""
    x = torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS).requires_grad_()
    expected = body(x)
    gradient = torch.autograd.grad(expected.sum(), x, allow_unused=True) if expected.requires_grad else None
    call = engine.checkpoint(body)
    for _ in range(2):
        tracker = StorageTracker()
        tracker.ignore(x, FROZEN)
        with tracker:
            output = call(x)
        assert tracker.alive_bytes(without=output) == kept
        assert output.requires_grad == expected.requires_grad
        assert torch.equal(output, expected)
        if gradient is not None:
            engine.backward([output.sum()])
            assert (x.grad is None and gradient[0] is None) or torch.equal(x.grad, gradient[0])
            x.grad = None


class TestP3Tables:
    """Producer x consumer."""

    @pytest.mark.parametrize("consumer", READERS)
    @pytest.mark.parametrize("producer", PRODUCERS)
    def test_p3_read_by_recomputed_code(self, engine: EagerEngine, producer: str, consumer: str) -> None:
        made = PRODUCERS[producer]
        kept = made.own if made.owns_output else made.own + made.storage
        if consumer in CUT:
            kept = made.storage
        elif producer in NO_GRADIENT and consumer not in MIXED:
            kept = 0  # nothing to differentiate
        check(engine, bodies(made, READERS[consumer]), kept)

    @pytest.mark.parametrize("consumer", NO_READERS)
    @pytest.mark.parametrize("producer", PRODUCERS)
    def test_p3_not_read(self, engine: EagerEngine, producer: str, consumer: str) -> None:
        made = PRODUCERS[producer]
        check(engine, bodies(made, NO_READERS[consumer]), 0 if consumer in CUT else made.own)
