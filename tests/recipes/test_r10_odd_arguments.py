"""R10: odd arguments and outputs: the same objects, the same containers, gradients for keyword tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import torch_remat as remat


class Mask:
    """An opaque mask object."""


@dataclasses.dataclass
class Extra:
    """A dataclass output."""

    logits: Tensor
    note: str


def test_r10_odd_arguments_and_outputs() -> None:
    mask, flags = Mask(), {"causal": True}
    seen: list[tuple[Any, ...]] = []

    def three(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return t * 2, t.argmax(-1), t > 0

    def block(t: Tensor, none: None, number: int, pair: tuple[Tensor, None], given: Mask, *, freq: Tensor, flags: dict):
        hidden = torch.sin(t) * number * freq
        values, ids, _ = remat.region(three, "three", recompute=False)(hidden * pair[0])
        seen.append((none, number, pair[1], given, flags))
        out = torch.exp(values * 0.1) + torch.sin(hidden)
        return {"out": out, "count": 3, "nested": (ids, (None, out * 2)), "extra": Extra(torch.tanh(values), "note")}

    def step(call: Any) -> list[Any]:
        torch.manual_seed(0)
        t, u, v = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
        result = call(t, None, 2, (u, None), mask, freq=v, flags=flags)
        assert type(result) is dict
        assert list(result) == ["out", "count", "nested", "extra"]
        assert result["count"] == 3
        assert type(result["nested"]) is tuple
        assert result["nested"][1][0] is None
        assert type(result["extra"]) is Extra
        assert result["extra"].note == "note"
        assert not result["nested"][0].requires_grad
        (result["out"].sum() + result["nested"][1][1].sin().sum() + result["extra"].logits.sum()).backward()
        return [result["out"].detach(), result["nested"][0], t.grad, u.grad, v.grad]

    expected = step(block)
    for _ in range(3):
        seen.clear()
        got = step(remat.checkpoint(region_name="block")(block))
        assert all(torch.equal(left, right) for left, right in zip(expected, got, strict=True))
        assert len(seen) == 2
        assert all(left is right for left, right in zip(seen[0], seen[1], strict=True))
        assert seen[0][3] is mask
        assert seen[0][4] is flags


def test_r10_flags_of_region_outputs() -> None:
    flags: list[tuple[bool, bool, bool, torch.dtype, torch.dtype]] = []

    def three(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return t * 2, t.argmax(-1), t > 0

    def block(t: Tensor) -> Tensor:
        values, ids, positive = remat.region(three, "three", recompute=False)(torch.sin(t))
        flags.append((values.requires_grad, ids.requires_grad, positive.requires_grad, ids.dtype, positive.dtype))
        return torch.exp(values)

    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    remat.checkpoint(region_name="block")(block)(x).sum().backward()
    assert flags == [(True, False, False, torch.int64, torch.bool)] * 2
