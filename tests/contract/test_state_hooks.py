"""State hooks: the call pattern that hooks written for 0.2 rely on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import compare
from helpers.engine import EagerEngine
from helpers.hooks import Buffers, Counting
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.errors import ModifiedError


class TestStateHooks:
    """Snapshots at entry and after each SAVE body; restores in replay; the outer state comes back."""

    def _body(self, hook: Counting):
        def advance(t: Tensor) -> Tensor:
            hook.value += 1
            return F.gelu(t)

        def body(t: Tensor) -> Tensor:
            t = remat.region(advance, "a", recompute=False)(torch.sin(t))
            hook.value += 10
            t = remat.region(torch.sin, "b", recompute=True)(t)
            t = remat.region(advance, "c", recompute=False)(t)
            return torch.exp(t).tanh().exp()

        return body

    def test_state_hook_call_pattern(self, engine: EagerEngine, x: Tensor) -> None:
        log: list[str] = []
        hook = Counting(log)
        call = engine.checkpoint(self._body(hook), recompute_state_hooks=(hook,))
        for _ in range(3):
            hook.value = 0
            log.clear()
            output = call(x)
            assert log == ["snapshot 0", "snapshot 1", "snapshot 12"]
            hook.value = 500
            log.clear()
            engine.backward([output.sum()])
            assert log == ["snapshot 500", "restore 0", "restore 1", "restore 12", "restore 500"]
            assert hook.value == 500

    def test_state_hook_pattern_repeats_with_retain_graph(self, engine: EagerEngine, x: Tensor) -> None:
        log: list[str] = []
        hook = Counting(log)
        output = engine.checkpoint(self._body(hook), recompute_state_hooks=(hook,))(x)
        logs = []
        for retain in (True, True, False):
            log.clear()
            engine.backward([output.sum()], retain_graph=retain)
            logs.append(list(log))
        assert logs[0] == logs[1] == logs[2]
        assert logs[0][-1] == logs[0][0].replace("snapshot", "restore")

    def test_state_hooks_run_in_the_order_given(self, engine: EagerEngine, x: Tensor) -> None:
        log: list[str] = []
        hooks = (Counting(log, "first "), Counting(log, "second "))
        call = engine.checkpoint(lambda t: torch.exp(torch.sin(t)), recompute_state_hooks=hooks)
        engine.backward([call(x).sum()])
        assert log[:2] == ["first snapshot 0", "second snapshot 0"]
        assert log[2:6] == ["first snapshot 0", "second snapshot 0", "first restore 0", "second restore 0"]
        assert sorted(log[6:]) == ["first restore 0", "second restore 0"]

    def test_state_hook_on_a_raising_replay(self, engine: EagerEngine, x: Tensor) -> None:
        log: list[str] = []
        hook = Counting(log)

        def body(t: Tensor) -> Tensor:
            if remat.is_recomputing():
                raise ConnectionError
            return torch.exp(torch.sin(t))

        output = engine.checkpoint(body, recompute_state_hooks=(hook,))(x)
        hook.value = 7
        log.clear()
        with pytest.raises(ConnectionError):
            engine.backward([output.sum()])
        assert log == ["snapshot 7", "restore 0", "restore 7"]

    def test_state_hooks_do_not_run_without_grad(self, engine: EagerEngine, x: Tensor) -> None:
        log: list[str] = []
        hook = Counting(log)
        call = engine.checkpoint(self._body(hook), recompute_state_hooks=(hook,))
        with torch.no_grad():
            call(x)
        with torch.inference_mode():
            call(x)
        assert log == []

    def test_state_hook_inert_regions_take_no_snapshot(self, engine: EagerEngine, x: Tensor) -> None:
        log: list[str] = []
        hook = Counting(log)

        def outer(t: Tensor) -> Tensor:
            t = remat.region(torch.sin, "inner", recompute=False)(t)
            return remat.region(torch.exp, "inner", recompute=True)(t)

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(outer, "outer", recompute=False)(torch.sin(t)))

        engine.checkpoint(body, recompute_state_hooks=(hook,))(x)
        assert log == ["snapshot 0", "snapshot 0"]

    def test_state_hooks_may_be_any_iterable(self, engine: EagerEngine, x: Tensor) -> None:
        for hooks in ([Counting([])], (Counting([]),), iter([Counting([])])):
            compare(self._body(Counting([])), [x], options={"recompute_state_hooks": hooks}, engine=engine)

    def test_state_hook_protocol_is_checked_at_run_time(self) -> None:
        assert isinstance(Counting([]), remat.RecomputeStateHook)
        assert not isinstance(object(), remat.RecomputeStateHook)


class Block(nn.Module):
    """Batch norm, a scale that only reads its buffer, a projection; and a counter."""

    def __init__(self, saved: frozenset[str]) -> None:
        super().__init__()
        self.saved = saved
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def part(self, name: str, function: Any, t: Tensor) -> Tensor:
        return remat.region(function, name, recompute=name not in self.saved)(t)

    def forward(self, t: Tensor) -> Tensor:
        self.calls += 1
        t = self.part("norm", self.norm, t)
        t = self.part("scale", lambda t: t * self.scale, t)
        return torch.exp(self.part("linear", self.linear, t)).tanh()


class TestP1StateHooksThatWriteIntoBuffers:
    """They leave no trace: nobody takes a buffer for modified that holds what it held."""

    SAVED = (
        frozenset[str](),
        frozenset({"norm"}),
        frozenset({"scale"}),
        frozenset({"linear"}),
        frozenset({"norm", "linear"}),
    )

    @staticmethod
    def compared(block: Block, step: Any) -> None:
        """Three steps of ``step`` with and without a checkpoint of ``block``."""
        plain = copy.deepcopy(block)
        call = remat.checkpoint(region_name="c", recompute_state_hooks=(Buffers(block),))(block)
        for _ in range(3):
            results = []
            for run, module in ((call, block), (plain, plain)):
                module.zero_grad()
                torch.manual_seed(0)
                inputs = [torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
                step(run, inputs)
                gradients = [one.grad for one in (*inputs, *module.parameters())]
                results.append([*gradients, *module.buffers()])
            for ours, expected in zip(*results, strict=True):
                assert (ours is None) is (expected is None)
                assert ours is None or torch.equal(ours, expected)

    @pytest.mark.parametrize("saved", SAVED, ids=lambda saved: "+".join(sorted(saved)) or "none")
    @pytest.mark.parametrize("training", [True, False])
    def test_p1_around_saved_and_recomputed_regions(self, saved: frozenset[str], training: bool) -> None:
        self.compared(Block(saved).train(training), lambda call, inputs: call(inputs[0]).sum().backward())

    @pytest.mark.parametrize("saved", SAVED, ids=lambda saved: "+".join(sorted(saved)) or "none")
    def test_p1_two_calls_in_flight(self, saved: frozenset[str]) -> None:
        self.compared(
            Block(saved).eval(), lambda call, inputs: (call(inputs[0]) - call(inputs[1])).square().sum().backward()
        )

    def test_p1_a_second_backward(self) -> None:
        def step(call: Any, inputs: list[Tensor]) -> None:
            loss = call(inputs[0]).sum()
            loss.backward(retain_graph=True)
            loss.backward()

        self.compared(Block(frozenset({"linear"})).eval(), step)

    @pytest.mark.parametrize("saved", SAVED, ids=lambda saved: "+".join(sorted(saved)) or "none")
    def test_p1_a_checkpoint_inside_brings_its_own(self, saved: frozenset[str]) -> None:
        """What its snapshots read, the body does not read."""
        inner = Block(saved)
        plain = copy.deepcopy(inner)
        part = remat.checkpoint(region_name="in", recompute_state_hooks=(Buffers(inner.norm),))(inner.norm)

        def body(t: Tensor) -> Tensor:
            return torch.exp(inner.linear(part(torch.sin(t))))

        for _ in range(3):
            x = torch.linspace(0, 1, 35, dtype=torch.float64).reshape(7, 5).requires_grad_()
            ours = torch.autograd.grad(remat.checkpoint(region_name="out")(body)(x).sum(), x)[0]
            expected = torch.autograd.grad(torch.exp(plain.linear(plain.norm(torch.sin(x)))).sum(), x)[0]
            assert torch.equal(ours, expected)

    def test_p1_a_buffer_that_several_checkpoints_share(self) -> None:
        blocks = [Block(frozenset({"linear"})), Block(frozenset())]
        blocks[1].scale = blocks[0].scale
        plain = copy.deepcopy(blocks)
        x = torch.linspace(0, 1, 35, dtype=torch.float64).reshape(7, 5)
        for _ in range(2):
            ours, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
            h, g = ours, expected
            for block, other in zip(blocks, plain, strict=True):
                h = remat.checkpoint(recompute_state_hooks=(Buffers(block),))(block)(h)
                g = other(g)
            h.sum().backward()
            g.sum().backward()
            assert torch.equal(ours.grad, expected.grad)

    @pytest.mark.parametrize("saved", SAVED, ids=lambda saved: "+".join(sorted(saved)) or "none")
    def test_p1_what_others_write_is_still_refused(self, saved: frozenset[str]) -> None:
        block = Block(saved).eval()
        call = remat.checkpoint(recompute_state_hooks=(Buffers(block),))(block)
        for _ in range(2):
            output = call(torch.randn(7, 5, dtype=torch.float64, requires_grad=True))
            block.scale.mul_(2)
            with pytest.raises((ModifiedError, RuntimeError), match="modified"):
                output.sum().backward()
