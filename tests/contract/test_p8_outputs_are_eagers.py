"""P8: outputs are eager's: same objects, same containers, no views, in-place and forward-mode AD as without us."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwd_ad
import torch.nn.functional as F
from helpers.compare import compare, grad_weight, run_once
from helpers.engine import EagerEngine
from helpers.trees import assert_same_tree, tensors_of
from torch import Tensor

import torch_remat as remat


class Pair(NamedTuple):
    """A named pair."""

    left: Tensor
    right: Any


class Twofold(tuple):
    """A tuple whose constructor takes two arguments, not one iterable."""

    def __new__(cls, first: Any, second: Any) -> Twofold:
        return super().__new__(cls, (first, second))


@dataclasses.dataclass
class Record:
    """A plain dataclass with a tensor, a number and an optional field."""

    hidden: Tensor
    steps: int
    mask: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass with slots left out on purpose."""

    hidden: Tensor
    inner: tuple[Tensor, None, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """A frozen dataclass with slots."""

    hidden: Tensor
    label: str


class Opaque:
    """An object that no container walk understands."""


OPAQUE = Opaque()

CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda a, b: a,
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "empty tuple": lambda a, b: (),
    "dict": lambda a, b: {"a": a, 7: b},
    "ordered dict": lambda a, b: collections.OrderedDict(b=b, a=a),
    "named tuple": lambda a, b: Pair(a, b),
    "named tuple with None": lambda a, b: Pair(a, None),
    "two-argument tuple": lambda a, b: Twofold(a, b),
    "return type": lambda a, b: torch.max(a * b, dim=0),
    "dataclass": lambda a, b: Record(a, 3),
    "dataclass with mask": lambda a, b: Record(a, 3, b > 0),
    "frozen dataclass": lambda a, b: Frozen(a, (b, None, "name")),
    "slotted dataclass": lambda a, b: Slotted(a, "label"),
    "nested": lambda a, b: ([a, {"b": (b, None, 1.5)}], "text", True),
    "None": lambda a, b: None,
    "number": lambda a, b: 42,
    "opaque": lambda a, b: (a, OPAQUE),
    "opaque alone": lambda a, b: OPAQUE,
    "mixed dtypes": lambda a, b: (a, (b * 10).long(), b > 0, a.float()),
    "twice the same": lambda a, b: (a, b, a),
}


class TestP8Containers:
    """Any pytree goes in and out of checkpoints and regions."""

    @pytest.mark.parametrize("container", CONTAINERS)
    def test_p8_out_of_a_checkpoint(self, engine: EagerEngine, x: Tensor, container: str) -> None:
        make = CONTAINERS[container]

        def body(t: Tensor) -> Any:
            return make(torch.exp(torch.sin(t)), torch.tanh(t).exp())

        compare(body, [x], engine=engine)

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_p8_out_of_a_region(self, engine: EagerEngine, x: Tensor, container: str, recompute: bool) -> None:
        make = CONTAINERS[container]
        types: list[type] = []

        def inner(t: Tensor) -> Any:
            return make(F.gelu(t), torch.sin(t))

        def body(t: Tensor) -> Any:
            t = torch.exp(torch.sin(t))
            result = remat.region(inner, "inner", recompute=recompute)(t)
            types.append(type(result))
            total = torch.tanh(t)
            for leaf in tensors_of(result):
                if leaf.is_floating_point():
                    total = total + torch.exp(leaf.sum()).sin()
            return total.exp(), result

        compare(body, [x], engine=engine)
        assert len(set(types)) == 1

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_p8_into_a_region(self, engine: EagerEngine, x: Tensor, container: str, recompute: bool) -> None:
        """Whatever a region takes: a SAVE output that hides in a container is found by whoever reads it."""
        make = CONTAINERS[container]

        def consume(tree: Any, *, again: Any) -> Tensor:
            total = torch.ones((), dtype=torch.float64)
            for leaf in [*tensors_of(tree), *tensors_of(again)]:
                if leaf.is_floating_point():
                    total = total * torch.sin(leaf).sum().exp().sin()
            return total

        def body(t: Tensor) -> Any:
            a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            b = remat.region(torch.matmul, "b", recompute=False)(a, a.t())[:, :1] * t
            tree = make(a, b)
            return remat.region(consume, "consume", recompute=recompute)(tree, again={"deep": [tree]}) + t.exp()

        compare(body, [x], engine=engine)

    def test_p8_into_a_checkpoint(self, engine: EagerEngine, x: Tensor) -> None:
        y, z = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))

        def body(tree: Any, number: int, *, record: Record, flags: dict[str, bool]) -> Tensor:
            assert flags == {"causal": True}
            hidden = torch.exp(tree["t"][0] * record.hidden) * number
            return remat.region(F.gelu, "gelu", recompute=False)(hidden) * torch.sin(tree["t"][1].left)

        tree = {"t": (x, Pair(y, None))}
        kwargs = {"record": Record(z, 1), "flags": {"causal": True}}
        run = compare(body, [tree, 2], kwargs=kwargs, engine=engine)
        assert all(grad is not None for grad in run.input_grads)

    def test_p8_opaque_objects_are_the_same_objects_in_replay(self, engine: EagerEngine, x: Tensor) -> None:
        handle, seen = Opaque(), list[Any]()

        def dispatch(t: Tensor) -> tuple[Tensor, Opaque, list[int]]:
            return t * 2, Opaque(), [1, 2]

        def body(t: Tensor, given: Opaque, *, named: Opaque) -> Tensor:
            t, made, splits = remat.region(dispatch, "dispatch", recompute=False)(torch.sin(t))
            seen.append((given, named, made, splits))
            return torch.exp(t) * splits[0]

        engine.backward([engine.checkpoint(body)(x, handle, named=handle).sum()])
        assert len(seen) == 2
        assert all(left is right for left, right in zip(seen[0][:3], seen[1][:3], strict=True))
        assert seen[0][3] == seen[1][3] == [1, 2]

    @pytest.mark.parametrize("recompute", [False, True])
    def test_p8_outputs_that_are_one_object_stay_one_object(
        self, engine: EagerEngine, x: Tensor, recompute: bool
    ) -> None:
        phases: list[bool] = []

        def twice(t: Tensor) -> list[Tensor]:
            t = F.gelu(t)
            return [t, t]

        def body(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            first, second = remat.region(twice, "twice", recompute=recompute)(torch.sin(t))
            phases.append(first is second)
            first = torch.exp(first)
            return first, first, torch.tanh(second).exp()

        compare(body, [x], engine=engine)
        first, second, _ = engine.checkpoint(body)(x)
        assert first is second
        assert all(phases)


class TestP8Identity:
    """Outputs are what the body returned: the very tensors, with their autograd flags."""

    def test_p8_output_is_the_body_s_tensor(self, engine: EagerEngine, x: Tensor) -> None:
        made: list[Tensor] = []

        def body(t: Tensor) -> Tensor:
            result = torch.exp(torch.sin(t))
            made.append(result)
            return result

        output = engine.checkpoint(body)(x)
        assert output is made[0]
        assert not output._is_view()
        assert output.grad_fn is not None
        assert output.grad_fn.name() == "ExpBackward0"

    @pytest.mark.parametrize("kind", ["leaf", "non-leaf", "no grad", "parameter"])
    @pytest.mark.parametrize("policy", ["none", "save", "rec"])
    def test_p8_pass_through(self, engine: EagerEngine, kind: str, policy: str) -> None:
        """Identity, dropout in eval mode, ``contiguous`` on a contiguous leaf."""
        leaf = torch.randn(4, 6, dtype=torch.float64, requires_grad=kind != "no grad")
        if kind == "parameter":
            leaf = torch.nn.Parameter(leaf.detach())
        given = leaf * 1 if kind == "non-leaf" else leaf
        identities: list[bool] = []

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            if policy == "none":
                same = t
            else:
                same = remat.region(lambda u: F.dropout(u, 0.5, False).contiguous(), "id", recompute=policy == "rec")(t)
            identities.append(same is t)
            return same, torch.exp(torch.sin(same))

        same, output = engine.checkpoint(body)(given)
        assert same is given
        if kind != "no grad":
            engine.backward([output.sum()])
            assert torch.equal(leaf.grad, torch.exp(torch.sin(leaf)).detach() * leaf.cos().detach())
        assert all(identities)

    @pytest.mark.parametrize("recompute", [False, True])
    def test_p8_region_that_makes_a_leaf(self, engine: EagerEngine, x: Tensor, recompute: bool) -> None:
        """Eager lets a body make a leaf that requires grad; numbers stay eager's or the error names the region."""
        weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            bias = remat.region(lambda: weight, "bias", recompute=recompute)()
            return torch.exp(torch.sin(t) + bias)

        compare(body, [x], params=[weight], engine=engine)

    def test_p8_requires_grad_per_output(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor, frozen: Tensor) -> dict[str, Tensor]:
            hidden = remat.region(F.gelu, "gelu", recompute=False)(t.sin())
            with torch.no_grad():
                quiet = torch.exp(hidden)
            return {
                "grad": hidden.exp(),
                "no grad": quiet,
                "detached": hidden.detach(),
                "frozen": torch.exp(frozen),
                "ids": hidden.argmax(-1),
                "mask": hidden > 0,
            }

        frozen = torch.randn(3, dtype=torch.float64)
        run = compare(body, [x, frozen], engine=engine)
        assert {name: t.requires_grad for name, t in run.outputs.items()} == {
            "grad": True, "no grad": False, "detached": False, "frozen": False, "ids": False, "mask": False,
        }  # fmt: skip

    def test_p8_grad_hooks_and_retain_grad(self, engine: EagerEngine, x: Tensor) -> None:
        def outcome(call: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Any]:
            leaf = x.detach().clone().requires_grad_()
            seen: list[Any] = []
            first, second = call(leaf)
            first.retain_grad()
            second.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
            first.register_hook(lambda grad: seen.append(grad.clone()))
            engine.backward([first.sum() * 2, second.sin().sum()])
            return [leaf.grad, first.grad, *seen]

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            hidden = remat.region(F.gelu, "gelu", recompute=False)(t.sin())
            if not remat.is_recomputing():
                hidden.register_hook(lambda grad: grad * 3)
            return hidden.exp(), hidden.tanh().exp()

        expected = outcome(body)
        for _ in range(3):
            assert_same_tree(expected, outcome(engine.checkpoint(body)))


class TestP8InPlace:
    """In-place operations on what comes out of checkpoints and regions."""

    @pytest.mark.parametrize("recompute", [False, True, None])
    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.mul_(2),
            lambda t: t.add_(1).sin_(),
            lambda t: t[0].mul_(3),
            lambda t: t.t_(),
            lambda t: t.zero_(),
            lambda t: torch.relu_(t),
            lambda t: t.index_fill_(0, torch.tensor([1]), 2.0),
            lambda t: t.copy_(torch.ones_like(t)),
        ],
        ids=["mul_", "sin_", "row", "t_", "zero_", "relu_", "index_fill_", "copy_"],
    )
    def test_p8_in_place_on_checkpoint_output(
        self, engine: EagerEngine, x: Tensor, change: Callable[[Tensor], Any], recompute: bool | None
    ) -> None:
        """The last op saves its input alone, so eager allows to change the output."""

        def block(t: Tensor) -> Tensor:
            hidden = torch.exp(torch.sin(t))
            if recompute is None:
                return F.gelu(hidden)
            return remat.region(F.gelu, "gelu", recompute=recompute)(hidden)

        def whole(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            def run(t: Tensor) -> Tensor:
                output = call(t)
                change(output)
                return output * 1

            return run

        expected = run_once(whole(block), [x])
        for _ in range(3):
            actual = run_once(whole(engine.checkpoint(block)), [x])
            assert_same_tree([expected.outputs, expected.input_grads], [actual.outputs, actual.input_grads])

    @pytest.mark.parametrize("recompute", [False, True])
    def test_p8_in_place_on_region_output_in_the_body(self, engine: EagerEngine, x: Tensor, recompute: bool) -> None:
        def body(t: Tensor) -> Tensor:
            hidden = remat.region(F.gelu, "gelu", recompute=recompute)(torch.sin(t))
            hidden.mul_(2)
            hidden[1:].add_(1)
            return torch.exp(remat.region(torch.sin, "sin", recompute=True)(hidden))

        compare(body, [x], engine=engine)

    def test_p8_in_place_that_eager_refuses_is_refused(self, engine: EagerEngine, x: Tensor) -> None:
        """The last op saves its own output: eager's backward refuses a changed output."""

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(t))

        for call in (body, engine.checkpoint(body), engine.checkpoint(body)):
            output = call(x)
            output.mul_(2)
            with pytest.raises(RuntimeError, match="modified"):
                engine.backward([output.sum()])

    def test_p8_output_that_is_a_view_of_a_region_output(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            hidden = remat.region(F.gelu, "gelu", recompute=False)(torch.sin(t))
            top, bottom = hidden.chunk(2)
            return top, bottom.exp()

        run = compare(body, [x], engine=engine)
        assert run.outputs[0]._is_view()


class TestP8ForwardMode:
    """Forward-mode AD runs through checkpoints as without them."""

    @pytest.mark.parametrize("policy", ["none", "save", "rec"])
    def test_p8_forward_mode(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        tangent = torch.cos(torch.arange(24.0, dtype=torch.float64)).reshape(4, 6)

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            if policy != "none":
                t = remat.region(torch.tanh, "tanh", recompute=policy == "rec")(t)
            return torch.exp(t)

        def jvp(call: Callable[[Tensor], Tensor], leaf: Tensor) -> list[Tensor]:
            with fwd_ad.dual_level():
                primal, change = fwd_ad.unpack_dual(call(fwd_ad.make_dual(leaf, tangent)))
                return [primal.detach().clone(), change.detach().clone()]

        for leaf in (x, x.detach()):
            expected = jvp(body, leaf)
            for _ in range(3):
                assert_same_tree(expected, jvp(engine.checkpoint(body), leaf))

    def test_p8_backward_after_forward_mode(self, engine: EagerEngine, x: Tensor) -> None:
        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(torch.sin, "sin", recompute=False)(torch.tanh(t)))

        def grads(call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
            leaf = x.detach().clone().requires_grad_()
            with fwd_ad.dual_level():
                output, _ = fwd_ad.unpack_dual(call(fwd_ad.make_dual(leaf, torch.ones_like(leaf))))
                engine.backward([output], [grad_weight(output)])
            return [leaf.grad]

        expected = grads(body)
        for _ in range(3):
            assert_same_tree(expected, grads(engine.checkpoint(body)))
