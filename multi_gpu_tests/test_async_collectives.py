"""Functional collectives that are still running go in and out of regions: waited for once, kept once, plain in
replay."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compositions import OURS, Annotated, Measured, measured
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

import torch_remat as remat
from torch_remat.testing import KeptBytes, assert_same_bits

ROWS, DIM = 4, 6


class Sum(torch.autograd.Function):
    """A sum over the ranks that nobody has waited for yet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return functional.all_reduce(x, "sum", mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return functional.wait_tensor(functional.all_reduce(grad.contiguous(), "sum", ctx.mesh)), None


class Block:
    """Start a sum, do something else, use the sum: each may be a region."""

    def __init__(self, run: str, mesh: DeviceMesh, device: torch.device, saved: tuple[str, ...]) -> None:
        self.annotated = Annotated(run)
        self.mesh, self.saved = mesh, saved
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(DIM, DIM, generator=generator).to(device).requires_grad_()
        self.seen: list[tuple[bool, type]] = []

    def body(self, x: Tensor) -> Tensor:
        running = self.annotated.region(self.start, "start", save="start" in self.saved)(torch.sin(x))
        self.seen.append((remat.is_recomputing(), type(running)))
        other = torch.tanh(x @ self.weight)
        used = self.annotated.region(self.use, "use", save="use" in self.saved)(running)
        return torch.exp(0.1 * used) * other

    def start(self, x: Tensor) -> Tensor:
        return Sum.apply(x, self.mesh)

    def use(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x * 2)


def step_of(block: Block, device: torch.device) -> Any:
    def step() -> tuple[Tensor, Tensor | None, Tensor | None]:
        block.weight.grad = None
        generator = torch.Generator().manual_seed(30 + dist.get_rank())
        x = torch.randn(ROWS, DIM, generator=generator).to(device).requires_grad_()
        y = block.annotated.checkpoint("layers.0", block.body)(x)
        y.square().mean().backward()
        return y.detach(), block.weight.grad, x.grad

    return step


def async_sum(run: str, device: torch.device, mesh: DeviceMesh, saved: tuple[str, ...] = ("start", "use")) -> Measured:
    block = Block(run, mesh, device, saved)
    return measured(block.annotated, step_of(block, device))


@pytest.mark.parametrize("saved", [("start", "use"), ("start",), ("use",), ()])
def test_p2_waited_for_once_and_plain_in_replay(saved, device, mesh):
    none = async_sum("none", device, mesh)
    assert none.counts() == {"all_reduce": 2}
    block = Block("regions", mesh, device, saved)
    got = measured(block.annotated, step_of(block, device))
    assert_same_bits(none.numbers, got.numbers)
    again = 0 if "start" in saved else 1
    assert got.collectives.counts("replay") == ({"all_reduce": again} if again else {})
    assert got.collectives.waits("forward") == none.collectives.waits("forward") == 1
    assert got.collectives.waits("backward") == none.collectives.waits("backward")
    assert got.collectives.waits("replay") <= again, "what is kept is not waited for again"
    assert (False, AsyncCollectiveTensor) in block.seen
    if "start" in saved:
        in_replay = {kind for replaying, kind in block.seen if replaying}
        assert AsyncCollectiveTensor not in in_replay


def test_p3_kept_once(device, mesh):
    """The sum is read by recomputed code: one tensor of its size is kept for that, not two."""
    block = Block("regions", mesh, device, ("start",))
    step = step_of(block, device)
    step()
    gc.disable()
    try:
        x = torch.ones(ROWS, DIM, device=device, requires_grad=True)
        with KeptBytes() as kept:
            y = block.annotated.checkpoint("layers.0", block.body)(x)
        size = ROWS * DIM * 4
        assert kept.sizes(without=y) == [size], "the sum; everything else is made again"
        y.sum().backward()
        del y
        assert kept.bytes(without=[x.grad, block.weight.grad]) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("run", OURS)
def test_p8_a_running_collective_as_input_and_output_of_a_checkpoint(run, device, mesh):
    def step(run: str) -> tuple[Tensor, Tensor | None]:
        annotated = Annotated(run)
        x = torch.linspace(-1, 1, ROWS * DIM).reshape(ROWS, DIM).to(device).requires_grad_()
        h = Sum.apply(torch.sin(x), mesh)
        assert type(h) is AsyncCollectiveTensor

        def body(t: Tensor) -> Tensor:
            return Sum.apply(annotated.region(torch.tanh, "act")(t.exp()).sin(), mesh)

        y = annotated.checkpoint("layers.0", body)(h)
        assert type(y) is AsyncCollectiveTensor
        y.square().sum().backward()
        return y.detach(), x.grad

    for _ in range(3):
        expected, got = step("none"), step(run)
        assert_same_bits([functional.wait_tensor(expected[0]), expected[1]], [functional.wait_tensor(got[0]), got[1]])


CASES = {"functional collective, still running": async_sum}
