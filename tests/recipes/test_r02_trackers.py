"""R02: trackers over microbatches: what runs once, what runs again, and where replay stops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import Tensor

import torch_remat as remat


class Tracked:
    """Two blocks with four trackers each; three microbatches with one eval call between the second and the third."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(6, 6, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]
        self.batches = [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(4)]
        self.reset()

    def reset(self) -> None:
        """Zero trackers and gradients."""
        self.counts = torch.zeros(6, dtype=torch.int64)
        self.total = torch.zeros((), dtype=torch.float64)
        self.before = self.after = 0
        for weight in self.weights:
            weight.grad = None

    def route(self, x: Tensor) -> Tensor:
        """(i) a ``bincount`` sum inside a SAVE region."""
        ids = x.argmax(-1)
        self.counts += torch.bincount(ids, minlength=6)
        return ids

    def block(self, x: Tensor, weight: Tensor) -> Tensor:
        """One block; (ii) is guarded by the phase query, (iii) and (iv) are not."""
        self.before += 1  # (iii) before the first saving operation
        ids = remat.region(self.route, "route", recompute=False)(x)
        hidden = torch.tanh(x @ weight) * torch.sin(x)[torch.arange(4), ids][:, None]
        if not remat.is_recomputing():
            self.total += hidden.detach().sum()
        out = hidden * 2 + x
        self.after += 1  # (iv) after the last saving operation
        return out

    def train(self, wrap: Callable[..., Callable[..., Tensor]]) -> None:
        """Three training microbatches and one eval call."""
        blocks = [wrap(lambda x, weight=weight: self.block(x, weight)) for weight in self.weights]
        for index, batch in enumerate(self.batches[:3]):
            if index == 2:
                with torch.no_grad():
                    blocks[1](blocks[0](self.batches[3]))
            (blocks[1](blocks[0](batch)) ** 2).sum().backward()


def outcome(model: Tracked) -> list[Tensor]:
    """What must be equal to eager."""
    return [model.counts.clone(), model.total.clone(), *(weight.grad.clone() for weight in model.weights)]


def test_r02_trackers_in_save_regions_and_guarded_ones_equal_eager() -> None:
    model = Tracked()
    model.train(lambda body: body)
    expected = outcome(model)
    assert int(expected[0].sum()) == 4 * 2 * 4
    for _ in range(2):
        model.reset()
        model.train(remat.checkpoint(region_name="block"))
        assert all(torch.equal(left, right) for left, right in zip(expected, outcome(model), strict=True))


def test_r02_unguarded_counters_follow_the_documented_rule() -> None:
    """Recomputed code runs again up to the point where replay stops: the last thing that backward needs."""
    model = Tracked()
    training, eval_calls = 3 * 2, 2
    for early_stop in (True, False, True):
        model.reset()
        with torch.utils.checkpoint.set_checkpoint_early_stop(False) if not early_stop else contextlib.nullcontext():
            model.train(remat.checkpoint(region_name="block"))
        assert model.before == 2 * training + eval_calls
        assert model.after == (training if early_stop else 2 * training) + eval_calls


def test_r02_counter_after_a_value_that_backward_needs_doubles() -> None:
    """The same counter is followed by one more saving operation: replay passes it."""
    runs: list[int] = []

    def body(x: Tensor) -> Tensor:
        hidden = torch.sin(x) * 2
        runs.append(1)
        return torch.exp(hidden)

    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        runs.clear()
        remat.checkpoint(region_name="block")(body)(x).sum().backward()
        assert len(runs) == 2
