"""A graph changes in place a tensor from outside that recomputed code reads: backward has the value of forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import test_p1_shared_memory
from helpers.compare import compare
from helpers.compiled import Graphs, Ready, names
from torch import Tensor

import torch_remat as remat

# A branch on data breaks the graph, and the eager runtime refuses it.
_TABLE = test_p1_shared_memory.TestP1TensorFromOutside.BODIES
BODIES = {name: body for name, (_, body) in _TABLE.items() if name != "read for a branch"}


class TestChangedInputs:
    """Torch keeps the tensor itself for backward, and changes it before; with or without checkpoints."""

    @pytest.mark.parametrize("fullgraph", [True, False])
    @pytest.mark.parametrize("name", sorted(BODIES))
    def test_p1_recomputed_code_reads_what_forward_read(self, graphs: Graphs, name: str, fullgraph: bool) -> None:
        function = BODIES[name]
        x = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6).requires_grad_()
        results = []
        compiled = graphs.compile(
            lambda t, state: remat.checkpoint(region_name="b")(function)(t, state), fullgraph=fullgraph
        )
        for call in (function, compiled, compiled):
            state = torch.full((6, 6), 0.5, dtype=torch.float64)
            output = call(x, state)
            results.append((output.detach(), *torch.autograd.grad(output.sum(), x), state))
        for got in results[1:]:
            torch.testing.assert_close(got, results[0], rtol=0, atol=0)

    @pytest.mark.parametrize(
        "part",
        [
            lambda b: b.unbind(0)[1],
            lambda b: b.chunk(2)[1],
            lambda b: b.split(3, dim=1)[0][1:].repeat(1, 2),
            lambda b: b.t().unbind(1)[1].view(2, 3).repeat(1, 2),
            lambda b: b.view(2, 2, 3).unbind(0)[1].reshape(-1),
        ],
        ids=["unbind", "chunk", "split", "unbind of a view", "reshaped"],
    )
    @pytest.mark.parametrize("where", ["bare", "a recomputed region", "a SAVE region"])
    def test_p1_through_one_of_several_views(self, graphs: Graphs, x: Tensor, part: Any, where: str) -> None:
        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("table", torch.linspace(0, 1, 12, dtype=torch.float64).reshape(2, 6))

            def read(self, t: Tensor) -> Tensor:
                return t[: len(self.table)].reshape(-1)[:6] + part(self.table)

            def forward(self, t: Tensor) -> Tensor:
                read = self.read
                if where != "bare":
                    read = remat.region(self.read, "read", recompute=where == "a recomputed region")
                h = torch.sin(read(t))
                self.table.add_(1)
                return h

        plain, module = Module(), Module()
        call = graphs.compile(lambda t: remat.checkpoint(region_name="b")(module)(t))
        for _ in range(2):
            expected, got = plain(x), call(x)
            assert torch.equal(got, expected)
            assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])

    def test_p1_through_a_buffer_beside_regions(self, graphs: Graphs, x: Tensor) -> None:
        """Only what reads the buffer is kept; SAVE regions and the rest of recomputed code are as ever."""
        scale = torch.nn.Buffer(torch.full((6,), 2.0, dtype=torch.float64))

        def body(t: Tensor) -> Tensor:
            t = remat.region(torch.exp, "e", recompute=False)(torch.sin(t) * 0.1)
            t = torch.cos(torch.sigmoid(t) + scale)
            with torch.no_grad():
                scale.mul_(0.5)
            return torch.sin(t)

        def step(t: Tensor) -> Tensor:
            scale.fill_(2.0)
            return body(t)

        inside = graphs.compile(lambda t: remat.checkpoint(region_name="b")(body)(t))

        def compiled(t: Tensor) -> Tensor:
            scale.fill_(2.0)
            return inside(t)

        compare(step, [x], engine=Ready(compiled))
        assert "exp" not in graphs.recomputed
        assert "cos" in names(graphs.backward)

    def test_p3_running_statistics_pin_nothing(self, graphs: Graphs, x: Tensor) -> None:
        """Batch norm in training only writes them."""
        norm = torch.nn.BatchNorm1d(6).double()
        call = graphs.compile(lambda t: remat.checkpoint(region_name="b")(lambda u: F.gelu(norm(u)).sin())(t))
        call(x).sum().backward()
        assert not {"_native_batch_norm_legit_functional"} & set(graphs.kept)
        assert any("batch_norm" in name for name in graphs.recomputed)
        assert all(size < x.numel() * 8 for size in graphs.kept.values()), graphs.kept


def _norm(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return F.batch_norm(t, mean, variance, None, None, True, 0.3)


def _reads_the_mean(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (_norm(t.sin(), mean, variance) + mean).sin()


def _reads_a_view(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (_norm(t.sin(), mean, variance) * variance.view(1, 6)[0:1].expand(6, 6)).sin()


def _norms_twice(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return _norm(_norm(t.sin(), mean, variance).cos() * mean, mean, variance) * mean


def _norm_of_a_changed_bias(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    h = F.batch_norm(t.sin(), variance, variance.clone(), variance.clone(), mean, True).sin()
    mean.add_(1)
    return h


def _outside(h: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (h * mean).sin() * variance.view(1, 6) + F.batch_norm(h, mean, variance)


class TestRunningStatistics:
    """What a batch norm in training writes and later code reads: a second run would write it again."""

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.parametrize("body", [_reads_the_mean, _reads_a_view, _norms_twice, _norm_of_a_changed_bias])
    @pytest.mark.parametrize("where", ["in one checkpoint", "in a second checkpoint", "outside"])
    def test_p1_code_reads_what_forward_read(self, x: Tensor, body: Any, where: str, backend: str) -> None:
        if backend == "inductor" and body is _norm_of_a_changed_bias:
            pytest.skip("torch computes it from the changed bias, with or without checkpoints")

        def model(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
            h = remat.checkpoint(region_name="b")(body)(t, mean, variance)
            if where == "in one checkpoint":
                return h
            if where == "outside":
                return _outside(h, mean, variance)
            return remat.checkpoint(region_name="c")(lambda u: (u + mean).sin())(h)

        results = []
        for call in (model, torch.compile(model, backend=backend)):
            mean, variance = (torch.linspace(low, 2, 6, dtype=torch.float64) for low in (0, 1))
            t = x[:1].detach() * torch.linspace(1, 3, 6, dtype=torch.float64)[:, None]
            t.requires_grad_()
            if call is model:  # eager checkpoints refuse what replay would write twice
                h = body(t, mean, variance)
                later = {"in one checkpoint": h, "in a second checkpoint": (h + mean).sin()}
                output = later[where] if where in later else _outside(h, mean, variance)
            else:
                output = call(t, mean, variance)
            results.append((output.detach(), *torch.autograd.grad((output * output).sum(), t), mean, variance))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    "copied",
    [torch.clone, lambda b: torch.cat([b]), lambda b: b.repeat(1), lambda b: b**1, lambda b: F.pad(b, (0, 0))],
)
@pytest.mark.parametrize("saved", [False, True])
def test_p1_copy_of_a_buffer_that_changes_later(x: Tensor, copied: Any, saved: bool, backend: str) -> None:
    """Inductor takes copies out, and what reads the copy then reads the buffer."""

    def body(t: Tensor, buffer: Tensor) -> Tensor:
        old = remat.region(copied, "copied", recompute=not saved)(buffer)
        buffer.add_(t.detach().mean(0))
        return torch.exp(torch.sin(t) + old)

    call = torch.compile(lambda t, b: remat.checkpoint(region_name="b")(body)(t, b), backend=backend)
    results = []
    for function in (body, call):
        buffer = torch.linspace(0, 1, 6, dtype=torch.float64)
        output = function(x, buffer)
        results.append((output.detach(), *torch.autograd.grad(output.sum(), x), buffer))
    torch.testing.assert_close(results[1], results[0])


def test_p1_save_output_next_to_a_number_that_the_graph_computes(x: Tensor) -> None:
    """Whether such a number is one is nothing that may be asked."""

    def body(t: Tensor, n: Tensor) -> Tensor:
        return torch.tanh(remat.region(torch.exp, "e", recompute=False)(t) * n.sum().item())

    n = torch.tensor([1.0, 2.0])
    (expected,) = torch.autograd.grad(body(x, n).sum(), x)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = torch.compile(lambda t, n: remat.checkpoint(region_name="b")(body)(t, n), fullgraph=True)
        torch.testing.assert_close(torch.autograd.grad(call(x, n).sum(), x)[0], expected)
