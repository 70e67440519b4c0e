"""Step time and kept bytes of a Llama-like stack, eager and compiled: none, full, SAC, regions, memory budget.

    python scripts/bench_compile.py                        compiled with Inductor (needs a C++ compiler)
    python scripts/bench_compile.py --backend aot_eager    the partitioner alone: bytes mean the same, times do not

All cases run in one process and are timed in turn, round by round. Kept bytes are what forward allocates and what is
still there after it, output excepted, as torch's profiler counts them; so the input of the first layer is not in them.
"""

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from bench_common import machine, middle_half, sac_contexts, table
from bench_memory_cases import PLAIN, SAC, SAVED, TORCH, Shape, _layer

BUDGET = "memory budget API, 0.5"
SAC_FIVE = "selective (SAC): what the five regions do"
CASES = (PLAIN, TORCH, SAC, SAC_FIVE, SAVED, BUDGET)
WARM_UP = 3


class Stack:
    """The layers of one case, compiled or not, and its steps."""

    def __init__(self, case: str, shape: Shape, backend: str | None) -> None:
        import torch

        import torch_remat as remat

        save: Callable[..., Any] = lambda function, name: function
        if case == SAVED:
            save = lambda function, name: remat.region(function, name, recompute=False)
        torch.manual_seed(0)
        self.layers = [_layer(shape, save, lambda *tensors: None) for _ in range(shape.layers)]
        self.x = torch.randn(shape.batch, shape.seq, shape.dim, requires_grad=True)
        self.gradient = torch.ones_like(self.x)
        self.case = case
        contexts = {SAC: sac_contexts(), SAC_FIVE: _sac_of_the_regions}.get(case)
        checkpoint = torch.utils.checkpoint.checkpoint

        def call(layer: Any, x: Any) -> Any:
            if case == TORCH:
                return checkpoint(layer, x, use_reentrant=False)
            if contexts is not None:
                return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            if case == SAVED:
                return remat.checkpoint(region_name="layer")(layer)(x)
            return layer(x)

        self.call = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)

    def forward(self) -> Any:
        """The output of the stack."""
        x = self.x
        with _budget(0.5 if self.case == BUDGET else None):
            for layer in self.layers:
                x = self.call(layer, x)
        return x

    def step(self) -> None:
        """One forward and backward."""
        self.x.grad = None
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)
        self.forward().backward(self.gradient)

    def kept_bytes(self) -> int:
        """What one forward leaves behind, without its output."""
        import torch

        gc.collect()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            output = self.forward()
        kept = sum(event.self_cpu_memory_usage for event in profile.events() or ()) - output.nbytes
        output.backward(self.gradient)
        return int(kept)

    def gradients(self) -> list[Any]:
        """Of the input and of every parameter, after a step."""
        return [self.x.grad, *(parameter.grad for layer in self.layers for parameter in layer.parameters())]


def _sac_of_the_regions() -> Any:
    """Contexts that save attention and every matrix product but the first three: a policy per operator has to count."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    products: dict[bool, int] = {True: 0, False: 0}  # in the recomputation and in forward

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is aten._scaled_dot_product_flash_attention_for_cpu.default:
            return CheckpointPolicy.MUST_SAVE
        if op in (aten.mm.default, aten.addmm.default):
            products[context.is_recompute] += 1
            if products[context.is_recompute] > 3:  # not query, key and value
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@contextlib.contextmanager
def _budget(value: float | None) -> Iterator[None]:
    import torch._functorch.config as config

    with contextlib.nullcontext() if value is None else config.patch(activation_memory_budget=value):
        yield


def run(shape: Shape, backend: str, rounds: int) -> str:
    """Measure every case; returns the table."""
    import torch
    import torch._dynamo.config

    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one function for every case and layer
    stacks: dict[tuple[str, str | None], Stack] = {}
    for case in CASES:
        for how in (None, backend):
            if case == BUDGET and how is None:
                continue  # it is the compiler's
            print(f"{case}, {how or 'eager'} ...", file=sys.stderr, flush=True)
            stack = stacks[case, how] = Stack(case, shape, how)
            for _ in range(WARM_UP):
                stack.step()
    expected = stacks[PLAIN, None].gradients()
    for (case, how), stack in stacks.items():
        stack.step()
        if not all(
            torch.allclose(*pair, rtol=1e-3, atol=1e-4) for pair in zip(stack.gradients(), expected, strict=True)
        ):
            raise RuntimeError(f"{case}, {how or 'eager'}: its gradients differ from those without checkpointing.")
    times: dict[tuple[str, str | None], list[float]] = {key: [] for key in stacks}
    for _ in range(rounds):
        for key, stack in stacks.items():
            start = time.perf_counter()
            stack.step()
            times[key].append(time.perf_counter() - start)
    rows = []
    for key, stack in stacks.items():
        low, high = middle_half(times[key])
        kept = stack.kept_bytes()
        rows.append(
            [
                key[0],
                key[1] or "eager",
                f"{median(times[key]) * 1e3:.1f}",
                f"{low * 1e3:.1f} .. {high * 1e3:.1f}",
                f"{kept / shape.layers:,.0f}",
                f"{kept / shape.layers / shape.residual_bytes:.2f}",
            ]
        )
    header = ["case", "run by", "step, ms", "middle half", "kept bytes a layer", "in [batch, seq, dim]"]
    return table(header, rows, left=2)


def main() -> int:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default inductor)")
    parser.add_argument("--rounds", type=int, default=20, help="steps timed for each case (default 20)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=688)
    options = parser.parse_args()
    import torch

    shape = Shape(seq=options.seq, dim=options.dim, hidden=options.hidden, layers=options.layers)
    result = run(shape, options.backend, options.rounds)
    info = {"torch": torch.__version__, "python": sys.version.split()[0]}
    print(f"{machine(info)}\n{shape}\n\n{result}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
