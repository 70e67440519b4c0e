"""P1: same numbers as the same code without checkpointing: operations, policies, views, integers, gradient flow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import compare, grad_weight, plain_backward
from helpers.engine import EagerEngine
from helpers.events import Hidden, under
from torch import Tensor

import torch_remat as remat

WEIGHT = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "relu": torch.relu,
    "softmax": lambda t: torch.softmax(t, -1),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "matmul": lambda t: t @ WEIGHT,
    "cube": lambda t: t * t * t,
    "add": lambda t: t + 1,
    "cumsum": lambda t: t.cumsum(0),
    "sort": lambda t: torch.sort(t, -1).values,
    "max": lambda t: t * torch.max(t, 0).values,
    "where": lambda t: torch.where(t > 0, t, t * 0.1),
    "gather": lambda t: t.gather(1, t.argsort(1)),
    "index": lambda t: t[torch.tensor([3, 0, 0, 2])],
    "mask": lambda t: t.masked_fill(t < 0, 0.5),
    "cat": lambda t: torch.cat([t, t.sin()])[2:6],
    "fft": lambda t: torch.fft.irfft(torch.fft.rfft(t), n=6),
    "dropout in eval": lambda t: F.dropout(t, 0.5, False),
    "clone": lambda t: t.clone(),
    "detach branch": lambda t: t * t.detach().sin(),
    "norm": lambda t: t / t.norm(dim=-1, keepdim=True),
    "sdpa": lambda t: F.scaled_dot_product_attention(t[None, None], t[None, None], t[None, None])[0, 0],
    "conv": lambda t: F.conv1d(t[None], torch.ones(4, 4, 3, dtype=t.dtype) / 3, padding=1)[0],
    "in-place inside": lambda t: t.clone().mul_(2).sin_(),
    "no_grad inside": lambda t: t * no_grad_scale(t),
    "integers inside": lambda t: t * (t.argmax(-1, keepdim=True) + 1),
    "svd": lambda t: torch.linalg.svdvals(t)[:, None] * t,
    "embedding": lambda t: F.embedding(torch.tensor([0, 2, 2, 1]), t),
}


@torch.no_grad()
def no_grad_scale(t: Tensor) -> Tensor:
    """The part of a body that autograd does not see."""
    return t.abs().mean()


class TestP1Operations:
    """Each operation in each position of a short chain, under each policy."""

    @pytest.mark.parametrize("op", OPS)
    def test_p1_every_policy(self, engine: EagerEngine, x: Tensor, op: str) -> None:
        function = OPS[op]
        for letters in itertools.product("SR-", repeat=2):

            def body(t: Tensor, letters: tuple[str, ...] = letters) -> Tensor:
                t = torch.sin(t) if letters[0] != "-" else t
                for index, letter in enumerate(letters):
                    t = under(letter, function, f"r{index}")(t)
                return torch.tanh(t).exp()

            compare(body, [x], engine=engine)

    @pytest.mark.parametrize("policy", ["".join(p) for p in itertools.product("SR-", repeat=3)])
    def test_p1_every_policy_of_a_block(self, engine: EagerEngine, policy: str) -> None:
        """Norm, projection and residual with shared and tied weights, three layers deep."""
        weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

        def layer(t: Tensor, transposed: bool) -> Tensor:
            return F.linear(F.layer_norm(t, (6,)), weight.t() if transposed else weight, bias)

        def body(t: Tensor) -> Tensor:
            for index, letter in enumerate(policy):
                call = under(letter, layer, f"layer{index}")
                t = t + F.gelu(call(t, index == 1))
            return t

        compare(body, [x], params=[weight, bias], engine=engine)

    def test_p1_weights_as_arguments_shared_by_two_checkpoints(self, engine: EagerEngine, x: Tensor) -> None:
        weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
        grads = []
        for wrap in (lambda body: body, engine.checkpoint, engine.checkpoint):

            def first(t: Tensor, w: Tensor) -> Tensor:
                return remat.region(F.linear, "a", recompute=False)(torch.sin(t), w.t()).tanh()

            def second(t: Tensor) -> Tensor:
                return remat.region(F.linear, "a", recompute=True)(torch.sin(t), weight) @ weight

            x.grad = weight.grad = None
            wrap(second)(wrap(first)(x, weight)).sum().backward()
            grads.append((x.grad, weight.grad))
        for got in grads[1:]:
            assert torch.equal(grads[0][0], got[0])
            assert torch.equal(grads[0][1], got[1])

    def test_p1_bare_consumers_need_no_declaration(self, engine: EagerEngine, x: Tensor) -> None:
        """Every way in which bare code can read a SAVE output whose data the region itself does not save."""
        readers: dict[str, Callable[[Tensor], Tensor]] = {
            "op": torch.sin,
            "view": lambda t: t.t()[1:].sin(),
            "cat": lambda t: torch.cat([t, t]).exp(),
            "copy": lambda t: torch.zeros_like(t).copy_(t).sin(),
            "host": lambda t: torch.sin(torch.ones_like(t) * float(t.detach().sum())) * t,
            "branch": lambda t: torch.exp(t * 2 if bool(t.sum() > 0) else t),
            "numpy": lambda t: torch.exp(t * torch.from_numpy(t.detach().numpy() * 2)),
            "tolist": lambda t: torch.exp(t * t.tolist()[0][0]),
            "index": lambda t: t[(t > 0).nonzero()[:, 0]].sin(),
            "float list": lambda t: torch.exp(t * torch.tensor([float(v) for v in t.detach()[0]])),
            "detached": lambda t: (t.detach() * 2).exp() * t,
            "saved by a function": lambda t: SavesItsInput.apply(t),
            "deepcopy": lambda t: torch.exp(t.detach().clone() * t),
        }
        for name, reader in readers.items():

            def body(t: Tensor, reader: Callable[[Tensor], Tensor] = reader, name: str = name) -> Tensor:
                hidden = remat.region(lambda u: u * 3, name, recompute=False)(torch.sin(t))
                return torch.tanh(reader(hidden)).exp()

            compare(body, [x], engine=engine)

    def test_p1_recompute_needs_tensor_is_accepted_anywhere(self, engine: EagerEngine, x: Tensor) -> None:
        remat.recompute_needs_tensor()
        remat.recompute_needs_tensor(x)

        def body(t: Tensor) -> Tensor:
            hidden = remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t))
            remat.recompute_needs_tensor(hidden, t, hidden[1:])
            output = torch.exp(hidden)
            remat.recompute_needs_tensor(hidden)
            return output

        compare(body, [x], engine=engine)
        with pytest.raises(RuntimeError, match="expects Tensor arguments"):
            remat.recompute_needs_tensor(None)  # type: ignore[arg-type]

    def test_p1_one_body_that_takes_different_ways(self, engine: EagerEngine, x: Tensor) -> None:
        """What was learned from one call must not be trusted for another call that reads more."""
        state = Hidden({"reads": 0})

        def body(t: Tensor) -> Tensor:
            a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            b = remat.region(F.silu, "b", recompute=False)(a + 1)
            if state["reads"] == 0:
                return a + b
            if state["reads"] == 1:
                return torch.exp(a) + b
            if state["reads"] == 2:
                return torch.exp(b) * torch.sin(a)
            return torch.exp(remat.region(torch.sin, "c", recompute=True)(b)) * a

        for reads in [0, 1, 2, 3, 1, 0, 3, 2]:
            state["reads"] = reads
            compare(body, [x], engine=engine, calls=1)

    def test_p1_one_code_object_many_functions(self, engine: EagerEngine, x: Tensor) -> None:
        """The operations come from a closure: same code, same names, another graph each time."""

        def make(ops: list[Callable[[Tensor], Tensor]], policy: str) -> Callable[[Tensor], Tensor]:
            def body(t: Tensor) -> Tensor:
                for index, (function, letter) in enumerate(zip(ops, policy, strict=True)):
                    t = under(letter, function, f"r{index}")(t)
                return t

            return body

        functions = [torch.sin, torch.exp, lambda t: t * 2, F.gelu, lambda t: t.t().clone().t()]
        for policy in ("S-S-", "SSSS", "-S-S", "RS-S"):
            for ops in itertools.product(functions, repeat=2):
                compare(make([*ops, *ops], policy), [x], engine=engine, calls=1)

    def test_p1_shapes_that_change_from_call_to_call(self, engine: EagerEngine) -> None:
        def body(t: Tensor) -> Tensor:
            a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            b, c = remat.region(lambda u: (u[: len(u) // 2], u[len(u) // 2 :]), "split", recompute=False)(a)
            return torch.cat([torch.exp(c), torch.tanh(b)])

        for rows in (4, 7, 1, 4, 0, 6):
            x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
            compare(body, [x], engine=engine, calls=2)

    def test_p1_training_flag_changes_the_graph(self, engine: EagerEngine, x: Tensor) -> None:
        layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.GELU()).double()

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(lambda u: layer(u), "layer", recompute=False)(torch.sin(t)))

        for training in (False, True, False):
            layer.train(training)
            compare(body, [x], params=list(layer.parameters()), engine=engine, backward=plain_backward)

    def test_p1_some_inputs_need_no_grad(self, engine: EagerEngine, x: Tensor) -> None:
        y = torch.randn(4, 6, dtype=torch.float64)
        weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

        def body(t: Tensor, u: Tensor, w: Tensor) -> Tensor:
            hidden = remat.region(F.linear, "linear", recompute=False)(torch.sin(u), w)
            return torch.exp(hidden) * remat.region(torch.exp, "exp", recompute=True)(t)

        for inputs in itertools.product((x, x.detach()), (y, y.clone().requires_grad_()), (weight, weight.detach())):
            compare(body, list(inputs), engine=engine)

    def test_p1_closed_over_input_alone_requires_grad(self, engine: EagerEngine) -> None:
        weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(lambda u: F.gelu(u @ weight), "gelu", recompute=False)(torch.sin(t)))

        compare(body, [torch.randn(4, 6, dtype=torch.float64)], params=[weight], engine=engine)

    def test_p1_closed_over_intermediates(self, engine: EagerEngine, x: Tensor) -> None:
        """Regions that read values through closures, not arguments."""

        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            a = remat.region(lambda: F.gelu(hidden) * hidden, "a", recompute=False)()
            b = remat.region(lambda: torch.exp(a) + hidden, "b", recompute=True)()
            return remat.region(lambda: torch.tanh(b * a), "c", recompute=False)().exp()

        compare(body, [x], engine=engine)

    def test_p1_region_called_by_position_then_by_keyword(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            call = remat.region(F.linear, "linear", recompute=False)
            hidden, weight = torch.sin(t), torch.tanh(t)
            return torch.exp(call(input=hidden, weight=weight) if remat.is_recomputing() else call(hidden, weight))

        compare(body, [x], engine=engine)

    def test_p1_stack_of_blocks(self, engine: EagerEngine, x: Tensor) -> None:
        weights = [torch.randn(6, 6, dtype=torch.float64, requires_grad=True) for _ in range(4)]

        def model(wrap: Callable[[Any], Any], t: Tensor) -> Tensor:
            for weight in weights:

                def block(u: Tensor, weight: Tensor = weight) -> Tensor:
                    hidden = remat.region(F.linear, "linear", recompute=False)(F.layer_norm(u, (6,)), weight)
                    return u + F.gelu(hidden)

                t = wrap(block)(t)
            return t

        results = []
        for wrap in (lambda body: body, engine.checkpoint, engine.checkpoint):
            x.grad = None
            for weight in weights:
                weight.grad = None
            output = model(wrap, x)
            engine.backward([output], [grad_weight(output)])
            results.append([output.detach(), x.grad, *(weight.grad for weight in weights)])
        for got in results[1:]:
            assert all(torch.equal(left, right) for left, right in zip(results[0], got, strict=True))


class SavesItsInput(torch.autograd.Function):
    """A custom function whose kernel the dispatcher does not see: numpy does the work."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """Sine by numpy."""
        ctx.save_for_backward(t)
        import numpy as np

        return torch.from_numpy(np.sin(t.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Cosine."""
        return grad * ctx.saved_tensors[0].cos()


class TestP1Views:
    """Views, slices, dtype views, conjugate and negative views of recomputed inputs: rebuilt exactly or kept."""

    VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
        "t": lambda t: t.t(),
        "row": lambda t: t[1],
        "slice": lambda t: t[1:3, ::2],
        "reshape": lambda t: t.reshape(-1),
        "expand": lambda t: t[:1].expand(4, 6),
        "unfold": lambda t: t.unfold(0, 2, 1),
        "flip": lambda t: t.flip(0),
        "diagonal": lambda t: t.diagonal(),
        "as_strided": lambda t: t.as_strided((3, 3), (1, 2), 2),
        "squeeze": lambda t: t[:, None].squeeze(1),
        "select view view": lambda t: t.view(2, 12)[1].view(3, 4)[:, 1],
        "chunk": lambda t: t.chunk(3, 1)[1],
        "permute": lambda t: t.view(2, 2, 6).permute(2, 0, 1),
        "empty": lambda t: t[:0],
        "alias": lambda t: t.view_as(t),
        "detach": lambda t: t.detach() * t,
        "split_with_sizes": lambda t: t.split([1, 3])[1],
        "movedim": lambda t: t.movedim(0, 1),
    }

    @pytest.mark.parametrize("view", VIEWS)
    def test_p1_region_saves_a_view_of_its_input(self, engine: EagerEngine, x: Tensor, view: str) -> None:
        take = self.VIEWS[view]

        def body(t: Tensor) -> Tensor:
            hidden = torch.exp(torch.sin(t))
            a = remat.region(lambda u: torch.sin(take(u)) * take(u), "a", recompute=False)(hidden)
            b = remat.region(lambda u: torch.sin(take(u)), "b", recompute=True)(hidden)
            return torch.exp(a) * b

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("recompute", [True, False])
    def test_p1_region_returns_a_view_of_its_input(
        self, engine: EagerEngine, x: Tensor, view: str, recompute: bool
    ) -> None:
        take = self.VIEWS[view]

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.exp(torch.sin(t))
            part = remat.region(take, "view", recompute=recompute)(hidden)
            saved = remat.region(F.gelu, "gelu", recompute=False)(hidden)
            return torch.exp(part.sin()), torch.sin(saved)

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("view", VIEWS)
    def test_p1_view_between_two_regions(self, engine: EagerEngine, x: Tensor, view: str) -> None:
        take = self.VIEWS[view]

        def body(t: Tensor) -> Tensor:
            hidden = remat.region(lambda u: u * 2, "a", recompute=False)(torch.sin(t))
            b = remat.region(torch.sin, "b", recompute=False)(take(hidden))
            c = remat.region(torch.sin, "c", recompute=True)(take(hidden))
            return torch.exp(b) * torch.tanh(c).exp()

        compare(body, [x], engine=engine)

    COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
        "conj": lambda c: c.conj(),
        "conj twice": lambda c: c.conj().conj(),
        "neg": lambda c: c.conj().imag,
        "imag": lambda c: c.imag,
        "real": lambda c: c.real,
        "view_as_real": lambda c: torch.view_as_real(c),
        "conj slice": lambda c: c.conj()[1:, ::2],
        "conj t": lambda c: c.mH,
        "resolved": lambda c: c.conj().resolve_conj(),
        "physical": lambda c: torch.conj_physical(c),
    }

    @pytest.mark.parametrize("view", COMPLEX)
    @pytest.mark.parametrize("form", ["saves", "returns", "argument", "between", "output"])
    def test_p1_conjugate_and_negative_views(self, engine: EagerEngine, view: str, form: str) -> None:
        take = self.COMPLEX[view]
        x = torch.randn(4, 6, dtype=torch.complex128, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            if form == "saves":
                return remat.region(lambda u: take(u) * take(u), "r", recompute=False)(hidden).exp()
            if form == "returns":
                return remat.region(take, "r", recompute=False)(hidden).exp() * 2
            if form == "argument":
                return remat.region(lambda u: u * u.sin(), "r", recompute=False)(take(hidden)).exp()
            if form == "between":
                made = remat.region(lambda u: u * 2, "p", recompute=False)(hidden)
                return remat.region(lambda u: u * u, "r", recompute=False)(take(made)).exp() * take(made)
            return take(remat.region(lambda u: u * u, "r", recompute=False)(hidden))

        compare(body, [x], engine=engine)

    def test_p1_dtype_views(self, engine: EagerEngine) -> None:
        """The bits of a float tensor read as integers, and complex numbers read as pairs."""

        def bits(t: Tensor) -> Tensor:
            return t * (t.detach().view(torch.int64) & 1).to(t.dtype)

        def pairs(t: Tensor) -> Tensor:
            return torch.view_as_complex(t.view(4, 3, 2)).exp()

        for function in (bits, pairs):
            for recompute in (True, False):

                def body(
                    t: Tensor, function: Callable[[Tensor], Tensor] = function, recompute: bool = recompute
                ) -> Tensor:
                    hidden = torch.sin(t)
                    made = remat.region(lambda u: u * 3, "made", recompute=False)(hidden)
                    a = remat.region(function, "a", recompute=recompute)(hidden)
                    b = remat.region(function, "b", recompute=recompute)(made)
                    return torch.abs(a * b).exp()

                compare(body, [torch.randn(4, 6, dtype=torch.float64, requires_grad=True)], engine=engine)

    def test_p1_integer_view_as_region_output(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            bits = remat.region(lambda u: u.detach().view(torch.int64), "bits", recompute=False)(hidden)
            return torch.exp(hidden * (bits & 1))

        compare(body, [x], engine=engine)

    def test_p1_overlapping_and_non_contiguous_inputs(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t).t()[::2]
            wide = hidden[:, :1].expand(3, 5)
            a = remat.region(lambda u, v: torch.sin(u) @ torch.exp(v), "a", recompute=False)(hidden.t(), wide)
            return remat.region(lambda u: u * u[:, 1:2], "b", recompute=False)(a).exp()

        compare(body, [x], engine=engine)

    def test_p1_two_arguments_share_storage(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            first, second = hidden[:2], hidden[1:3]
            product = remat.region(lambda u, v: u * v * torch.sin(v), "product", recompute=False)(first, second)
            quotient = remat.region(lambda u, v: u / (2 + v * v), "quotient", recompute=False)(second, first)
            return torch.exp(product) * quotient

        compare(body, [x], engine=engine)
