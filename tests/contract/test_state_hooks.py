"""State hooks: the call pattern that hooks written for 0.2 rely on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import compare
from helpers.engine import EagerEngine
from helpers.hooks import Counting
from torch import Tensor

import torch_remat as remat


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
