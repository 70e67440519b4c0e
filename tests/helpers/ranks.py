"""Run a function in several processes that form a gloo process group, and collect what each returns or raises.

The processes are forked from a server that has imported torch once, so a test pays for its processes only.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass
class Outcome:
    """What one rank did."""

    value: Any = None
    error: str | None = None
    """The class of the exception that ended it."""
    message: str = ""
    seconds: float = 0.0


def run_ranks(
    function: Callable[..., Any],
    ranks: int = 2,
    *args: Any,
    timeout: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """``function(rank, *args)`` on every rank; its module must be importable.

    Raises:
        TimeoutError: a rank has not ended within ``timeout`` seconds. All are ended then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "torch_remat.testing"])
    queue = context.SimpleQueue()
    settings = {"ranks": ranks, "port": free_port(), "environment": environment or {}, "path": list(sys.path)}
    workers = [
        context.Process(target=_work, args=(queue, rank, settings, function.__module__, function.__name__, args))
        for rank in range(ranks)
    ]
    outcomes: dict[int, Outcome] = {}

    def collect() -> None:
        while len(outcomes) < ranks:
            rank, outcome = queue.get()
            outcomes[rank] = outcome

    collector = threading.Thread(target=collect, daemon=True)
    for worker in workers:
        worker.start()
    collector.start()
    collector.join(timeout)
    hung = [rank for rank in range(ranks) if rank not in outcomes]
    for worker in workers:
        if hung:
            worker.kill()
        worker.join(20)
    if hung:
        raise TimeoutError(f"ranks {hung} have not ended after {timeout} s; others: {outcomes}")
    return [outcomes[rank] for rank in range(ranks)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the ranks returned; fails where one raised."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.message}"
    return [outcome.value for outcome in outcomes]


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _work(queue: Any, rank: int, settings: dict[str, Any], module: str, name: str, args: tuple[Any, ...]) -> None:
    os.environ.update(settings["environment"])
    sys.path[:] = settings["path"]
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    outcome = Outcome()
    store = dist.TCPStore("127.0.0.1", settings["port"], settings["ranks"], rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings["ranks"], timeout=timedelta(seconds=60))
    started = time.monotonic()
    try:
        outcome.value = getattr(importlib.import_module(module), name)(rank, *args)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank is its outcome
        outcome.error, outcome.message = type(error).__name__, f"{error}\n{traceback.format_exc()}"
    outcome.seconds = time.monotonic() - started
    queue.put((rank, outcome))
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < settings["ranks"] and time.monotonic() - started < 60:
        time.sleep(0.02)  # rank 0 serves the store
    os._exit(0)
