"""A graph changes in place a tensor from outside that recomputed code reads: backward has the value of forward."""

from __future__ import annotations

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
