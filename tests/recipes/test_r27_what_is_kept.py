"""R27: what is kept, exactly, in bytes derived from shapes; ``explain`` reports the same, region by region."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker
from torch import Tensor

import torch_remat as remat

WIDTH, HIDDEN, BATCH = 16, 64, 8


def kept_and_grads(body: Callable[[Tensor], Tensor], *params: Tensor) -> tuple[int, list[Tensor | None]]:
    """Bytes alive after the third forward of ``body`` under a checkpoint, and the gradients."""
    call = remat.checkpoint(region_name="block")(body)
    x = torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH).requires_grad_()
    kept = 0
    for _ in range(3):
        for leaf in (x, *params):
            leaf.grad = None
        tracker = StorageTracker()
        tracker.ignore(x, *params)
        with tracker:
            output = call(x)
        kept = tracker.alive_bytes(without=output)
        output.sum().backward()
    return kept, [leaf.grad for leaf in (x, *params)]


def eager_grads(body: Callable[[Tensor], Tensor], *params: Tensor) -> list[Tensor | None]:
    """Gradients of the plain code."""
    x = torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH).requires_grad_()
    for leaf in params:
        leaf.grad = None
    body(x).sum().backward()
    return [leaf.grad for leaf in (x, *params)]


def assert_same(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    """Equal bits."""
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(left, right, strict=True))


def reported(body: Callable[[Tensor], Tensor]) -> dict[str | None, int]:
    """Bytes by region, as ``explain`` reports them; the whole of the checkpoint under None."""
    x = torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH).clone().requires_grad_()
    (checkpoint,) = remat.explain(body, x).checkpoints
    assert checkpoint.kept_bytes == sum(region.kept_bytes for region in checkpoint.regions)
    return {None: checkpoint.kept_bytes} | {region.name: region.kept_bytes for region in checkpoint.regions}


def test_r27_1_three_chained_linears() -> None:
    """Each keeps its input, as autograd does; of the outputs only the last one is kept, where replay reads it."""
    weights = [torch.randn(HIDDEN, WIDTH), torch.randn(HIDDEN, HIDDEN), torch.randn(WIDTH, HIDDEN)]
    for weight in weights:
        weight.requires_grad_()

    def chain(t: Tensor) -> Tensor:
        for index, weight in enumerate(weights):
            t = remat.region(F.linear, f"w{index}", recompute=False)(t, weight)
        return t

    def read(t: Tensor) -> Tensor:
        return F.gelu(chain(t * 2))

    def added(t: Tensor) -> Tensor:
        return t + chain(t * 2)

    hidden, out = BATCH * HIDDEN * 4, BATCH * WIDTH * 4
    for body, last in ((read, out), (added, 0)):
        kept, grads = kept_and_grads(body, *weights)
        assert_same(eager_grads(body, *weights), grads)
        # w0's input is recomputed: rebuilt. The inputs of w1 and w2 are outputs of SAVE regions: kept by their saves.
        assert kept == 2 * hidden + last
        assert reported(body) == {None: kept, "w0": 0, "w1": hidden, "w2": hidden + last}


def test_r27_4_trailing_residual_and_linear() -> None:
    """The last linear's value is only added: it is not run again, and neither it nor its input is kept."""
    wide, narrow = torch.randn(HIDDEN, WIDTH, requires_grad=True), torch.randn(WIDTH, HIDDEN, requires_grad=True)
    runs: list[str] = []

    def block(policy: bool) -> Callable[[Tensor], Tensor]:
        def linear(t: Tensor, weight: Tensor) -> Tensor:
            result = F.linear(t, weight)
            runs.append("replay" if remat.is_recomputing() else "forward")
            return result

        def body(t: Tensor) -> Tensor:
            hidden = remat.region(F.linear, "wide", recompute=False)(t, wide)
            return t + remat.region(linear, "narrow", recompute=policy)(F.silu(hidden), narrow)

        return body

    for policy in (False, True):
        body = block(policy)
        runs.clear()
        kept, grads = kept_and_grads(body, wide, narrow)
        assert runs == ["forward"] * 3
        assert_same(eager_grads(body, wide, narrow), grads)
        assert kept == BATCH * HIDDEN * 4  # wide's output, which silu reads; narrow's input is rebuilt from it
        assert reported(body) == {None: kept, "wide": kept, "narrow": 0}


def test_r27_2_input_of_a_save_linear_is_rebuilt() -> None:
    """REC norm -> SAVE linear: the linear's input (8 x 16 x 4 = 512 bytes) is rebuilt; a kept one costs 512 more."""
    weight = torch.randn(HIDDEN, WIDTH, requires_grad=True)

    def norm(t: Tensor) -> Tensor:
        return F.layer_norm(t, (WIDTH,))

    def rebuilt(t: Tensor) -> Tensor:
        normed = remat.region(norm, "norm", recompute=True)(t)
        return remat.region(F.linear, "linear", recompute=False)(normed, weight)

    def kept(t: Tensor) -> Tensor:
        normed = remat.region(lambda u: norm(u).detach(), "norm", recompute=False)(t)
        return remat.region(F.linear, "linear", recompute=False)(normed, weight) + t.sum(1, keepdim=True)

    rebuilt_bytes, grads = kept_and_grads(rebuilt, weight)
    assert_same(eager_grads(rebuilt, weight), grads)
    kept_bytes, grads = kept_and_grads(kept, weight)
    assert_same(eager_grads(kept, weight), grads)
    assert reported(rebuilt) == {None: 0, "norm": 0, "linear": 0}
    assert reported(kept) == {None: 512, "norm": 0, "linear": 512}
    assert rebuilt_bytes == 0
    assert kept_bytes - rebuilt_bytes == BATCH * WIDTH * 4 == 512


def test_r27_3_two_declared_views_are_counted_once() -> None:
    """Fused gate and up of width 128, unbound in two views, both declared."""
    weight = torch.randn(2 * HIDDEN, WIDTH, requires_grad=True)

    def fused(t: Tensor) -> Tensor:
        return F.linear(t, weight)

    def body(t: Tensor) -> Tensor:
        gate, up = remat.region(fused, "gate_up", recompute=False)(t * 2).view(-1, 2, HIDDEN).unbind(1)
        remat.recompute_needs_tensor(gate)
        remat.recompute_needs_tensor(up)
        return (F.silu(gate) * up)[:, :WIDTH]

    kept, grads = kept_and_grads(body, weight)
    assert_same(eager_grads(body, weight), grads)
    assert kept == BATCH * 2 * HIDDEN * 4
    assert reported(body) == {None: kept, "gate_up": kept}


def test_r27_5_output_that_equals_an_input_is_not_kept_twice() -> None:
    """A SAVE region that hands its input through next to its result."""

    def both(t: Tensor) -> tuple[Tensor, Tensor]:
        return t, t * 3

    def body(t: Tensor) -> Tensor:
        hidden = torch.tanh(t * 2)
        same, triple = remat.region(both, "both", recompute=False)(hidden)
        return torch.sin(same) * torch.sin(triple)

    kept, grads = kept_and_grads(body)
    assert_same(eager_grads(body), grads)
    assert kept == BATCH * WIDTH * 4  # the triple, read by replay; the other output is the argument, rebuilt
    assert reported(body) == {None: kept, "both": kept}


def test_r27_5_checkpoint_input_passed_through_is_not_kept_twice() -> None:
    def body(t: Tensor) -> Tensor:
        same = remat.region(lambda u: u, "same", recompute=False)(t)
        return torch.sin(same) * torch.exp(remat.region(F.gelu, "gelu", recompute=False)(same) * 0.5)

    kept, grads = kept_and_grads(body)
    assert_same(eager_grads(body), grads)
    assert kept == BATCH * WIDTH * 4  # the output of "gelu"
    assert reported(body) == {None: kept, "same": 0, "gelu": kept}
