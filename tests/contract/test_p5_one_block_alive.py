"""P5: one block's rebuilt tensors at a time, each freed at its last use, and nothing reachable afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import StorageTracker, gc_off, live_tensors
from helpers.engine import EagerEngine
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat


class Census:
    """Weak references to the tensors rebuilt in replay, by block and position."""

    def __init__(self) -> None:
        self.rebuilt: dict[tuple[int, int], StorageWeakRef] = {}
        self.seen: list[tuple[tuple[int, int], set[tuple[int, int]]]] = []
        """At each backward node: which node it is, and the rebuilt tensors alive at that moment."""

    def alive(self) -> set[tuple[int, int]]:
        return {key for key, ref in self.rebuilt.items() if not ref.expired()}

    def op(self, key: tuple[int, int]) -> Callable[[Tensor], Tensor]:
        census = self

        class Watched(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                internal = t.cos()
                if remat.is_recomputing():
                    census.rebuilt[key] = StorageWeakRef(internal.untyped_storage())
                ctx.save_for_backward(internal)
                return t.sin()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                (internal,) = ctx.saved_tensors
                census.seen.append((key, census.alive()))
                return grad * internal

        return Watched.apply


class TestP5OneBlockAlive:
    """Lifetimes in backward."""

    @pytest.mark.parametrize("retain_graph", [False, True])
    def test_p5_one_block_and_last_use(self, engine: EagerEngine, x: Tensor, retain_graph: bool) -> None:
        blocks, depth = 4, 3
        census = Census()

        def make(block: int) -> Callable[[Tensor], Tensor]:
            ops = [census.op((block, index)) for index in range(depth)]

            def body(t: Tensor) -> Tensor:
                for function in ops:
                    t = function(t)
                return t

            return body

        calls = [engine.checkpoint(make(block), region_name=f"block {block}") for block in range(blocks)]
        for _ in range(2):
            census.rebuilt.clear()
            census.seen.clear()
            y = x
            for call in calls:
                y = call(y)
            with gc_off():
                engine.backward([y.sum()], retain_graph=retain_graph)
                order = [(block, index) for block in reversed(range(blocks)) for index in reversed(range(depth))]
                assert [key for key, _ in census.seen] == order
                for (block, index), alive in census.seen:
                    assert alive == {(block, earlier) for earlier in range(index + 1)}
                assert census.alive() == set()

    def test_p5_peak_of_backward_does_not_grow_with_depth(self, engine: EagerEngine) -> None:
        """Bytes of rebuilt tensors at the worst moment: those of one block, however many blocks there are."""
        peaks = []
        for blocks in (2, 6):
            x = torch.randn(32, 32, requires_grad=True)
            calls = [engine.checkpoint(lambda t: torch.exp(torch.sin(torch.tanh(t)))) for _ in range(blocks)]
            tracker = StorageTracker()
            alive: list[int] = []
            y = x
            for call in calls:
                y = call(y)
                y.register_hook(lambda _, tracker=tracker, alive=alive: alive.append(tracker.alive_bytes()))
            with gc_off(), tracker:
                engine.backward([y.sum()])
            peaks.append(max(alive))
        assert peaks[0] == peaks[1]

    def test_p5_nothing_reachable_after_backward(self, engine: EagerEngine) -> None:
        with gc_off():
            for _ in range(3):
                refs = self._forward(engine, backward=True)
                assert [name for name, ref in refs.items() if ref() is not None] == []

    def test_p5_nothing_reachable_after_forward_alone(self, engine: EagerEngine) -> None:
        with gc_off():
            for _ in range(3):
                refs = self._forward(engine, backward=False)
                assert [name for name, ref in refs.items() if ref() is not None] == []

    def _forward(self, engine: EagerEngine, *, backward: bool) -> dict[str, weakref.ref[Any]]:
        class Thing:
            pass

        refs: dict[str, weakref.ref[Any]] = {}
        thing = Thing()
        x = torch.randn(4, 6, requires_grad=True)
        given = x * 1

        def body(t: Tensor, *, extra: Any) -> Tensor:
            assert extra is thing
            a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            b = torch.exp(a)
            c = remat.region(torch.tanh, "c", recompute=True)(b)
            if not remat.is_recomputing():
                refs.update(a=weakref.ref(a), b=weakref.ref(b), c=weakref.ref(c))
            return c * a

        refs.update(thing=weakref.ref(thing), given=weakref.ref(given), body=weakref.ref(body))
        output = engine.checkpoint(body)(given, extra=thing)
        refs["output"] = weakref.ref(output)
        if backward:
            engine.backward([output.sum()])
            assert x.grad is not None
        return refs

    def test_p5_inputs_go_with_backward_though_the_output_is_held(self, engine: EagerEngine) -> None:
        x = torch.randn(4, 6, requires_grad=True)
        call = engine.checkpoint(lambda t: torch.exp(torch.sin(t)))
        with gc_off():
            for _ in range(3):
                given = x * 1
                ref = StorageWeakRef(given.untyped_storage())
                output = call(given)
                del given
                assert not ref.expired()
                engine.backward([output.sum()])
                assert ref.expired()

    def test_p5_saves_go_when_the_graph_is_dropped(self, engine: EagerEngine) -> None:
        """No backward at all: dropping the output frees every kept tensor by reference counting."""
        x = torch.randn(4, 6, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            a = remat.region(torch.exp, "a", recompute=False)(torch.sin(t))
            return remat.region(F.gelu, "b", recompute=False)(torch.tanh(a))

        for hooks in (None, (lambda t: t, lambda t: t)):
            call = engine.checkpoint(body, saved_tensors_hooks=hooks)
            for _ in range(3):
                tracker = StorageTracker()
                with gc_off():
                    with tracker:
                        output = call(x)
                    assert tracker.alive_bytes(without=output) > 0
                    del output
                    assert tracker.alive_bytes() == 0

    def test_p5_saves_go_when_an_escaped_intermediate_dies(self, engine: EagerEngine) -> None:
        """The output is gone, an escaped intermediate is held: only what its own backward needs stays."""
        x = torch.randn(4, 6, requires_grad=True)
        escaped: list[Tensor] = []
        late: list[StorageWeakRef] = []

        def body(t: Tensor) -> Tensor:
            a = torch.sin(t)
            if not remat.is_recomputing():
                escaped.append(a)
            b = remat.region(torch.exp, "b", recompute=False)(a)
            late.append(StorageWeakRef(b.untyped_storage()))
            return b

        with gc_off():
            for _ in range(3):
                escaped.clear()
                late.clear()
                output = engine.checkpoint(body)(x)
                del output
                assert late[0].expired()
                engine.backward([escaped[0].sum()])

    def test_p5_steady_state_makes_no_garbage(self, engine: EagerEngine) -> None:
        x = torch.randn(4, 6, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            a = remat.region(F.gelu, "a", recompute=False)(torch.sin(t))
            return torch.exp(a).tanh()

        call = engine.checkpoint(body)
        counts = []
        with gc_off():
            for _ in range(20):
                engine.backward([call(x).sum()])
                counts.append(live_tensors())
        assert len(set(counts[3:])) == 1

    @pytest.mark.parametrize("hooked", [False, True])
    @pytest.mark.parametrize("retain_graph", [False, True])
    def test_p5_what_a_body_stores_keeps_no_model_alive(self, hooked: bool, retain_graph: bool) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = torch.nn.Linear(4, 4)
                self.loss = torch.zeros(())

            def forward(self, t: Tensor) -> Tensor:
                h = torch.exp(self.linear(t))
                self.loss = (h * h).mean()
                return torch.sin(h)

        class Knows:
            """A state hook that holds the model."""

            def __init__(self, model: Model) -> None:
                self.model = model

            def snapshot(self) -> None:
                return None

            def restore(self, state: None) -> None:
                return None

        def step() -> list[StorageWeakRef]:
            model = Model()
            hooks = (Knows(model),) if hooked else ()
            output = remat.checkpoint(recompute_state_hooks=hooks)(model)(torch.ones(2, 4))
            loss = output.sum() + model.loss
            if retain_graph:
                loss.backward(retain_graph=True)
            loss.backward()
            return [StorageWeakRef(one.untyped_storage()) for one in model.parameters()]

        for _ in range(2):
            kept = step()
            gc.collect()
            assert all(one.expired() for one in kept)

    @pytest.mark.parametrize("retain_graph", [False, True])
    def test_p5_a_backward_that_fails_keeps_nothing_alive(self, engine: EagerEngine, retain_graph: bool) -> None:
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, t: Tensor) -> Tensor:
                return t.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                raise ArithmeticError

        def body(t: Tensor) -> Tensor:
            return torch.exp(torch.sin(Fails.apply(torch.exp(t))))

        def step() -> StorageWeakRef:
            x = torch.randn(4, 6, requires_grad=True) * 1
            with pytest.raises(ArithmeticError):
                remat.checkpoint()(body)(x).sum().backward(retain_graph=retain_graph)
            return StorageWeakRef(x.untyped_storage())

        for _ in range(2):
            kept = step()
            gc.collect()
            assert kept.expired()
