"""The same errors as eager code: raised while tracing, and by eager code where the graph may break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import grad_weight
from torch import Tensor
from torch._dynamo.exc import Unsupported

import torch_remat as remat
from torch_remat.errors import DuplicateNameError, InvalidTypeError, InvalidValueError, UnsupportedError, UsageError


def save(function: Any, name: Any) -> Any:
    """A SAVE region."""
    return remat.region(function, name, recompute=False)


def twice(t: Tensor) -> Tensor:
    """One region name twice."""
    return save(torch.sin, "a")(save(torch.cos, "a")(t))


def twice_in_scopes(t: Tensor) -> Tensor:
    """One qualified name twice: scopes inside and outside of a nested checkpoint meet."""
    with remat.name_scope("inner"):
        t = save(torch.sin, "a")(t)
    return remat.checkpoint(region_name="inner")(save(torch.cos, "a"))(t)


class StateHook:
    """A hook for a state that the compiler does not know."""

    def snapshot(self) -> int:
        return 0

    def restore(self, state: int) -> None:
        pass


def block(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function that calls ``body`` in a checkpoint."""
    return lambda t: remat.checkpoint(region_name="block", **options)(body)(t)


NOT_A_TENSOR: list[Any] = [None]

MISTAKES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "duplicate name": (block(twice), DuplicateNameError, "Duplicate torch_remat region name block::a"),
    "duplicate in scopes": (block(twice_in_scopes), DuplicateNameError, "block::inner/a"),
    "empty name": (block(lambda t: save(torch.sin, "")(t)), InvalidValueError, "must be non-empty"),
    "name of wrong type": (block(lambda t: save(torch.sin, 3)(t)), InvalidTypeError, "name to be a str"),
    "recompute no bool": (
        block(lambda t: remat.region(torch.sin, "a", recompute=1)(t)),  # pyright: ignore[reportArgumentType]
        UsageError,
        "recompute to be a bool",
    ),
    "declared no tensor": (
        block(lambda t: remat.recompute_needs_tensor(*NOT_A_TENSOR) or t),
        UsageError,
        "Tensor arguments",
    ),
    "empty checkpoint name": (
        lambda t: remat.checkpoint(region_name="")(torch.sin)(t),
        InvalidValueError,
        "region_name to be non-empty",
    ),
    "unknown check": (block(torch.sin, determinism_check="some"), InvalidValueError, "determinism_check should be one"),
    "random state": (block(torch.sin, preserve_rng_state=True), UnsupportedError, "recompute_state_hooks"),
}


class TestSameErrors:
    """Mistakes are refused with one text, compiled or not."""

    @pytest.mark.parametrize("mistake", sorted(MISTAKES))
    def test_one_graph_says_it(self, x: Tensor, mistake: str) -> None:
        call, _, text = MISTAKES[mistake]
        with pytest.raises(Unsupported, match=text):
            torch.compile(call, backend="aot_eager", fullgraph=True)(x)

    @pytest.mark.parametrize("mistake", sorted(MISTAKES))
    def test_broken_graph_raises_it(self, x: Tensor, mistake: str) -> None:
        call, kind, text = MISTAKES[mistake]
        with pytest.raises(kind, match=text):
            torch.compile(call, backend="aot_eager")(x)

    def test_duplicate_recompute_regions_where_the_graph_breaks(self, x: Tensor) -> None:
        """A compiled part of an eager checkpoint has its recomputed regions in its graph."""

        def body(t: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            for function in (torch.sin, torch.cos):
                t = remat.region(function, "a", recompute=True)(t)
            return t

        with pytest.raises(DuplicateNameError, match="block::a"):
            torch.compile(block(body), backend="aot_eager")(x)

    def test_names_are_free_again_in_the_next_checkpoint_and_call(self, x: Tensor) -> None:
        once = block(lambda t: save(torch.sin, "a")(t))
        call = torch.compile(lambda t: once(once(t)), backend="aot_eager", fullgraph=True)
        for length in (2, 3, 4):
            call(x[:length]).sum().backward()

    def test_a_caught_error_leaves_no_trace(self, x: Tensor) -> None:
        def fails(t: Tensor) -> Tensor:
            raise ValueError(t.shape)

        def body(t: Tensor) -> Tensor:
            try:
                save(fails, "bad")(t)
            except ValueError:
                t = t * 2
            return remat.region(torch.exp, "rec", recompute=True)(save(torch.sin, "good")(t))

        call = torch.compile(block(body), backend="aot_eager", fullgraph=True)
        (got,) = torch.autograd.grad(call(x).sum(), x)
        assert torch.equal(got, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


OPTIONS: dict[str, dict[str, Any]] = {
    "saved_tensors_hooks": {"saved_tensors_hooks": (lambda t: t, lambda t: t)},
    "recompute_state_hooks": {"recompute_state_hooks": (StateHook(),)},
    "determinism_check": {"determinism_check": "bitwise"},
}


class TestOptions:
    """What the compiler cannot do is refused by the name of the option in one graph, and runs eagerly elsewhere."""

    @pytest.mark.parametrize("option", sorted(OPTIONS))
    def test_one_graph_refuses_it_by_name(self, x: Tensor, option: str) -> None:
        call = torch.compile(block(torch.sin, **OPTIONS[option]), backend="aot_eager", fullgraph=True)
        with pytest.raises(Unsupported, match=rf"checkpoint\({option}=.*To fix:"):
            call(x)

    @pytest.mark.parametrize("option", sorted(OPTIONS))
    def test_broken_graph_honours_it(self, x: Tensor, option: str) -> None:
        def body(t: Tensor) -> Tensor:
            return save(torch.exp, "e")(t.sin()).cos()

        call = torch.compile(block(body, **OPTIONS[option]), backend="aot_eager")
        (got,) = torch.autograd.grad(call(x).sum(), x)
        assert torch.equal(got, torch.autograd.grad(body(x).sum(), x)[0])

    def test_side_effect_in_one_graph_is_refused(self, x: Tensor) -> None:
        kept: list[Tensor] = []

        def body(t: Tensor) -> Tensor:
            kept.append(t)
            return t.sin()

        with pytest.raises(Unsupported, match="side effect"):
            torch.compile(block(body), backend="aot_eager", fullgraph=True)(x)

    def test_ambient_hooks_are_native_hooks_of_the_graph(self, x: Tensor) -> None:
        packed: list[Tensor] = []

        def pack(t: Tensor) -> Tensor:
            packed.append(t)
            return t

        call = torch.compile(block(lambda t: save(torch.exp, "e")(t.sin()).cos()), backend="aot_eager", fullgraph=True)
        call(x).sum().backward()
        with remat.saved_tensors_hooks(pack, lambda t: t):
            call(x).sum().backward()
        assert packed, "what the compiled function saves goes through the hooks around its call"


def scaled(t: Tensor) -> Tensor:
    """Random numbers in a SAVE region, in a RECOMPUTE region and in bare code."""
    t = save(lambda u: F.dropout(u, 0.5), "save")(t.sin() + 2)
    t = remat.region(lambda u: u * torch.rand_like(u), "rec", recompute=True)(t)
    t = F.dropout(t, 0.3) + torch.randn(t.shape, dtype=t.dtype) * t
    return t * t


class TestRandomNumbers:
    """What recomputed code draws is what forward drew, with and without the hook that eager code needs."""

    @pytest.mark.parametrize("options", [{}, {"recompute_state_hooks": (remat.GeneratorHook(),)}], ids=["", "hook"])
    def test_p1_draws_are_those_of_plain_code(self, x: Tensor, options: dict[str, Any]) -> None:
        call = torch.compile(block(scaled, **options), backend="aot_eager", fullgraph=True)
        results = []
        for function in (scaled, call):
            torch.manual_seed(3)
            output = function(x)
            results.append((output.detach(), *torch.autograd.grad(output, x, grad_weight(output))))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])

    @pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
    def test_p1_gradient_belongs_to_the_numbers_that_were_drawn(self, backend: str) -> None:
        """Any backend may draw others than eager code; the output tells which."""

        def body(t: Tensor) -> Tensor:
            return (F.dropout(t, 0.5) * torch.rand_like(t)).square()

        t = torch.full((8, 8), 2.0, dtype=torch.float64, requires_grad=True)
        output = torch.compile(block(body), backend=backend, fullgraph=True)(t)
        output.sum().backward()
        assert t.grad is not None
        assert 0 < int((output == 0).sum()) < 64
        torch.testing.assert_close(t.grad, output.detach())  # (c t)^2 at t = 2 has the derivative 2 c^2 t = (c t)^2
