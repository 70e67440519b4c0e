"""R01: a router whose selection drifts between forward and replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_remat as remat

TOKENS, WIDTH, EXPERTS = 9, 6, 4


class Router:
    """Top-1 routing over four experts; its second selection can be made to drift."""

    def __init__(self, seed: int, drift: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.router = torch.randn(WIDTH, EXPERTS, dtype=torch.float64, generator=generator).requires_grad_()
        self.experts = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        self.x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        self.drift = drift
        self.selections = 0
        self.trips: list[int] = []

    def select(self, x: Tensor) -> Tensor:
        """Expert of each token; the second call swaps two experts (A) or moves token 0 alone (B)."""
        self.selections += 1
        ids = (x @ self.router).argmax(-1)
        if self.selections == 2 and self.drift:
            ids = ids.clone()
            other = int((ids != ids[0]).nonzero()[0]) if bool((ids != ids[0]).any()) else None
            if self.drift == "A" and other is not None:
                ids[0], ids[other] = ids[other].clone(), ids[0].clone()
            else:
                ids[0] = (ids[0] + 1) % EXPERTS
        return ids

    def block(self, x: Tensor, *, save: bool) -> Tensor:
        """Loop over the experts that are hit."""
        select: Callable[[Tensor], Tensor] = self.select
        ids = remat.region(select, "route", recompute=False)(x) if save else select(x)
        out, trips = torch.zeros_like(x), 0
        for expert in range(EXPERTS):
            idx = (ids == expert).nonzero()[:, 0]
            if len(idx) == 0:
                continue
            trips += 1
            out = out.index_add(0, idx, torch.tanh(x[idx] @ self.experts[expert]))
        self.trips.append(trips)
        return out

    def grads(self, wrap: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]], save: bool) -> list:
        """Output and gradients of one step."""
        leaves = [self.x, self.router, self.experts]
        for leaf in leaves:
            leaf.grad = None
        self.selections = 0
        output = wrap(lambda t: self.block(t, save=save))(self.x)
        (output**2).sum().backward()
        return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("drift", ["A", "B", ""])
def test_r01_saved_selection_runs_once_and_gives_eager_grads(drift: str) -> None:
    for seed in range(20):
        model = Router(seed, "")
        expected = model.grads(lambda body: body, save=True)
        model.drift = drift
        for _ in range(2):
            model.trips.clear()
            got = model.grads(remat.checkpoint(region_name="moe"), save=True)
            assert model.selections == 1
            assert len(set(model.trips)) == 1
            for left, right in zip(expected, got, strict=True):
                assert left is right is None or torch.equal(left, right)


def test_r01_control_without_the_save_mark_is_refused() -> None:
    """Variant B changes the number of tokens of an expert: shapes differ, and the error names the block."""
    refused = 0
    for seed in range(20):
        model = Router(seed, "B")
        with pytest.raises(RuntimeError) as caught:
            model.grads(remat.checkpoint(region_name="moe block"), save=False)
        message = str(caught.value)
        assert "moe block" in message
        assert "recompute" in message or "replay" in message
        refused += 1
    assert refused == 20
