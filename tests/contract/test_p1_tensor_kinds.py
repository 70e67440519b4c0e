"""P1 and P8 for every kind of tensor: wrapper subclasses, DTensor, jagged, sparse, meta, fake, inference, complex."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.alive import StorageTracker
from helpers.compare import compare, grad_weight, run_once
from helpers.engine import EagerEngine
from helpers.events import under
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

import torch_remat as remat

POLICIES = ["-", "S", "R", "SR", "RS", "S-", "-S-", "SS", "SRS"]


def unary_chain(policy: str, op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``op`` repeated under ``policy``, with a bare sine before and an exponential after."""

    def body(t: Any) -> Any:
        t = torch.sin(t)
        for index, letter in enumerate(policy):
            t = under(letter, op, f"r{index}")(t)
        return torch.exp(t * 0.5)

    return body


class TestP1WrapperSubclass:
    """A two-plane wrapper subclass through checkpoints and regions."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_two_tensor(self, engine: EagerEngine, policy: str) -> None:
        body = unary_chain(policy, lambda t: torch.sin(t * 2))
        grads = []
        for wrap in (lambda function: function, engine.checkpoint, engine.checkpoint):
            parts = [torch.linspace(start, 1, 24).reshape(4, 6).double() for start in (-1, 0)]
            leaf = TwoTensor(*parts).requires_grad_()
            output = wrap(body)(leaf)
            assert isinstance(output, TwoTensor)
            output.sum().backward()
            assert isinstance(leaf.grad, TwoTensor)
            grads.append((leaf.grad.a, leaf.grad.b, output.a, output.b))
        for got in grads[1:]:
            assert all(torch.equal(left, right) for left, right in zip(grads[0], got, strict=True))

    def test_p1_two_tensor_placeholder_keeps_the_subclass(self, engine: EagerEngine) -> None:
        seen: list[tuple[bool, type, torch.Size, bool]] = []

        def body(t: Any) -> Any:
            made = remat.region(lambda u: u * 2, "made", recompute=False)(torch.sin(t))
            seen.append((remat.is_recomputing(), type(made), made.shape, remat.is_placeholder(made)))
            return torch.exp(torch.sin(t)) + made

        leaf = TwoTensor(torch.randn(4, 6), torch.randn(4, 6)).requires_grad_()
        for _ in range(2):
            seen.clear()
            engine.checkpoint(body)(leaf).sum().backward()
            assert seen[0] == (False, TwoTensor, torch.Size([4, 6]), False)
            assert seen[1] == (True, TwoTensor, torch.Size([4, 6]), True)

    def test_p1_two_tensor_input_of_save_region_is_dropped(self, engine: EagerEngine) -> None:
        """The region saves a recomputed activation: rebuilt, not kept, subclass or not."""

        def body(t: Any) -> Any:
            return remat.region(torch.sin, "sin", recompute=False)(torch.exp(t))

        leaf = TwoTensor(torch.randn(4, 6), torch.randn(4, 6)).requires_grad_()
        call = engine.checkpoint(body)
        for step in range(3):
            tracker = StorageTracker()
            with tracker:
                output = call(leaf)
            if step:
                assert tracker.alive_bytes(without=(output, output.a, output.b)) == 0
            output.sum().backward()


@pytest.fixture
def one_rank(tmp_path: Any) -> Any:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Named(Tensor):
    """A subclass that adds nothing."""


class TestP1ChangedBySaveRegions:
    """What a SAVE region leaves in its argument is what replay finds there, whatever kind of tensor that is."""

    KINDS = ("plain", "dtensor", "two tensors", "jagged", "meta")

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_p1_an_argument(self, engine: EagerEngine, one_rank: Any, kind: str, times: int) -> None:
        ones = torch.linspace(0.1, 1, 4, dtype=torch.float64)
        make: dict[str, Callable[[], Tensor]] = {
            "plain": ones.clone,
            "dtensor": lambda: DTensor.from_local(ones.clone(), one_rank, [Replicate()]),
            "two tensors": lambda: TwoTensor(ones.clone(), ones.clone()),
            "jagged": lambda: torch.nested.nested_tensor([ones[:1], ones[1:]], layout=torch.jagged),
            "meta": lambda: torch.empty(4, device="meta"),
        }

        def body(t: Tensor) -> Tensor:
            h = t * 3
            for index in range(times):
                remat.region(lambda u: u.mul_(0.5), f"half{index}", recompute=False)(h)
            return torch.exp(h)

        def gradient(wrap: Callable[..., Any]) -> list[Tensor]:
            leaf = make[kind]().detach().requires_grad_()
            output = wrap(body)(leaf)
            (output.values() if kind == "jagged" else output).sum().backward()
            assert leaf.grad is not None
            if kind == "dtensor":
                return [leaf.grad.to_local()]  # type: ignore[attr-defined]
            if kind == "two tensors":
                return [leaf.grad.a, leaf.grad.b]  # type: ignore[attr-defined]
            return [leaf.grad.values() if kind == "jagged" else leaf.grad]

        expected = gradient(lambda function: function)
        for _ in range(3):
            found = gradient(engine.checkpoint)
            if kind != "meta":
                assert all(map(torch.equal, found, expected))

    @pytest.mark.parametrize("part", [lambda t: t, lambda t: t[1:]], ids=["whole", "part"])
    @pytest.mark.parametrize("kind", [Tensor, Named])
    def test_p1_an_output_of_a_plain_subclass(self, kind: type[Tensor], part: Callable[[Tensor], Tensor]) -> None:
        """AOTAutograd takes none, with or without checkpoints: eager code only."""

        def body(t: Tensor) -> Tensor:
            h = remat.region(lambda u: u * 3, "make", recompute=False)(t)
            part(h).mul_(0.5)
            remat.region(lambda u: u.mul_(0.5), "half", recompute=False)(h)
            return torch.exp(h)

        def gradient(wrap: Callable[..., Any]) -> Tensor:
            leaf = torch.linspace(0.1, 1, 4).as_subclass(kind).requires_grad_()
            return torch.autograd.grad(wrap(body)(leaf).sum(), leaf)[0]

        expected = gradient(lambda function: function)
        for _ in range(3):
            assert torch.equal(gradient(remat.checkpoint()), expected)


class TestP1DTensor:
    """DTensor on one rank: types and placements as in eager, inputs dropped."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_dtensor(self, engine: EagerEngine, one_rank: Any, policy: str) -> None:
        local = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
        weight_local = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6)
        results = []
        for wrap in (lambda function: function, engine.checkpoint, engine.checkpoint):
            leaf = DTensor.from_local(local.clone(), one_rank, [Shard(0)]).requires_grad_()
            weight = DTensor.from_local(weight_local.clone(), one_rank, [Replicate()]).requires_grad_()
            body = unary_chain(policy, lambda t, weight=weight: F.gelu(F.linear(t, weight)))
            output = wrap(body)(leaf)
            assert isinstance(output, DTensor)
            output.sum().backward()
            assert isinstance(leaf.grad, DTensor)
            results.append(
                (
                    output.placements,
                    leaf.grad.placements,
                    [t.to_local() for t in (output, leaf.grad, weight.grad)],
                )
            )
        for got in results[1:]:
            assert got[:2] == results[0][:2]
            assert all(torch.equal(left, right) for left, right in zip(results[0][2], got[2], strict=True))

    def test_p1_dtensor_placeholder_keeps_placements(self, engine: EagerEngine, one_rank: Any) -> None:
        seen: list[tuple[type, Any, torch.Size, bool]] = []

        def body(t: Any) -> Any:
            made = remat.region(lambda u: u * 2, "made", recompute=False)(torch.sin(t))
            seen.append((type(made), made.placements, made.shape, remat.is_placeholder(made)))
            return torch.exp(torch.sin(t)) + made

        leaf = DTensor.from_local(torch.randn(4, 6), one_rank, [Shard(0)]).requires_grad_()
        for _ in range(2):
            seen.clear()
            engine.checkpoint(body)(leaf).sum().backward()
            assert seen == [
                (DTensor, (Shard(0),), torch.Size([4, 6]), False),
                (DTensor, (Shard(0),), torch.Size([4, 6]), True),
            ]

    def test_p1_dtensor_redistribute_in_save_region(self, engine: EagerEngine, one_rank: Any) -> None:
        local = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)

        def body(t: Any) -> Any:
            partial = DTensor.from_local((t * 2).to_local(), one_rank, [Partial()])
            full = remat.region(lambda u: u.redistribute(placements=[Replicate()]), "reduce", recompute=False)(partial)
            return torch.exp(torch.sin(full.to_local()))

        results = []
        for wrap in (lambda function: function, engine.checkpoint, engine.checkpoint):
            leaf = DTensor.from_local(local.clone(), one_rank, [Shard(0)]).requires_grad_()
            output = wrap(body)(leaf)
            output.sum().backward()
            results.append((output.detach(), leaf.grad.to_local()))
        for got in results[1:]:
            assert all(torch.equal(left, right) for left, right in zip(results[0], got, strict=True))


class TestP1OtherKinds:
    """Jagged, sparse, meta, fake, inference, complex, half, quantized-like integer, zero-size and zero-dim tensors."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_jagged(self, engine: EagerEngine, policy: str) -> None:
        values = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 4, 1)]
        body = unary_chain(policy, lambda t: F.gelu(t) * 2)
        results = []
        for wrap in (lambda function: function, engine.checkpoint, engine.checkpoint):
            leaves = [value.clone().requires_grad_() for value in values]
            nested = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
            output = wrap(body)(nested)
            assert output.is_nested
            assert output.layout == torch.jagged
            output.values().sum().backward()
            results.append([output.values().detach(), *(leaf.grad for leaf in leaves)])
        for got in results[1:]:
            assert all(torch.equal(left, right) for left, right in zip(results[0], got, strict=True))

    @pytest.mark.parametrize("policy", ["-", "S", "R", "SR", "S-", "-S-"])
    def test_p1_sparse(self, engine: EagerEngine, policy: str) -> None:
        """A sparse adjacency goes into regions as an argument; a region returns a sparse tensor."""
        dense = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        adjacency = torch.eye(4, dtype=torch.float64).to_sparse()

        def spread(t: Tensor, a: Tensor) -> Tensor:
            return torch.sparse.mm(a, t)

        def body(t: Tensor, a: Tensor) -> Tensor:
            t = torch.sin(t)
            for index, letter in enumerate(policy):
                call = under(letter, spread, f"{index}")
                t = call(t, a)
            return torch.exp(t)

        compare(body, [dense, adjacency], engine=engine)

    @pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
    @pytest.mark.parametrize("layout", ["coo", "csr"])
    @pytest.mark.parametrize("recompute", [True, False])
    def test_p1_sparse_output(self, engine: EagerEngine, layout: str, recompute: bool) -> None:
        adjacency = torch.eye(4, dtype=torch.float64)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

        def make() -> Tensor:
            return adjacency.to_sparse() if layout == "coo" else adjacency.to_sparse_csr()

        def body(t: Tensor) -> Tensor:
            matrix = remat.region(make, "make", recompute=recompute)()
            return torch.exp(matrix @ torch.sin(t))

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_meta(self, engine: EagerEngine, policy: str) -> None:
        x = torch.randn(4, 6, device="meta", requires_grad=True)
        compare(unary_chain(policy, lambda t: F.gelu(t) @ t.t() @ t), [x], engine=engine)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_fake(self, engine: EagerEngine, policy: str) -> None:
        body = unary_chain(policy, lambda t: F.gelu(t) @ t.t() @ t)
        with FakeTensorMode():
            for _ in range(3):
                x = torch.randn(4, 6, requires_grad=True)
                output = engine.checkpoint(body)(x)
                assert output.shape == (4, 6)
                output.sum().backward()
                assert x.grad is not None
                assert x.grad.shape == (4, 6)

    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_fake_and_real_calls_of_one_body_in_turn(self, engine: EagerEngine, policy: str) -> None:
        """A body first traced with fake tensors (shape inference) is then trained with real ones."""
        body = unary_chain(policy, lambda t: F.gelu(t) @ t.t() @ t)
        with FakeTensorMode():
            engine.checkpoint(body)(torch.randn(4, 6, requires_grad=True)).sum().backward()
        compare(body, [torch.randn(4, 6, dtype=torch.float64, requires_grad=True)], engine=engine)
        compare(body, [torch.randn(4, 6, device="meta", requires_grad=True)], engine=engine, calls=1)
        compare(body, [torch.randn(4, 6, dtype=torch.float64, requires_grad=True)], engine=engine)

    @pytest.mark.parametrize("recompute", [True, False])
    def test_p1_inference_tensor_as_argument(self, engine: EagerEngine, x: Tensor, recompute: bool) -> None:
        with torch.inference_mode():
            table = torch.linspace(0, 1, 24, dtype=torch.float64).reshape(4, 6)

        def body(t: Tensor, rope: Tensor) -> Tensor:
            return torch.exp(remat.region(lambda u, v: u.sin() + v, "add", recompute=recompute)(torch.sin(t), rope))

        expected = run_once(lambda t: body(t, table), [x])
        for _ in range(3):
            leaf = x.detach().clone().requires_grad_()
            output = engine.checkpoint(body)(leaf, table)
            engine.backward([output], [grad_weight(output)])
            assert torch.equal(expected.outputs.detach(), output.detach())
            assert torch.equal(expected.input_grads[0], leaf.grad)

    def test_p1_region_that_makes_an_inference_tensor(self, engine: EagerEngine, x: Tensor) -> None:
        def table(t: Tensor) -> Tensor:
            with torch.inference_mode():
                return torch.linspace(0, 1, 24, dtype=torch.float64).reshape(4, 6)

        def body(t: Tensor) -> Tensor:
            hidden = torch.sin(t)
            return torch.exp(hidden + remat.region(table, "table", recompute=False)(hidden))

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.bfloat16, torch.float16, torch.float32])
    def test_p1_dtypes(self, engine: EagerEngine, policy: str, dtype: torch.dtype) -> None:
        x = torch.randn(4, 6).to(dtype).requires_grad_()
        compare(unary_chain(policy, lambda t: torch.tanh(t) * t), [x], engine=engine)

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (1, 1, 1)])
    @pytest.mark.parametrize("policy", POLICIES)
    def test_p1_odd_shapes(self, engine: EagerEngine, policy: str, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        compare(unary_chain(policy, lambda t: torch.tanh(t) * t), [x], engine=engine)

    def test_p1_channels_last_strides_survive(self, engine: EagerEngine) -> None:
        x = torch.randn(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
        seen: list[tuple[int, ...]] = []

        def body(t: Tensor) -> Tensor:
            made = remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t))
            seen.append(made.stride())
            return torch.exp(torch.sin(made.transpose(1, 2)))

        compare(body, [x], engine=engine)
        assert len(set(seen)) == 1

    def test_p1_tensor_attributes_and_parameters(self, engine: EagerEngine, x: Tensor) -> None:
        """A Parameter stays a Parameter for the region that gets it."""
        weight = torch.nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
        types: list[type] = []

        def project(t: Tensor, w: Tensor) -> Tensor:
            types.append(type(w))
            return F.linear(t, w)

        def body(t: Tensor, w: Tensor) -> Tensor:
            a = remat.region(project, "a", recompute=False)(torch.sin(t), w)
            return torch.exp(remat.region(project, "b", recompute=True)(a, w))

        output = engine.checkpoint(body)(x, weight)
        engine.backward([output.sum()])
        assert set(types) == {torch.nn.Parameter}


class TestIsPlaceholder:
    """``is_placeholder`` and what may be done with a placeholder."""

    def _in_replay(self, engine: EagerEngine, look: Callable[[Tensor], Any]) -> Any:
        """``look`` at the placeholder of a SAVE output that nobody reads."""
        looked: list[Any] = []

        def body(t: Tensor) -> Tensor:
            base = torch.sin(t)
            made = remat.region(lambda u: (u * 2)[1:, ::2], "made", recompute=False)(base)
            if remat.is_recomputing():
                looked.append(look(made))
            return torch.exp(base)

        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        engine.backward([engine.checkpoint(body)(x).sum()])
        assert len(looked) == 1
        return looked[0]

    def test_placeholder_metadata(self, engine: EagerEngine) -> None:
        def look(t: Tensor) -> Any:
            return (
                remat.is_placeholder(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device.type,
                t.requires_grad, t.is_leaf, len(t), t.is_contiguous(),
            )  # fmt: skip

        got = self._in_replay(engine, look)
        assert got == (True, (3, 3), (6, 2), 6, torch.float64, "cpu", True, False, 3, False)

    @pytest.mark.parametrize(
        "view",
        [
            lambda t: t.t(), lambda t: t[1:], lambda t: t.view(3, 3, 1), lambda t: t.expand(2, 3, 3),
            lambda t: t.unsqueeze(0), lambda t: t.chunk(3)[0], lambda t: t.detach(), lambda t: t.to(t.dtype),
            lambda t: t.as_strided((2,), (1,)), lambda t: t.type_as(t), lambda t: t[0],
        ],
    )  # fmt: skip
    def test_placeholder_views_are_placeholders(self, engine: EagerEngine, view: Callable[[Tensor], Tensor]) -> None:
        plain = torch.zeros(4, 6, dtype=torch.float64)[1:, ::2]
        is_placeholder, shape, stride = self._in_replay(
            engine, lambda t: (remat.is_placeholder(view(t)), view(t).shape, view(t).stride())
        )
        assert is_placeholder
        assert (shape, stride) == (view(plain).shape, view(plain).stride())

    def test_placeholder_makes_real_tensors_of_its_kind(self, engine: EagerEngine) -> None:
        def look(t: Tensor) -> Any:
            made = torch.zeros_like(t)
            return remat.is_placeholder(made), made.shape, float(made.sum())

        assert self._in_replay(engine, look) == (False, (3, 3), 0.0)

    def test_placeholder_can_be_printed(self, engine: EagerEngine) -> None:
        assert self._in_replay(engine, lambda t: isinstance(repr(t), str))

    def test_placeholder_is_false_for_everything_else(self, engine: EagerEngine, x: Tensor) -> None:
        with torch.inference_mode():
            inference = torch.ones(2)
        with FakeTensorMode():
            fake = torch.ones(2)
        nested = torch.nested.as_nested_tensor([torch.ones(2, 2), torch.ones(1, 2)], layout=torch.jagged)
        others = [
            x, x[1:], torch.empty(0), torch.ones(2, device="meta"), fake, inference, nested,
            torch.eye(2).to_sparse(), TwoTensor(torch.ones(2), torch.ones(2)), torch.nn.Parameter(torch.ones(1)),
        ]  # fmt: skip
        assert not any(remat.is_placeholder(other) for other in others)
        kept: list[bool] = []

        def body(t: Tensor) -> Tensor:
            made = remat.region(F.gelu, "made", recompute=False)(torch.sin(t))
            kept.append(remat.is_placeholder(made))
            return torch.exp(made)

        engine.backward([engine.checkpoint(body)(x).sum()])
        assert kept == [False, False]

    def test_placeholder_needs_a_tensor(self) -> None:
        with pytest.raises((TypeError, RuntimeError)):
            remat.is_placeholder("no tensor")  # type: ignore[arg-type]
