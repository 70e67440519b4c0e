"""Runs thousands of random bodies with and without checkpointing and requires equal bits or an error of ours.

Usage: ``python scripts/fuzz.py COUNT [--start SEED] [--features a,b] [--minutes M] [--quiet]``. Prints a reproducer
for each failure (its seed and the body as source) and a table at the end; the exit status is the number of failures,
at most 99.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from helpers.bodies import Outcome, Program, check_program, write_program  # noqa: E402  # pyright: ignore

MODES = ("together", "together", "one by one", "grad", "double")


def run_seed(seed: int, features: frozenset[str] | None) -> tuple[Program, list[Outcome]]:
    """Draw and check the program of ``seed``.

    Raises:
        AssertionError: the program gives other bits under a checkpoint, with the program's source as a note.
    """
    rng = random.Random(seed)
    program = write_program(rng, features=features)
    rounds = 5 if program.switches else 2
    policies = [{name: rng.random() < 0.4 for name in program.regions} for _ in range(2)]
    if program.switches:  # few policies, many ways through the body: what was learned goes stale
        policies = [rng.choice(policies) for _ in range(rounds)]
    mode = rng.choice(MODES)
    try:
        return program, check_program(program, policies, mode=mode, seed=seed)
    except Exception as error:
        error.add_note(f"seed {seed}, features {sorted(program.features)}, mode {mode}\n{program.source}")
        raise


def main() -> int:
    """Run the seeds, print failures and the table of outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--features", default=None, help="comma-separated; without it each body draws its own")
    parser.add_argument("--minutes", type=float, default=None, help="stop after this many minutes")
    parser.add_argument("--quiet", action="store_true", help="no reproducers, only the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    features = None if arguments.features is None else frozenset(filter(None, arguments.features.split(",")))
    outcomes: collections.Counter[str] = collections.Counter()
    errors: collections.Counter[str] = collections.Counter()
    failures: list[int] = []
    begin = time.monotonic()
    seeds = range(arguments.start, arguments.start + arguments.count)
    done = 0
    for seed in seeds:
        if arguments.minutes is not None and time.monotonic() - begin > 60 * arguments.minutes:
            break
        done += 1
        try:
            program, results = run_seed(seed, features)
        except Exception as error:  # noqa: BLE001 - whatever a random body brings up is a finding
            failures.append(seed)
            if not arguments.quiet:
                notes = "\n".join(getattr(error, "__notes__", ()))
                print(f"--- FAILED {type(error).__name__}: {error}\n{notes}", flush=True)
            continue
        for result in results:
            outcomes[result.kind] += 1
            if result.kind == "refused":
                tags = ",".join(sorted(program.features & {"inplace", "region_inplace"})) or "no in-place"
                errors[f"{type(result.error).__name__} in {result.failed_in} ({tags})"] += 1
    print(
        f"{done} bodies in {time.monotonic() - begin:.0f} s: {dict(outcomes)}, failed: {len(failures)} {failures[:20]}"
    )
    for name, number in errors.most_common():
        print(f"  refused {number:5d} x {name}")
    return min(len(failures), 99)


if __name__ == "__main__":
    sys.exit(main())
