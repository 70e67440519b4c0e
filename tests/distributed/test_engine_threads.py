"""Backward in the autograd engine's own threads, without multithreading, and state of a thread that replay needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_remat as remat
from torch_remat.testing import CountRuns, assert_same_bits

DEPTH = 70  # reentrant backwards nested deeper than 60 go to threads of the engine's own pool


class Reentrant(torch.autograd.Function):
    """Its backward runs another backward, ``depth`` deep; the innermost one is that of ``leaf``'s graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, innermost: Callable[[], Tensor]) -> Tensor:
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            if ctx.depth:
                x = torch.ones(1, requires_grad=True)
                Reentrant.apply(x, ctx.depth - 1, ctx.innermost).sum().backward()
            else:
                ctx.innermost().sum().backward()
        return grad, None, None


class Threaded(threading.local):
    """A value that each thread has for itself, as a mesh that a framework keeps per thread."""

    mesh: str | None = None


threaded = Threaded()


class MeshHook:
    """Carries the value of the thread that ran forward into the one that replays."""

    def snapshot(self) -> str | None:
        return threaded.mesh

    def restore(self, state: str | None) -> None:
        threaded.mesh = state


def in_engine_thread(backward: Callable[[], Any]) -> None:
    """Run ``backward`` where the autograd engine runs what is nested too deep: in a thread of its own."""

    def innermost() -> Tensor:
        backward()
        return torch.ones(1, requires_grad=True)

    Reentrant.apply(torch.ones(1, requires_grad=True), DEPTH, innermost).sum().backward()


def in_new_thread(backward: Callable[[], Any]) -> None:
    failed: list[BaseException] = []

    def target() -> None:
        try:
            backward()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            failed.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def without_multithreading(backward: Callable[[], Any]) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        backward()


WAYS = [in_engine_thread, in_new_thread, without_multithreading]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("save", [False, True])
def test_p4_backward_in_other_threads(way, save):
    runs = CountRuns()
    threads: list[str] = []

    def body(x: Tensor) -> Tensor:
        if remat.is_recomputing():
            threads.append(threading.current_thread().name)
            assert threaded.mesh == "outer", "the hook has set this thread's value"
        h = remat.region(runs.watch(torch.exp, "exp"), "exp", recompute=not save)(x.sin())
        return torch.tanh(h) * 2

    def gradients(call: Callable[[Tensor], Tensor], backward: Callable[[Callable[[], Any]], Any]) -> Tensor | None:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        y = call(call(x)).sum()
        backward(y.backward)
        return x.grad

    threaded.mesh = "outer"
    try:
        expected = gradients(body, lambda run: run())
        call = remat.checkpoint(region_name="block", recompute_state_hooks=(MeshHook(),))(body)
        for _ in range(3):
            runs.calls.clear()
            threads.clear()
            assert_same_bits(expected, gradients(call, way))
            assert len(threads) == 2, "one replay for each call"
            assert runs.count("exp") == 2 + (0 if save else 2)
            if way is without_multithreading:
                assert set(threads) == {threading.current_thread().name}
            else:
                assert threading.current_thread().name not in threads
        assert threaded.mesh == "outer"
    finally:
        threaded.mesh = None


def test_p7_the_backward_thread_keeps_its_own_value():
    """A hook sets the value for the replay; afterwards the thread has what it had."""
    after: list[str | None] = []

    def body(x: Tensor) -> Tensor:
        return torch.exp(torch.sin(x) * {"forward": 2.0}[str(threaded.mesh)])

    threaded.mesh = "forward"
    try:
        x = torch.ones(3, requires_grad=True)
        y = remat.checkpoint(region_name="block", recompute_state_hooks=(MeshHook(),))(body)(x)
    finally:
        threaded.mesh = None

    def backward() -> None:
        threaded.mesh = "own"
        y.sum().backward()
        after.append(threaded.mesh)

    in_new_thread(backward)
    assert after == ["own"]
    expected = torch.ones(3, requires_grad=True)
    torch.exp(torch.sin(expected) * 2.0).sum().backward()
    assert_same_bits(expected.grad, x.grad)
