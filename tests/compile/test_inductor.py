"""Inductor: placement and random numbers. It compiles C++, so these tests are few and slow."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from test_boundaries import RUNS, block
from torch import Tensor

import torch_remat as remat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_p2_save_region_runs_once(x: Tensor) -> None:
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    call = torch.compile(lambda t: remat.checkpoint(region_name="b")(block)(t), fullgraph=True)
    call(x)
    RUNS.clear()
    (got,) = torch.autograd.grad(call(x).sum(), x)
    assert RUNS == ["save", "rec", "rec"]
    torch.testing.assert_close(got, expected)


def test_p1_gradient_belongs_to_the_numbers_that_were_drawn() -> None:
    """Inductor draws from a seed that it keeps: in recomputed code nothing else of a dropout is kept."""

    def body(t: Tensor) -> Tensor:
        scaled = remat.region(lambda u: F.dropout(u, 0.5), "save", recompute=False)(t)
        return (F.dropout(scaled, 0.3) * torch.rand_like(t)).square()

    t = torch.full((16, 16), 2.0, requires_grad=True)
    call = torch.compile(lambda t: remat.checkpoint(region_name="b")(body)(t), fullgraph=True)
    for _ in range(2):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda s: kept.append(s) or s, lambda s: s):
            output = call(t)
        assert sorted(s.dtype.itemsize for s in kept if s.numel() == 256) == [1, 4], "mask and output of the region"
        (got,) = torch.autograd.grad(output.sum(), t)
        assert 0 < int((output == 0).sum()) < 256
        torch.testing.assert_close(got, output.detach())  # (c t)^2 at t = 2 has the derivative 2 c^2 t = (c t)^2


NOTHING = {
    "times one": lambda h: h * 1.0,
    "one times": lambda h: 1 * h,
    "plus zero": lambda h: h + 0,
    "minus zeros": lambda h: h - torch.zeros_like(h),
    "over one": lambda h: h / 1,
    "times a tensor of ones": lambda h: h * torch.tensor(1.0, dtype=h.dtype),
    "in place": lambda h: h.clone().mul_(1.0).add_(0),
    "a copy": lambda h: h.clone(),
    "a view": lambda h: h.view(-1)[:].view(4, 6) * 1,
}


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_p2_save_region_before_an_operation_that_changes_nothing(x: Tensor, name: str) -> None:
    """Inductor takes the operation out, and gives its marks to what it was given."""
    weight = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6).requires_grad_()

    def body(t: Tensor) -> Tensor:
        h = remat.region(lambda u: u @ weight, "product", recompute=False)(t.sin())
        return NOTHING[name](h).cos().sin()

    found = remat.explain(torch.compile(lambda t: remat.checkpoint(region_name="b")(body)(t), fullgraph=True), x)
    (checkpoint,) = found.checkpoints
    parts = (*checkpoint.regions, checkpoint.bare)
    assert [row.bytes for part in parts for row in part.kept if row.bytes] == [x.nbytes]
    assert "mm" not in {row.what for part in parts for row in part.rebuilt}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1]), -1), v)


def test_p2_attention_that_inductor_replaces_by_a_kernel_of_its_own_is_kept() -> None:
    """It gives the kernel the mark of the last operation that it stands for."""

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return remat.region(attention, "attention", recompute=False)(q.sin(), k, v).cos()

    call = torch.compile(lambda *args: remat.checkpoint(region_name="b")(body)(*args), fullgraph=True)
    found = remat.explain(call, *(torch.randn(2, 4, 16, 64, requires_grad=True) for _ in range(3)))
    (checkpoint,) = found.checkpoints
    (region,) = [one for one in checkpoint.regions if one.name == "attention"]
    assert region.kept_bytes >= 2 * 4 * 16 * 64 * 4
    assert [one.what.partition("[")[0] for part in (region, checkpoint.bare) for one in part.rebuilt] == ["sin"]


@pytest.mark.parametrize("where", ["inside", "around"])
def test_p1_kernels_that_follow_each_other(x: Tensor, where: str) -> None:
    """Inductor makes buffers unseen and has them filled by ``mm(out=...)``: they are no tensors from outside."""
    down, up = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6, 1).unbind()

    def low_rank(t: Tensor) -> Tensor:
        return torch.sin(t @ down @ up.t() @ down @ up.t()) + t

    def body(t: Tensor) -> Tensor:
        return low_rank(t.sin()).cos()

    compiled = torch.compile(low_rank)
    call = remat.checkpoint(region_name="b")(lambda t: compiled(t.sin()).cos())
    if where == "around":
        call = torch.compile(remat.checkpoint(region_name="b")(body))
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(call(x).sum(), x)[0], expected)
