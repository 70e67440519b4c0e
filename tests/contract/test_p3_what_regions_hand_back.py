"""P3: a SAVE region that hands back an argument in one call and a tensor of its own in another, and arguments alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.programs import grads, saved
from torch import Tensor, nn

import torch_remat as remat


def with_view(own: Tensor) -> tuple[Tensor, Tensor]:
    return own, own.t()


KINDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "two of its own": lambda t: (torch.cos(t), t * 3),
    "one twice": lambda t: (torch.cos(t),) * 2,
    "the argument and its own": lambda t: (t, torch.cos(t)),
    "its own and the argument": lambda t: (torch.cos(t), t),
    "views of the argument": lambda t: (t.t().t(), t.view(4, 4)),
    "its own and a view of it": lambda t: with_view(torch.cos(t)),
    "a view and what it is of": lambda t: with_view(torch.cos(t))[::-1],
}
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "both": lambda a, b: torch.exp(a * 2) * torch.tanh(b * 3),
    "the first": lambda a, b: torch.exp(a * 2) + b,
    "the second": lambda a, b: a + torch.exp(b * 2),
    "one modified": lambda a, b: torch.exp(a * 2) + torch.sin(b * 1).mul_(2),
}


class TestP3WhatRegionsHandBack:
    """Which it is belongs to the path: a call that differs is a new one, and right at once."""

    @pytest.mark.parametrize(("one", "other"), list(itertools.permutations(KINDS, 2)))
    @pytest.mark.parametrize("use", USES)
    def test_p3_kinds_that_change_between_calls(self, one: str, other: str, use: str) -> None:
        kinds = [one]

        def body(t: Tensor, part: Callable[[Any], Any]) -> Tensor:
            return USES[use](*part(lambda t: KINDS[kinds[-1]](t))(torch.sin(t)))

        checkpointed = remat.checkpoint(region_name="c")(body)
        for kind in (one, one, other, other, one, other, one):
            kinds.append(kind)
            x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
            ours = grads(checkpointed(x * 2, lambda function: saved(function, "part")), x)
            for got, expected in zip(ours, grads(body(x * 2, lambda function: function), x), strict=True):
                assert torch.equal(got, expected)

    def test_p3_equal_blocks_whose_inputs_need_a_copy_and_do_not(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, t: Tensor, part: Callable[[Any], Any]) -> Tensor:
                h = part(lambda t: t.float())(t)  # the argument itself where it has that dtype
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.linear(torch.exp(h * 0.1))

        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        for _ in range(2):
            x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
            results = []
            for ours in (True, False):
                h = x * 1
                for block in blocks:
                    call = remat.checkpoint(region_name="layers")(block) if ours else block
                    h = call(h, (lambda function: saved(function, "cast")) if ours else (lambda function: function))
                results.append(grads(h, x))
            for got, expected in zip(*results, strict=True):
                assert torch.equal(got, expected)

    @pytest.mark.parametrize("calls", [("cross", "self", "cross", "self"), ("self", "cross", "self", "cross")])
    def test_p3_one_tensor_for_two_arguments(self, calls: tuple[str, ...]) -> None:
        def attention(x: Tensor, context: Tensor) -> Tensor:
            query = saved(torch.tanh, "query")(x)
            key = saved(torch.cos, "key")(torch.sin(context))
            return torch.softmax(query @ key.t(), -1) @ torch.tanh(context)

        checkpointed = remat.checkpoint(region_name="c")(attention)
        for call in calls:
            x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()
            results = []
            for run in (checkpointed, attention):
                h = x * 2
                results.append(grads(run(h, h if call == "self" else x * 3), x))
            for got, expected in zip(*results, strict=True):
                assert torch.equal(got, expected)
