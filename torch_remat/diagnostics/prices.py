"""``profile_regions``: what each region would keep if it were saved, and cost if it were recomputed.

Bytes are the engine's own: the function runs once with nothing saved, and once for each region with that region alone
saved, each time observed, and what is alive then is counted. Time, FLOPs and collectives are those of the region's
function in forward.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.diagnostics.graph import nodes_of
from torch_remat.diagnostics.memory import kept_bytes_by_span
from torch_remat.diagnostics.price_table import PriceList, RegionPrice
from torch_remat.diagnostics.roots import Root, as_body, check_call, in_eager_code
from torch_remat.errors import RematError, display_name
from torch_remat.runtime.dynamo import eager_only
from torch_remat.runtime.forward import ForwardFrame
from torch_remat.runtime.frame import qualified
from torch_remat.runtime.observe import Observer
from torch_remat.runtime.plan import Known, Plan, Step
from torch_remat.runtime.tape import OutputKind, Region, Spans
from torch_remat.runtime.tensors import tensors_in

__all__ = ["profile_regions"]

P = ParamSpec("P")
_Key = tuple[str, str]  # checkpoint, region
_TIMED_RUNS = 3
_CPU_ATTENTION = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Torch counts attention for the GPU kernels only; the arguments are shapes."""
    from torch.utils.flop_counter import sdpa_flop_count  # imports triton where there is one

    return sdpa_flop_count(query, key, value)


_MORE_FLOPS = {} if _CPU_ATTENTION is None else {_CPU_ATTENTION: _attention_flops}
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


def profile_regions(function: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> PriceList:
    """What each region of ``function`` keeps if it is saved and costs if it is recomputed, whatever its policy is.

    ``print(remat.profile_regions(block, x))`` prints a table. Meta and fake tensors give bytes, FLOPs and collectives
    without memory or time: a block of any size can be priced on any machine.

    Args:
        function: a checkpointed function; one that runs checkpoints (a whole model); or one that runs none, which is
            taken as the body of a checkpoint.
        *args: what it is called with. Something must require a gradient, as in training.
        **kwargs: the same.

    Returns:
        One :class:`RegionPrice` for each region call of each checkpoint, in the order of forward.

    Prices are those of eager code: what is compiled runs as if it were not. :func:`explain` says what graphs keep.

    The function runs once per region name and a few times more, with the memory of no checkpointing; side effects and
    collectives happen each time, and random generators move on. On a terminal a progress bar shows when it takes long.
    No gradient changes and nothing is kept alive.

    Raises:
        RuntimeError: called inside a checkpoint, or nothing that the function returns requires a gradient.
        TypeError: ``function`` is not callable.
    """
    check_call(function, "profile_regions")
    with in_eager_code():
        return _prices(function, args, kwargs)


def _prices(function: Any, args: Any, kwargs: Any) -> PriceList:
    counted = _Run(frozenset(), observed=False)
    counted.count(function, args, kwargs)
    if not counted.ran:
        function = as_body(function)
        counted.count(function, args, kwargs)
    names = list(dict.fromkeys(name for _, name in counted.policies))
    timed_runs = _TIMED_RUNS if counted.real else 0
    kept: dict[_Key, int] = {}
    notes: dict[_Key, str] = {}
    seconds: dict[_Key, list[float]] = {key: [] for key in counted.policies}
    with _Progress(1 + len(names) + timed_runs) as progress:
        for name in names:
            progress.advance()
            _price_bytes(name, function, args, kwargs, counted, kept, notes)
        for _ in range(timed_runs):
            progress.advance()
            timed = _Run(frozenset(), observed=False)
            timed.time(function, args, kwargs)
            for key, value in timed.seconds.items():
                seconds.setdefault(key, []).append(value)
    return PriceList(
        tuple(
            RegionPrice(
                checkpoint,
                region,
                policy,
                kept.get((checkpoint, region)),
                statistics.median(times) if (times := seconds.get((checkpoint, region))) else None,
                counted.flops[checkpoint, region],
                tuple(sorted(counted.collectives[checkpoint, region].items())),
                notes.get((checkpoint, region)),
            )
            for (checkpoint, region), policy in counted.policies.items()
        )
    )


def _price_bytes(
    name: str,
    function: Any,
    args: Any,
    kwargs: Any,
    counted: _Run,
    kept: dict[_Key, int],
    notes: dict[_Key, str],
) -> None:
    """What the regions called ``name`` keep where they alone are saved."""
    run = _Run(frozenset([name]), observed=True)
    keys = [key for key in counted.policies if key[1] == name]
    try:
        run.measure(function, args, kwargs)
    except RematError as error:
        notes.update(dict.fromkeys(keys, f"cannot be saved: {str(error).splitlines()[0]}"))
        return
    for key in keys:
        if key in run.kept:
            kept[key] = run.kept[key]
        else:
            notes[key] = "unknown: the function did not call it again"


class _Run:
    """One call of the function in which exactly the regions called ``saved`` are saved."""

    def __init__(self, saved: frozenset[str], observed: bool) -> None:
        self._saved = saved
        self._observed = observed
        self._spans: list[tuple[str, Spans]] = []
        self._names: Counter[str] = Counter()
        self._around: Callable[[_Key, Any], Any] | None = None
        self.ran = False
        self.real = False  # the regions compute something that is there: their time means something
        self.policies: dict[_Key, str] = {}
        self.flops: dict[_Key, int] = {}
        self.collectives: dict[_Key, Counter[str]] = {}
        self.seconds: dict[_Key, float] = {}
        self.kept: dict[_Key, int] = {}

    def count(self, function: Any, args: Any, kwargs: Any) -> None:
        """FLOPs and collectives."""
        self._around = self._counting
        self._call(function, args, kwargs)

    def time(self, function: Any, args: Any, kwargs: Any) -> None:
        """Seconds."""
        self._around = self._timing
        self._call(function, args, kwargs)

    def measure(self, function: Any, args: Any, kwargs: Any) -> None:
        """Kept bytes."""
        outputs = self._call(function, args, kwargs)
        spans = [span for _, spans in self._spans for span in spans.items]
        alive = kept_bytes_by_span(spans, nodes_of(one for one in outputs if isinstance(one, Tensor)))
        for checkpoint, spans in self._spans:
            for span in spans.items:
                self.kept[checkpoint, span.name] = alive.get(id(span), 0)

    def _call(self, function: Any, args: Any, kwargs: Any) -> list[Any]:
        return Root(self._frame).run(function, args, kwargs)

    def _frame(self, *args: Any) -> ForwardFrame:
        frame = _Forced(self, self._observed, *args)
        self.ran = True
        name = display_name(frame.tape.name)
        self._names[name] += 1
        if self._names[name] > 1:  # several microbatches, say
            name = f"{name}#{self._names[name]}"
        frame.checkpoint = name
        self._spans.append((name, frame.tape.spans))
        return frame

    def region(self, key: _Key, function: Any, recompute: bool) -> tuple[Any, bool]:
        """The function to run for a region call, and its policy in this run."""
        self.policies[key] = "recompute" if recompute else "save"
        if self._around is not None:
            function = self._around(key, function)
        return function, key[1] not in self._saved

    def _counting(self, key: _Key, function: Any) -> Any:
        from torch.utils.flop_counter import FlopCounterMode

        def call(*args: Any, **kwargs: Any) -> Any:
            operations = _Operations()
            with FlopCounterMode(display=False, custom_mapping=_MORE_FLOPS) as flops, operations:
                result = function(*args, **kwargs)
            self.flops[key] = int(flops.get_total_flops())
            self.collectives[key] = operations.collectives
            self.real = self.real or operations.real
            return result

        self.flops[key], self.collectives[key] = 0, Counter()
        return call

    def _timing(self, key: _Key, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            _wait()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            _wait()
            self.seconds[key] = time.perf_counter() - start
            return result

        return call


class _Forced(ForwardFrame):
    """A forward that knows nothing of the body, hands on nothing it learns, and takes its policies from a run."""

    checkpoint = ""

    def __init__(self, run: _Run, observed: bool, *args: Any) -> None:
        super().__init__(*args)
        self._run: Any = weakref.ref(run)
        self.known = Known()
        self.plans = []
        self.observer = None
        if observed:
            self.observer = Observer(self.tape)
            self.observer.inputs(self.leaves)

    @eager_only("a region of a torch_remat.checkpoint that runs eagerly is no part of a graph.")
    def call_region(self, function: Any, name: str, recompute: bool, args: Any, kwargs: Any) -> Any:
        """Run the region under the policy of the run."""
        run = self._run()
        if run is not None:
            function, recompute = run.region((self.checkpoint, qualified(name)), function, recompute)
        return super().call_region(function, name, recompute, args, kwargs)

    def plan_of(self, outputs: list[Any]) -> Plan | None:
        """As ever; random numbers without a state hook are no matter."""
        plan = super().plan_of(outputs)
        return None if plan is None else dataclasses.replace(plan, random=None)  # there is no replay

    def drop_unneeded(self, record: Region, step: Step) -> None:
        """Also drop what only a placeholder's absence keeps: fake tensors have none, the real ones would."""
        super().drop_unneeded(record, step)
        for position, output in enumerate(record.outputs):
            if output.kind is OutputKind.KEPT and position not in step.keep and type(output.data) is FakeTensor:
                output.kind, output.data = OutputKind.PLACEHOLDER, None


class _Operations(TorchDispatchMode):
    """Counts collectives by name, and notes whether there is any data.

    The innermost mode of a counted region: it has subclasses such as ``DTensor`` do their part first, so that it and
    the FLOP counter below it see what this rank computes and sends, not what the whole mesh does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.real = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if getattr(func, "namespace", None) in _COLLECTIVES:
            name = func._schema.name.partition("::")[2].strip("_")
            if not name.startswith(("wait", "wrap")):
                self.collectives[name] += 1
        result = func(*args, **(kwargs or {}))
        if not self.real:
            self.real = any(one.device.type != "meta" and type(one) is not FakeTensor for one in tensors_in((result,)))
        return result


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _Progress:
    """A bar on the terminal, from two seconds on."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._start = time.monotonic()
        self._shown = False

    def __enter__(self) -> _Progress:
        return self

    def advance(self) -> None:
        """One more step begins."""
        self._done += 1
        if sys.stderr is not None and sys.stderr.isatty() and time.monotonic() - self._start > 2:
            self._shown = True
            filled = 30 * self._done // self._steps
            bar = "#" * filled + "-" * (30 - filled)
            sys.stderr.write(f"\rprofiling regions [{bar}] {self._done}/{self._steps}")
            sys.stderr.flush()

    def __exit__(self, *error: object) -> None:
        """Take the bar away."""
        if self._shown:
            sys.stderr.write("\r" + " " * 64 + "\r")
            sys.stderr.flush()
