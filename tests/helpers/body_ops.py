"""The operations that random bodies are made of, as source templates."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """A name in the source, with the shape of its tensor."""

    name: str
    shape: Shape
    kind: str


UNARY: Sequence[str] = (
    "torch.sin({a})", "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.silu({a})", "torch.relu({a})",
    "torch.exp(torch.sin({a}))", "({a} * 0.5)", "({a} + 1)", "(-{a})", "{a}.clone()", "F.dropout({a}, 0.5, False)",
    "({a} * {a}.detach())", "torch.softmax({a}.reshape(-1), 0).view({a}.shape)", "{a}.contiguous()",
    "({a} * {a} * 0.3)", "{a}.cumsum(-1).tanh()", "({a} / (1 + {a}.abs()))", "torch.cat([{a}, {a}], -1)[..., ::2]",
    "torch.addcmul({a}, {a}, {a}, value=0.2).tanh()", "{a}.double()", "F.leaky_relu({a})", "{a}.float().double()",
)  # fmt: skip

BINARY: Sequence[str] = (
    "({a} + {b})", "({a} * {b})", "torch.maximum({a}, {b})", "({a} - {b}.sin())", "torch.where({a} > {b}, {a}, {b})",
    "torch.lerp({a}, {b}, 0.3)", "torch.stack([{a}, {b}]).sum(0)", "({a} * {b}.mean())", "torch.hypot({a}, {b} + 2)",
)  # fmt: skip

INPLACE: Sequence[str] = (
    "{a}.mul_(1.5)", "{a}.add_({b} * 0.5)", "torch.relu_({a})", "{a}[..., :1].mul_(0.5)", "{a}.sin_()",
    "{a}.copy_({b} * 2)", "{a}.reshape(-1)[:2].mul_(3)", "{a}.__iadd__(1)", "{a}[...] = {b} * 0.5",
    "{a}.detach().mul_(2)",
    "{a}.clamp_(min=-0.5)", "{a}.unsqueeze(0).add_(1)",
)  # fmt: skip


TO_COMPLEX: Sequence[str] = ("torch.complex({a}, {a} * 0.5)", "torch.complex({a}, {a}.sin()).conj()", "({a} * 1j)")

COMPLEX: Sequence[str] = (
    "{a}.conj()", "({a} * {a} * 0.2)", "torch.tanh({a} * 0.3)", "({a} * {a}.conj())", "({a} + 1j)", "{a}.clone()",
    "torch.sin({a} * 0.2)", "{a}.conj().flip(0) if {a}.dim() else {a}",
    "torch.view_as_complex(torch.view_as_real({a}.resolve_conj()) * 2)",
)  # fmt: skip

FROM_COMPLEX: Sequence[str] = (
    "{a}.real", "{a}.imag", "{a}.conj().imag", "torch.view_as_real({a}.resolve_conj()).sum(-1)",
    "torch.view_as_real({a}.conj().resolve_conj())[..., 1]", "({a} * {a}.conj()).real",
)  # fmt: skip

FUNCTIONS: Sequence[str] = ("Saves.apply({a})", "Saves.apply({a}) * {a}", "Many.apply({a})[0]", "Many.apply({a})[1]")


def _transposed(shape: Shape) -> Shape | None:
    return (shape[1], shape[0]) if len(shape) == 2 else None


def _row(shape: Shape) -> Shape | None:
    return shape[1:] if len(shape) >= 1 and shape[0] > 1 else None


def _tail(shape: Shape) -> Shape | None:
    return (shape[0] - 1, *shape[1:]) if len(shape) >= 1 and shape[0] > 1 else None


def _columns(shape: Shape) -> Shape | None:
    return (shape[0], (shape[1] + 1) // 2) if len(shape) == 2 else None


def _flat(shape: Shape) -> Shape | None:
    total = 1
    for size in shape:
        total *= size
    return (total,)


def _extra(shape: Shape) -> Shape | None:
    return (1, *shape) if len(shape) < 3 else None


def _expanded(shape: Shape) -> Shape | None:
    return (2, *shape) if len(shape) < 3 else None


def _same(shape: Shape) -> Shape | None:
    return shape


def _diagonal(shape: Shape) -> Shape | None:
    return (min(shape),) if len(shape) == 2 else None


def _grid(shape: Shape) -> Shape | None:
    return (4, 6) if _flat(shape) == (24,) else None


VIEWS: Sequence[tuple[str, Callable[[Shape], Shape | None]]] = (
    ("{a}.t()", _transposed), ("{a}[1]", _row), ("{a}[1:]", _tail), ("{a}[:, ::2]", _columns),
    ("{a}.reshape(-1)", _flat), ("{a}.unsqueeze(0)", _extra), ("{a}.expand(2, *{a}.shape)", _expanded),
    ("{a}.view_as({a})", _same), ("{a}.flip(0) if {a}.dim() else {a}", _same), ("{a}.diagonal()", _diagonal),
    ("{a}.chunk(2, 0)[0] if {a}.shape[0] % 2 == 0 else {a}[: ({a}.shape[0] + 1) // 2]", lambda s: _half(s)),
    ("{a}.reshape(4, 6)", _grid), ("{a}.reshape(4, 6)", _grid), ("{a}.movedim(0, -1)", lambda s: _moved(s)),
)  # fmt: skip


def _half(shape: Shape) -> Shape | None:
    return ((shape[0] + 1) // 2, *shape[1:]) if len(shape) >= 1 and shape[0] > 1 else None


def _moved(shape: Shape) -> Shape | None:
    return (*shape[1:], shape[0]) if len(shape) >= 2 else None


def pick_shape_op(
    rng: random.Random, ops: Sequence[tuple[str, Callable[[Shape], Shape | None]]], shape: Shape
) -> tuple[str, Shape] | None:
    """A random operation of ``ops`` that ``shape`` allows, with the shape of its result."""
    allowed = [(template, result) for template, rule in ops if (result := rule(shape)) is not None]
    return rng.choice(allowed) if allowed else None
