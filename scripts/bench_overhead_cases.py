"""The cases of `bench_overhead.py`, as one of its workers runs them: models, steps, clocks.

torch and the library under test are imported inside the functions: the parent process, which only asks for figures and
prints them, reads the names from here and loads neither.
"""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

from bench_common import one_line, sac_contexts

Step = Callable[[], float]
"""Runs one step and returns its seconds."""

PLAIN = "no checkpointing"
TORCH = "torch.utils.checkpoint"
SAC = "selective (SAC): matmuls, attention saved"
NONE_SAVED = "no region saved"
THREE_SAVED = "three regions saved"
ANNOTATED = "three regions saved, annotated"
BITWISE = "three regions saved, values compared"
OWN_CASES = {"ours": (NONE_SAVED, THREE_SAVED, ANNOTATED, BITWISE), "peer": (NONE_SAVED, ANNOTATED)}
WARM_UP_STEPS = 10
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}
clock = CLOCKS["cpu"]
"""Seconds; a worker sets it before its first step."""


def _block(save: Callable[..., Any], needed: Callable[..., Any]) -> Any:
    """A transformer block: attention core, wo and w1 go through `save`; `needed` gets what recomputed code reads."""
    import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self, width: int = 16, heads: int = 2) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.w1, self.w2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            batch, tokens, width = x.shape
            fused = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
            q, k, v = fused.permute(2, 0, 3, 1, 4).unbind(0)
            core = save(F.scaled_dot_product_attention, "core")(q, k, v)
            projected = save(self.wo, "wo")(core.transpose(1, 2).reshape(batch, tokens, width))
            needed(projected)
            x = x + projected
            hidden = save(self.w1, "w1")(self.norm2(x))
            needed(hidden)
            return x + self.w2(F.gelu(hidden))

    return Block()


class StackCase:
    """One case of the launch-bound stack: the model and its step."""

    def __init__(self, kind: str, own: bool, blocks: int = 8) -> None:
        """`own`: the case is one of the library's, else one of torch's or without checkpointing."""
        import torch

        import torch_remat as remat

        save, needed = (lambda function, name: function), (lambda tensor: None)
        if own and kind != NONE_SAVED:
            save = lambda function, name: remat.region(function, name, recompute=False)
        if own and kind == ANNOTATED:
            needed = remat.recompute_needs_tensor
        torch.manual_seed(0)
        self._kind, self._own = kind, own
        self._blocks = [_block(save, needed) for _ in range(blocks)]
        self._x = torch.randn(1, 8, 16, requires_grad=True)
        self.leaves = [self._x, *(parameter for block in self._blocks for parameter in block.parameters())]
        self._sac = sac_contexts()

    def _run(self, index: int, block: Any, x: Any) -> Any:
        if self._own:
            import torch_remat as remat

            check = "bitwise" if self._kind == BITWISE else "default"
            return remat.checkpoint(region_name=f"layers.{index}", determinism_check=check)(block)(x)
        if self._kind == PLAIN:
            return block(x)
        from torch.utils.checkpoint import checkpoint

        if self._kind == TORCH:
            return checkpoint(block, x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=False, context_fn=self._sac)

    def step(self) -> float:
        """One step; returns its seconds, leaves gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        start = clock()
        x = self._x
        for index, block in enumerate(self._blocks):
            x = self._run(index, block, x)
        x.sum().backward()
        return clock() - start


def stack_cases(side: str, blocks: int = 8) -> tuple[dict[str, Step], dict[str, str]]:
    """The cases of a worker that run and give the right gradients, and why the others do not."""
    import torch

    kinds = [(PLAIN, False), *((kind, True) for kind in OWN_CASES[side])]
    if side == "ours":
        kinds[1:1] = [(TORCH, False), (SAC, False)]
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    expected: list[Any] = []
    for kind, own in kinds:
        case = StackCase(kind, own, blocks)
        try:
            for _ in range(WARM_UP_STEPS):
                case.step()
        except Exception as error:  # noqa: BLE001  (whatever a library raises is what its row shows)
            failed[kind] = one_line(error)
            continue
        gradients = [leaf.grad for leaf in case.leaves]
        expected = expected or gradients
        if all(torch.equal(mine, wanted) for mine, wanted in zip(gradients, expected, strict=True)):
            steps[kind] = case.step
        else:
            failed[kind] = "its gradients differ from those without checkpointing"
    return steps, failed


class Small:
    """A row of the second table: a chain of `sin` in some form."""

    def __init__(self, ops: int, form: str, backward: bool = True) -> None:
        """`form`: `bare`, `save` or `recompute` (one region per op), `one save` (all ops in one region)."""
        self.ops, self.form, self.backward = ops, form, backward

    @property
    def title(self) -> str:
        """The row's first cell."""
        form = {
            "bare": f"{self.ops} bare ops",
            "save": f"{self.ops} ops, a SAVE region each",
            "recompute": f"{self.ops} ops, a RECOMPUTE region each",
            "one save": f"one SAVE region with {self.ops} ops",
        }[self.form]
        return form if self.backward else f"{form}, forward only"

    def steps(self, side: str) -> dict[str, Step]:
        """Step by column of the table."""
        import torch
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        import torch_remat as remat

        x = torch.randn(4, 4, requires_grad=True)
        names = [f"sin{index}" for index in range(self.ops)]

        def bare(t: Any) -> Any:
            for _ in names:
                t = t.sin()
            return t

        def regions(t: Any) -> Any:
            recompute = self.form == "recompute"
            for name in names:
                t = remat.region(torch.sin, name, recompute=recompute)(t)
            return t

        def one_region(t: Any) -> Any:
            return remat.region(bare, "all", recompute=False)(t)

        body = bare if self.form == "bare" else one_region if self.form == "one save" else regions
        calls: dict[str, Callable[[], Any]] = {
            "plain": lambda: bare(x),
            side: lambda: remat.checkpoint(region_name="small")(body)(x),
        }
        if side == "ours":
            calls["torch"] = lambda: checkpoint(bare, x, use_reentrant=False)
            if self.form == "save":
                save_all = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
                calls["sac"] = lambda: checkpoint(bare, x, use_reentrant=False, context_fn=save_all)
        return {column: functools.partial(self._timed, call, x) for column, call in calls.items()}

    def _timed(self, call: Callable[[], Any], x: Any) -> float:
        x.grad = None
        start = clock()
        out = call()
        if self.backward:
            out.backward(out)
        return clock() - start


SMALL = (
    Small(2, "bare"),
    Small(10, "bare"),
    Small(20, "bare"),
    Small(10, "save"),
    Small(20, "save"),
    Small(10, "recompute"),
    Small(20, "recompute"),
    Small(10, "save", backward=False),
    Small(10, "one save"),
    Small(100, "one save"),
)


def small_cases(side: str) -> tuple[dict[str, Step], dict[str, str]]:
    """As `stack_cases`, for the second table; a case is called `title|column`."""
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    for row in SMALL:
        for column, step in row.steps(side).items():
            try:
                for _ in range(WARM_UP_STEPS):
                    step()
            except Exception as error:  # noqa: BLE001  (as above)
                failed[f"{row.title}|{column}"] = one_line(error)
            else:
                steps[f"{row.title}|{column}"] = step
    return steps, failed


def worker(side: str, clock_name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a worker answers: which cases run, and rounds of steps of all of them in turn."""
    global clock
    clock = CLOCKS[clock_name]
    made = {"stack": stack_cases(side), "small": small_cases(side)}
    gc.collect()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        steps, failed = made[request["set"]]
        if request["do"] == "failed":
            return failed
        times: dict[str, list[float]] = {case: [] for case in steps}
        for _ in range(request["steps"]):
            for case, step in steps.items():
                if request["set"] == "small":
                    step()  # so small that the case before it would leave its mark: let each follow itself
                times[case].append(step() * 1e6)
        return times

    return handle
