"""What it costs that the first call of a body is observed: time of that step, and memory while it runs.

**Time.** Steps in which everything known of the bodies was forgotten before are interleaved with steps in which it was
not. In the first kind the first of equal layers is observed and the others follow its plan; in the second row each
layer is observed, as if all were different bodies. Process time, one thread, medians; see `bench_overhead.py`.

**Memory.** The greatest sum of storages alive at any operation of the forward, and the sum when it has ended, counted
as in `bench_memory.py`: of a forward in which every layer is observed, of one that follows its plan, and of one that
persists every output of a SAVE region, since `recompute_needs_tensor` names them all.

Exit status 0, or with `--check` 1 when an observed step takes more than `LIMIT` times another one, or holds more than
one that persists everything.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

import bench_memory_cases  # noqa: E402
import bench_overhead_cases  # noqa: E402
import torch  # noqa: E402
from bench_common import table  # noqa: E402
from bench_memory_cases import ANNOTATED, SAVED, Model, Shape  # noqa: E402
from bench_overhead_cases import THREE_SAVED, StackCase  # noqa: E402

import torch_remat as remat  # noqa: E402
from torch_remat.runtime import plan  # noqa: E402
from torch_remat.runtime.body_key import BodyKey  # noqa: E402

LIMIT = 10


class Timed(NamedTuple):
    """Medians, in microseconds."""

    title: str
    steady_us: float
    observed_us: float

    @property
    def ratio(self) -> float:
        """How many times a step that follows its plan."""
        return self.observed_us / self.steady_us


def forget() -> None:
    """The next call of any body is its first."""
    for code in tuple(plan.registry._known):
        plan.registry.forget(BodyKey(code, None))


class Dense:
    """One body of twenty SAVE and RECOMPUTE regions on sixteen elements: regions at their densest."""

    def __init__(self) -> None:
        self._x = torch.randn(4, 4, requires_grad=True)

    def step(self) -> float:
        """One step; returns its seconds."""
        self._x.grad = None
        start = bench_overhead_cases.clock()
        output = remat.checkpoint(region_name="dense")(_dense)(self._x)
        output.backward(output)
        return bench_overhead_cases.clock() - start


def _dense(t: torch.Tensor) -> torch.Tensor:
    for index in range(20):
        t = remat.region(torch.sin, f"sin{index}", recompute=index % 2 == 1)(t)
    return t


def each_forgotten(case: StackCase) -> None:
    """Make every block of the stack an unknown body in every step."""
    run = case._run

    def unknown(index: int, block: Any, x: Any) -> Any:
        forget()
        return run(index, block, x)

    case._run = unknown


def timed(title: str, steady: Callable[[], float], observed: Callable[[], float], steps: int) -> Timed:
    """Interleaved medians of both kinds of step."""
    for _ in range(3):
        steady()
    times: list[list[float]] = [[], []]
    for _ in range(steps):
        forget()
        times[1].append(observed())
        steady()  # learns again
        times[0].append(steady())
    return Timed(title, *(median(some) * 1e6 for some in times))


def times(steps: int) -> list[Timed]:
    """The rows of the first table."""
    stack, every, one = (StackCase(THREE_SAVED, True, blocks=blocks) for blocks in (8, 8, 1))
    stack._blocks = [copy.deepcopy(stack._blocks[0]) for _ in stack._blocks]  # of one class, as layers of a model are
    each_forgotten(every)
    dense = Dense()
    return [
        timed("8 equal blocks, the first observed", stack.step, stack.step, steps),
        timed("8 blocks, each observed", stack.step, every.step, steps),
        timed("one block", one.step, one.step, steps),
        timed("one body of 20 regions of one operation", dense.step, dense.step, steps),
    ]


class Held(NamedTuple):
    """Bytes of one forward."""

    title: str
    peak: int
    kept: int


def held(title: str, case: str, shape: Shape, observed: bool) -> Held:
    """Peak and end of a forward of `case`, observed in every layer or known before."""
    model = Model(case, shape)
    if observed:
        call = model._call

        def unknown(index: int, layer: Any, x: Any) -> Any:
            forget()
            return call(index, layer, x)

        model._call = unknown
    else:
        model.forward()
    gc.collect()
    mode = bench_memory_cases._storage_mode()
    for parameter in model.parameters:
        mode.ignore(parameter)
    mode.watch(model.x)
    with mode:
        output = model.forward()
    peak = mode.peak
    mode.ignore(output)
    return Held(title, peak, mode.alive_bytes())


def bytes_held(shape: Shape) -> list[Held]:
    """The rows of the second table."""
    return [
        held("follows its plan", SAVED, shape, observed=False),
        held("observed in every layer", SAVED, shape, observed=True),
        held("persists every SAVE output", ANNOTATED, shape, observed=False),
    ]


def verdict(rows: list[Timed], memory: list[Held]) -> list[str]:
    """What is over its limit, a line each."""
    over = [f"{row.title}: {row.ratio:.1f}x, over {LIMIT}x" for row in rows if row.ratio > LIMIT]
    steady, observed, everything = memory
    if observed.peak > everything.peak:
        over.append(f"an observed forward holds {observed.peak - everything.peak:,} bytes more than persisting all")
    if observed.kept != steady.kept:
        over.append(f"an observed forward ends with {observed.kept - steady.kept:+,} bytes")
    return over


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each kind, default 60")
    parser.add_argument("--clock", choices=bench_overhead_cases.CLOCKS, default="cpu", help="default cpu")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when something is over its limit")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench_overhead_cases.clock = bench_overhead_cases.CLOCKS[options.clock]
    rows = times(options.steps)
    memory = bytes_held(Shape())
    print(f"torch {torch.__version__}, {options.steps} steps of each kind, {options.clock} time\n")
    header = ("model", "step, us", "observed, us", "ratio")
    print(
        table(
            header, [[row.title, f"{row.steady_us:.0f}", f"{row.observed_us:.0f}", f"{row.ratio:.1f}x"] for row in rows]
        )
        + "\n"
    )
    header = ("forward", "peak, bytes", "kept at its end")
    print(table(header, [[row.title, f"{row.peak:,}", f"{row.kept:,}"] for row in memory]) + "\n")
    over = verdict(rows, memory)
    print("\n".join(over) if over else f"within the limits: at most {LIMIT}x, and no more than persisting everything")
    return 1 if options.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
