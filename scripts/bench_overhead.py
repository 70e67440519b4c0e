"""What checkpointing costs in a launch-bound model: whole steps, against what else there is.

The stack: 8 blocks of two LayerNorms, four Linears (qkv, wo, w1, w2), attention (scaled_dot_product_attention, 2
heads) and GELU; width 16; 8 tokens; one CPU thread. So small that a step is the time of Python and of the dispatcher. A
step is forward and backward of the sum of the outputs; the gradients are dropped outside the clock. Three regions
saved: the attention core, wo and w1.

All cases of a process run interleaved, one step each in turn. The released 0.2.2 runs in a process of its own, with the
same model without checkpointing in it, so that each ratio is taken within one process; the processes take turns, round
by round. A case's time is the median of all its steps, its ratio the quotient of two such medians. The noise is shown
by the middle half (the quartiles) of the ratios of single rounds. Before a case is timed, its gradients are compared
with those without checkpointing, bit for bit.

The clock is the process's CPU time: all work is done by one thread, and what other processes take of a shared machine
is no cost of ours. `--clock wall` takes the wall clock.

A second table times small bodies; a third derives the cost of one checkpoint, one region and one save from it.

Exit status 0, or with `--check` 1 when a case misses its target.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench_common import (
    Worker,
    add_peer_options,
    failure_cell,
    machine,
    middle_half,
    serve,
    start_workers,
    table,
)
from bench_overhead_cases import (
    BITWISE,
    CLOCKS,
    NONE_SAVED,
    OWN_CASES,
    PLAIN,
    SAC,
    SMALL,
    TORCH,
    Small,
    worker,
)

TARGET = 2.1
"""What a step with our checkpoints may take of a step without checkpointing."""


@dataclass(frozen=True)
class Timed:
    """One case's figures.

    Attributes:
        step_us: median of all its steps.
        ratio: of the same process's steps without checkpointing, medians of all steps.
        low, high: middle half of the ratios of single rounds.
    """

    step_us: float
    ratio: float
    low: float
    high: float


# The parent: rounds and tables ----------------------------------------------------------------------------------------

Rounds = dict[str, list[list[float]]]
"""Case -> for each round its steps, in microseconds."""


def run_rounds(workers: dict[str, Worker], name: str, rounds: int, steps: int) -> dict[str, Rounds]:
    """Time the cases of set `name` in every worker, the workers in turn."""
    found: dict[str, Rounds] = {side: {} for side in workers}
    for number in range(rounds):
        # Every other round the other way round: none always follows the same one.
        for side in list(workers)[:: 1 if number % 2 == 0 else -1]:
            for case, times in workers[side].ask({"do": "run", "set": name, "steps": steps}).items():
                found[side].setdefault(case, []).append(times)
    return found


def timed(rounds: Rounds, case: str, base: str = PLAIN) -> Timed:
    """The figures of `case` against `base`."""
    step = median(time for one in rounds[case] for time in one)
    base_step = median(time for one in rounds[base] for time in one)
    ratios = [median(mine) / median(theirs) for mine, theirs in zip(rounds[case], rounds[base], strict=True)]
    return Timed(step, step / base_step, *middle_half(ratios))


def missed_targets(rounds: Rounds) -> list[str]:
    """What of our cases misses its target, a line each."""
    lines = []
    for case in OWN_CASES["ours"]:
        if case == BITWISE:  # for finding faults: no target
            continue
        if case not in rounds:
            lines.append(f"{case}: does not run")
            continue
        ratio = timed(rounds, case).ratio
        if ratio > TARGET:
            lines.append(f"{case}: {ratio:.2f}x, {ratio - TARGET:.2f}x over {TARGET}x")
        if case != NONE_SAVED and ratio >= timed(rounds, TORCH).ratio:
            lines.append(f"{case}: {ratio:.2f}x, not under {TORCH}")
    return lines


def stack_table(found: dict[str, Rounds], failed: dict[tuple[str, str], str]) -> str:
    """The first table; `failed` says why a case was not timed."""
    rows = []
    for side, library in (("ours", "torch"), ("peer", "torch_remat 0.2.2"), ("ours", "torch_remat")):
        if side not in found:
            continue
        cases = (PLAIN, TORCH, SAC) if library == "torch" else OWN_CASES[side]
        for case in cases:
            title = case if library == "torch" else f"{library}, {case}"
            target = ""
            if library == "torch_remat" and case != BITWISE:
                target = f"<= {TARGET}x" if case == NONE_SAVED else f"<= {TARGET}x, under {TORCH}"
            if case in found[side]:
                figures = timed(found[side], case)
                cells = [
                    f"{figures.step_us:.0f}",
                    f"{figures.ratio:.2f}x",
                    f"{figures.low:.2f}-{figures.high:.2f}",
                ]
            else:
                cells = [failure_cell(failed[side, case]), "", ""]
            rows.append([title, *cells, target])
    return table(("case", "step, us", "of no checkpointing", "middle half", "must be"), rows)


COLUMNS = {"plain": PLAIN, "torch": TORCH, "sac": "SAC", "peer": "0.2.2", "ours": "torch_remat"}


def small_medians(found: dict[str, Rounds]) -> dict[tuple[str, str], float]:
    """(row title, column) -> median microseconds; `plain` is the one of our worker."""
    medians = {}
    for side in ("peer", "ours"):
        for name, rounds in found.get(side, {}).items():
            title, column = name.split("|")
            medians[title, column] = median(time for one in rounds for time in one)
    return medians


def small_table(
    medians: dict[tuple[str, str], float], failed: dict[tuple[str, str], str], columns: Sequence[str]
) -> str:
    """The second table: microseconds of small bodies."""
    rows = []
    for row in SMALL:
        cells = []
        for column in columns:
            value = medians.get((row.title, column))
            why = failed.get(("peer" if column == "peer" else "ours", f"{row.title}|{column}"))
            cells.append(f"{value:.0f}" if value is not None else failure_cell(why) if why else "")
        rows.append([row.title, *cells])
    return table(("us per step", *(COLUMNS[column] for column in columns)), rows)


def unit_costs(medians: dict[tuple[str, str], float], column: str) -> dict[str, float]:
    """Microseconds of one checkpoint, op, region and save beyond no checkpointing, as far as `column` has the rows.

    One checkpoint: two bare ops, of which one replay is part. The others are slopes between a short and a long chain.
    """

    def slope(short: Small, long: Small) -> float | None:
        ends = [medians.get((row.title, of)) for row in (long, short) for of in (column, "plain")]
        if None in ends:
            return None
        mine, base, my_short, base_short = (end for end in ends if end is not None)
        return ((mine - my_short) - (base - base_short)) / (long.ops - short.ops)

    two = medians.get((SMALL[0].title, column))
    costs = {
        "a checkpoint (2 bare ops replayed)": None if two is None else two - medians[SMALL[0].title, "plain"],
        "a bare op replayed": slope(SMALL[1], SMALL[2]),
        "an op in a SAVE region of its own": slope(SMALL[3], SMALL[4]),
        "an op in a RECOMPUTE region of its own": slope(SMALL[5], SMALL[6]),
        "a further save in a SAVE region": slope(SMALL[8], SMALL[9]),
    }
    if column == "torch":  # it has no regions: its chains are bare ops whatever the row says
        costs = dict(list(costs.items())[:2])
    if column == "sac":
        costs = {key: costs[key] for key in ("an op in a SAVE region of its own",)}
    return {key: value for key, value in costs.items() if value is not None}


def unit_table(medians: dict[tuple[str, str], float], columns: Sequence[str]) -> str:
    """The third table: what one more of each costs."""
    costs = {column: unit_costs(medians, column) for column in columns if column != "plain"}
    rows = [
        [row, *(f"{costs[column][row]:.1f}" if row in costs[column] else "" for column in costs)]
        for row in max(costs.values(), key=len)
    ]
    return table(("us beyond no checkpointing", *(COLUMNS[column] for column in costs)), rows)


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    add_peer_options(parser)
    parser.add_argument("--rounds", type=int, default=24, help="rounds of each process (default 24)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each case in a round (default 20)")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu", help="what a step is timed by (default cpu)")
    parser.add_argument("--check", action="store_true", help="exit with status 1 when a case misses its target")
    options = parser.parse_args()
    if options.worker:
        return serve(lambda: worker(options.worker, options.clock))

    workers = start_workers(__file__, options, ["--clock", options.clock])
    try:
        failed = {
            (side, case): why
            for side, one in workers.items()
            for name in ("stack", "small")
            for case, why in one.ask({"do": "failed", "set": name}).items()
        }
        stack = run_rounds(workers, "stack", options.rounds, options.steps)
        small = run_rounds(workers, "small", options.rounds, options.steps)
        steps = options.rounds * options.steps
        print(f"{machine(workers['ours'].info)}; {steps} steps of each case, {options.clock} time\n")
    finally:
        for one in workers.values():
            one.close()

    print(stack_table(stack, failed) + "\n")
    base = timed(stack["ours"], PLAIN)
    print(f"no checkpointing: {base.step_us:.0f} us in our process", end="")
    print(f", {timed(stack['peer'], PLAIN).step_us:.0f} us in that of 0.2.2" if "peer" in stack else "")
    missed = missed_targets(stack["ours"])
    print("short of the target: " + ("; ".join(missed) if missed else "none"))
    columns = [column for column in COLUMNS if column != "peer" or "peer" in workers]
    medians = small_medians(small)
    print("\n" + small_table(medians, failed, columns))
    print("\n" + unit_table(medians, columns))
    reasons: dict[str, list[str]] = {}
    for (side, case), why in failed.items():
        name = case.split("|")[0]
        reasons.setdefault(why, []).append(f"{'torch_remat 0.2.2' if side == 'peer' else 'torch_remat'}, {name}")
    for why, cases in reasons.items():
        print(f"\n{len(cases)} case(s) not timed, {cases[0]} first: {why}")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
