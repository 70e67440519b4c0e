"""P2: the body of a SAVE region runs once, in forward; never in replay."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compare import compare, grad_weight
from helpers.engine import EagerEngine
from helpers.events import EventLog, chain
from torch import Tensor

import torch_remat as remat


class TestP2SaveBodyRunsOnce:
    """Counts of body runs, side effects and random draws, in every way backward can be run."""

    @pytest.mark.parametrize("policy", ["S", "SS", "SR", "RS", "RSR", "SRS", "S-S", "-S-", "SSSS", "RSSR", "S--R"])
    def test_p2_counts_in_chains(self, engine: EagerEngine, x: Tensor, policy: str) -> None:
        log = EventLog()
        call = engine.checkpoint(chain(log, policy))
        for _ in range(3):
            log.clear()
            engine.backward([call(x).sum()])
            for index, letter in enumerate(policy):
                name = chr(ord("A") + index)
                assert log.tally(f"fwd {name}") == 1
                assert log.tally(f"bwd {name}") == 1
                assert log.tally(f"replay {name}") <= (letter != "S")

    def test_p2_side_effects_and_random_draws_happen_once(self, engine: EagerEngine, x: Tensor) -> None:
        draws: list[Tensor] = []

        def noisy(t: Tensor) -> Tensor:
            draws.append(torch.rand(t.shape, dtype=t.dtype))
            return t * draws[-1]

        def body(t: Tensor) -> Tensor:
            return torch.tanh(remat.region(noisy, "noisy", recompute=False)(torch.sin(t))).exp()

        compare(body, [x], engine=engine)
        assert len(draws) == 4  # one plain run, three checkpointed ones

    def test_p2_inner_regions_and_checkpoints_run_once(self, engine: EagerEngine, x: Tensor) -> None:
        log = EventLog()
        inner_rec, inner_save, nested = log.op("rec"), log.op("save"), log.op("nested")

        def outer(t: Tensor) -> Tensor:
            t = remat.region(inner_rec, "outer", recompute=True)(t)
            t = remat.region(inner_save, "outer", recompute=False)(t)
            return remat.checkpoint(region_name="inner")(nested)(t)

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(outer, "outer", recompute=False)(torch.sin(t)))

        compare(body, [x], engine=engine)
        log.clear()
        engine.backward([engine.checkpoint(body)(x).sum()])
        assert log == ["fwd rec", "fwd save", "fwd nested", "bwd nested", "bwd save", "bwd rec"]

    @pytest.mark.parametrize("case", ["retain", "twice", "autograd_grad", "create_graph", "thread", "half_outputs"])
    def test_p2_whatever_the_backward(self, engine: EagerEngine, x: Tensor, case: str) -> None:
        log = EventLog()
        save, rec = log.op("save"), log.op("rec")

        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            a = remat.region(save, "save", recompute=False)(t.sin())
            return torch.exp(rec(a)), torch.sigmoid(a)

        first, second = engine.checkpoint(body)(x)
        if case == "retain":
            engine.backward([first.sum()], retain_graph=True)
            engine.backward([first.sum() + second.sum()])
        elif case == "twice":
            engine.backward([first.sum() + second.sum()])
            engine.backward([engine.checkpoint(body)(x)[0].sum()])
        elif case == "autograd_grad":
            torch.autograd.grad(first.sum(), x, retain_graph=True)
            torch.autograd.grad(second.sum(), x)
        elif case == "create_graph":
            (grad,) = torch.autograd.grad(second.sum(), x, create_graph=True)
            engine.backward([grad.sum()])
        elif case == "thread":
            worker = threading.Thread(target=lambda: engine.backward([first.sum()]))
            worker.start()
            worker.join(10)
            assert not worker.is_alive()
            assert x.grad is not None
        else:
            engine.backward([second.sum()])
        assert log.tally("replay save") == 0
        assert log.tally("fwd save") == (2 if case == "twice" else 1)

    def test_p2_region_that_raises_and_is_caught(self, engine: EagerEngine, x: Tensor) -> None:
        """Try a kernel, fall back: replay takes the same path and enters neither SAVE body."""
        log: list[str] = []

        def fast(t: Tensor) -> Tensor:
            log.append("fast")
            raise NotImplementedError("no such kernel")

        def slow(t: Tensor) -> Tensor:
            log.append("slow")
            return F.gelu(t)

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            try:
                t = remat.region(fast, "attempt", recompute=False)(t)
            except NotImplementedError:
                t = remat.region(slow, "fallback", recompute=False)(t)
            return torch.exp(torch.tanh(t))

        compare(body, [x], engine=engine)
        assert log == ["fast", "slow"] * 4

    def test_p2_exception_replays_as_the_same_kind_with_its_message(self, engine: EagerEngine, x: Tensor) -> None:
        seen: list[tuple[type[BaseException], str]] = []

        class KernelError(ValueError):
            pass

        def fast(t: Tensor) -> Tensor:
            raise KernelError("width 6 unsupported")

        def body(t: Tensor) -> Tensor:
            t = torch.sin(t)
            try:
                return remat.region(fast, "attempt", recompute=False)(t)
            except ValueError as error:
                seen.append((type(error), str(error)))
                return torch.exp(torch.exp(t))

        engine.backward([engine.checkpoint(body)(x).sum()])
        assert len(seen) == 2
        assert seen[0] == seen[1]
        assert seen[0][1] == "width 6 unsupported"

    def test_p2_wrapper_built_once_is_used_in_many_checkpoints(self, engine: EagerEngine, x: Tensor) -> None:
        runs: list[int] = []

        def counted(t: Tensor) -> Tensor:
            runs.append(1)
            return F.gelu(t)

        save = remat.region(counted, "gelu", recompute=False)

        def body(t: Tensor) -> Tensor:
            return torch.exp(save(torch.sin(t)))

        y = x
        for _ in range(3):
            y = engine.checkpoint(body)(y)
        engine.backward([y], [grad_weight(y)])
        assert len(runs) == 3

    def test_p2_under_no_grad_and_when_nothing_requires_grad(self, engine: EagerEngine, x: Tensor) -> None:
        runs: list[Any] = []

        def counted(t: Tensor) -> Tensor:
            runs.append(remat.is_recomputing())
            return F.gelu(t)

        def body(t: Tensor) -> Tensor:
            return torch.exp(remat.region(counted, "gelu", recompute=False)(counted(t)))

        with torch.no_grad():
            engine.checkpoint(body)(x)
        with torch.inference_mode():
            engine.checkpoint(body)(x)
        output = engine.checkpoint(body)(x.detach())
        assert output.grad_fn is None
        assert runs == [False] * 6
