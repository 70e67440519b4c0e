"""P1: the CPU generator belongs to the whole process; what other threads draw from it is no fault of a replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from helpers.engine import EagerEngine
from torch import Tensor

import torch_remat as remat
from torch_remat.errors import RandomStateError


class Drawer(threading.Thread):
    """Draws one number whenever it is asked to."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._asked = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._over = False
        self.start()

    def run(self) -> None:
        while True:
            self._asked.acquire()
            if self._over:
                return
            torch.rand(1)
            self._done.release()

    def draw(self) -> None:
        self._asked.release()
        assert self._done.acquire(timeout=10)

    def stop(self) -> None:
        self._over = True
        self._asked.release()
        self.join(10)


@pytest.fixture
def drawer() -> Iterator[Drawer]:
    thread = Drawer()
    yield thread
    thread.stop()


class TestP1ThreadsAndRandomNumbers:
    def test_p1_another_thread_draws_during_every_replay(self, engine: EagerEngine, x: Tensor, drawer: Drawer) -> None:
        def body(t: Tensor) -> Tensor:
            h = torch.sin(t)
            if remat.is_recomputing():
                drawer.draw()
            return torch.exp(remat.region(torch.mul, "mul", recompute=False)(h, 2.0))

        expected = torch.autograd.grad(body(x).sum(), x)[0]
        call = engine.checkpoint(body)
        for _ in range(5):
            torch.manual_seed(1)
            output = call(x)
            assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected)
            here = torch.rand(2)
            torch.manual_seed(1)
            torch.rand(1)
            assert torch.equal(here, torch.rand(2)), "the other thread's draw was taken back"

    def test_p1_draws_that_begin_later_are_refused_beside_an_idle_thread(
        self, engine: EagerEngine, x: Tensor, drawer: Drawer
    ) -> None:
        """The first such replay may be taken for another thread's doing; the next one is watched and refused."""

        class Switch:  # the runtime does not look at it: the path stays the one it has observed
            drawing = False

        def body(t: Tensor) -> Tensor:
            h = torch.sin(t)
            return torch.exp(h + torch.rand(h.shape, dtype=h.dtype) if Switch.drawing else h + 1)

        call = engine.checkpoint(body)
        engine.backward([call(x).sum()])
        engine.backward([call(x).sum()])
        Switch.drawing = True
        engine.backward([call(x).sum()])
        with pytest.raises(RandomStateError, match="GeneratorHook"):
            engine.backward([call(x).sum()])
