"""P3: nothing is kept that replay can make, measured as storages alive after forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker
from helpers.compare import compare, grad_weight
from helpers.engine import EagerEngine
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat

# Policy of A, B, C: what must be alive after forward, of the outputs y, z of A, B and the internals p, q, r of A, B, C.
KEPT = {
    "SSS": "pqr",
    "SSR": "zpq",
    "SS-": "zpq",
    "SRS": "ypr",
    "S-S": "ypr",
    "SRR": "yp",
    "S--": "yp",
    "RSS": "qr",
    "-SS": "qr",
    "RSR": "zq",
    "-S-": "zq",
    "RRS": "r",
    "RRR": "",
    "---": "",
}


def kept_after_forward(call: Callable[..., Any], *inputs: Any, ignore: tuple[Tensor, ...] = ()) -> tuple[int, Any]:
    """Bytes alive after one forward besides inputs, parameters and outputs; the output is returned to stay alive."""
    tracker = StorageTracker()
    tracker.ignore(*ignore)
    with tracker:
        output = call(*inputs)
    return tracker.alive_bytes(without=output), output


class TestP3KeptBytes:
    """The table of three chained regions, then blocks whose sums are derived from shapes."""

    @pytest.mark.parametrize("policy", sorted(KEPT))
    def test_p3_table_of_chains(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        refs: dict[str, StorageWeakRef] = {}

        def marked(output_name: str, internal_name: str) -> Callable[[Tensor], Tensor]:
            class Marked(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, t: Tensor) -> Tensor:
                    internal, output = t.cos(), t.sin()
                    if not remat.is_recomputing():
                        refs[internal_name] = StorageWeakRef(internal.untyped_storage())
                        refs[output_name] = StorageWeakRef(output.untyped_storage())
                    ctx.save_for_backward(internal)
                    return output

                @staticmethod
                def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                    return grad * ctx.saved_tensors[0]

            return Marked.apply

        ops = [marked("y", "p"), marked("z", "q"), marked("out", "r")]

        def body(t: Tensor) -> Tensor:
            for name, letter, function in zip("ABC", policy, ops, strict=True):
                t = function(t) if letter == "-" else remat.region(function, name, recompute=letter == "R")(t)
            return t

        compare(body, [x], engine=engine)
        for _ in range(2):
            output = engine.checkpoint(body)(x)
            alive = {name for name, ref in refs.items() if not ref.expired()} - {"out"}
            assert alive == set(KEPT[policy])
            engine.backward([output.sum()])
            assert {name for name, ref in refs.items() if not ref.expired()} <= {"out"}

    def test_p3_trailing_linear_and_residual_are_not_kept(self, engine: EagerEngine) -> None:
        """A SAVE linear whose value only feeds the residual add keeps nothing but what its backward needs."""
        weight = torch.randn(16, 16, requires_grad=True)
        x = torch.randn(8, 16, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            return t + remat.region(F.linear, "out", recompute=False)(torch.tanh(t), weight)

        compare(body, [x], params=[weight], engine=engine)
        call = engine.checkpoint(body)
        for _ in range(2):
            kept, output = kept_after_forward(call, x)
            assert kept == 0  # the linear's input is tanh(t): rebuilt; its output is added and forgotten
            engine.backward([output.sum()])

    @pytest.mark.parametrize("op", [F.gelu, torch.sin, F.silu, torch.sqrt])
    def test_p3_save_input_that_replay_rebuilds_is_dropped(
        self, engine: EagerEngine, op: Callable[[Tensor], Tensor]
    ) -> None:
        x = torch.rand(8, 16, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            return torch.exp(t + 1) if op is torch.sqrt else remat.region(op, "op", recompute=False)(torch.exp(t))

        compare(body, [x], engine=engine)
        _, _ = kept_after_forward(engine.checkpoint(body), x)
        kept, _output = kept_after_forward(engine.checkpoint(body), x)
        assert kept == 0

    def test_p3_nothing_kept_without_grad(self, engine: EagerEngine, x: Tensor) -> None:
        runs: list[int] = []

        def body(t: Tensor) -> Tensor:
            runs.append(1)
            hidden = remat.region(torch.exp, "exp", recompute=False)(torch.sin(t))
            return remat.region(torch.tanh, "tanh", recompute=True)(hidden)

        call = engine.checkpoint(body)
        for _ in range(2):
            with torch.no_grad():
                kept, output = kept_after_forward(call, x)
            assert (kept, output.grad_fn) == (0, None)
            with torch.inference_mode():
                kept, output = kept_after_forward(call, x)
            assert kept == 0
            kept, output = kept_after_forward(call, x.detach())
            assert (kept, output.grad_fn) == (0, None)
        assert len(runs) == 6

    def test_p3_two_views_of_one_storage_are_kept_once(self, engine: EagerEngine) -> None:
        weight = torch.randn(128, 16, requires_grad=True)
        x = torch.randn(8, 16, requires_grad=True)

        def gate_up(t: Tensor) -> tuple[Tensor, Tensor]:
            fused = F.linear(t, weight)
            return fused[:, :64], fused[:, 64:]

        def body(t: Tensor) -> Tensor:
            gate, up = remat.region(gate_up, "gate_up", recompute=False)(torch.tanh(t))
            return F.silu(gate) * up

        compare(body, [x], params=[weight], engine=engine)
        call = engine.checkpoint(body)
        for _ in range(2):
            kept, output = kept_after_forward(call, x)
            assert kept == 8 * 128 * 4
            engine.backward([output.sum()])

    def test_p3_value_read_only_by_the_code_after_the_last_need(self, engine: EagerEngine) -> None:
        """Three reads of one SAVE output by code that backward does not need: nothing of it is kept."""
        x = torch.randn(8, 16, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            linear = remat.region(lambda u: u * 3, "triple", recompute=False)(torch.sin(t))
            return (linear + t) * 0.5 - linear

        compare(body, [x], engine=engine)
        call = engine.checkpoint(body)
        for _ in range(2):
            kept, output = kept_after_forward(call, x)
            assert kept == 0
            engine.backward([output.sum()])

    def test_p3_llama_block_sum_on_paper(self, engine: EagerEngine) -> None:
        """RMSNorm, attention with SDPA, SwiGLU; attention core, wo, w1, w3, w2 saved."""
        batch, seq, dim, heads, hidden = 2, 8, 16, 2, 48
        block, params = llama_block(dim, heads, hidden)
        x = torch.randn(batch, seq, dim, requires_grad=True)

        compare(block, [x], params=params, engine=engine)
        call = engine.checkpoint(block)
        token_bytes = batch * seq * 4
        core = token_bytes * dim + batch * heads * seq * 4  # output, and the log-sum-exp row per head
        projections = token_bytes * (dim + hidden + hidden)  # wo, w1, w3 outputs; w2's output is only added
        for _ in range(2):
            kept, output = kept_after_forward(call, x, ignore=tuple(params))
            assert kept == core + projections + flash_extra(batch, heads, seq, dim)
            engine.backward([output], [grad_weight(output)])


def flash_extra(batch: int, heads: int, seq: int, dim: int) -> int:
    """Bytes that this build's SDPA keeps besides its output, its inputs and the log-sum-exp: measured without us."""
    q, k, v = (torch.randn(batch, heads, seq, dim // heads, requires_grad=True) for _ in range(3))
    tracker = StorageTracker()
    tracker.ignore(q, k, v)
    with tracker:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return tracker.alive_bytes(without=output) - batch * heads * seq * 4


def llama_block(dim: int, heads: int, hidden: int) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """A Llama block with five SAVE regions, and its parameters."""
    shapes = [
        (dim,),
        (dim, dim),
        (dim, dim),
        (dim, dim),
        (dim, dim),
        (dim,),
        (hidden, dim),
        (hidden, dim),
        (dim, hidden),
    ]
    params = [(torch.randn(shape) * 0.3).requires_grad_() for shape in shapes]
    norm1, wq, wk, wv, wo, norm2, w1, w3, w2 = params

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def body(x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        h = F.rms_norm(x, (dim,), norm1)
        q, k, v = (F.linear(h, w).view(batch, seq, heads, -1).transpose(1, 2) for w in (wq, wk, wv))
        core = remat.region(attention, "attention", recompute=False)(q, k, v)
        core = core.transpose(1, 2).reshape(batch, seq, dim)
        x = x + remat.region(F.linear, "wo", recompute=False)(core, wo)
        h = F.rms_norm(x, (dim,), norm2)
        gate = remat.region(F.linear, "w1", recompute=False)(h, w1)
        up = remat.region(F.linear, "w3", recompute=False)(h, w3)
        return x + remat.region(F.linear, "w2", recompute=False)(F.silu(gate) * up, w2)

    return body, params
