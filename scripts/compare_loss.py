"""Compare the loss and the gradient norm of every step of two torchtitan runs, digit for digit.

    python scripts/compare_loss.py RUN_A RUN_B

Each run is a folder; what is found in it is read: `rank<r>.jsonl` rows, which `python -m torch_remat_titan.train`
writes into the folder that the environment variable TORCH_REMAT_ROWS names, or TensorBoard event files, which
torchtitan writes by itself (`metrics.enable_tensorboard`), with any launcher and mode. Both hold every digit; the log
does not. Give both runs the same data, number of ranks and `debug.seed`.

Exit status 1 when a step differs, or one run lacks a step of the other.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

TAGS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}

Steps = dict[int, dict[str, float]]


class UnreadableRunError(Exception):
    """A folder that holds no run."""


def main() -> int:
    """Compare; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="folder of a run")
    first, second = parser.parse_args().runs
    try:
        one, other = read(first), read(second)
    except UnreadableRunError as error:
        print(error, file=sys.stderr)
        return 2
    found = list(differences(one, other))
    if found:
        print("\n".join(found))
        print(f"\nNOT EQUAL: {len(found)} differences between {first} and {second}")
        return 1
    steps = sum(map(len, one.values()))
    print(f"{steps} steps: loss and gradient norm equal digit for digit in {first} and {second}")
    return 0


def read(run: Path) -> dict[str, Steps]:
    """Source (a rank's file, or TensorBoard) -> step -> figures.

    Raises:
        UnreadableRunError: nothing of a run is in the folder.
    """
    rows = sorted(run.rglob("rank*.jsonl"))
    if rows:
        return {path.stem: _read_rows(path) for path in rows}
    if any(run.rglob("events.out.tfevents.*")):
        return {"tensorboard": _read_events(run)}
    raise UnreadableRunError(
        f"{run} holds neither rank*.jsonl rows nor TensorBoard event files.\n"
        f"To fix: set TORCH_REMAT_ROWS={run} for python -m torch_remat_titan.train, or --metrics.enable_tensorboard."
    )


def _read_rows(path: Path) -> Steps:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {row["step"]: {name: row[name] for name in TAGS} for row in rows}


def _read_events(run: Path) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: Steps = {}
    for path in sorted(run.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
        for name, tag in TAGS.items():
            if tag in events.Tags()["scalars"]:
                for event in events.Scalars(tag):
                    steps.setdefault(event.step, {})[name] = event.value
    return steps


def differences(one: dict[str, Steps], other: dict[str, Steps]) -> Iterator[str]:
    """What differs, in order, with all digits."""
    if set(one) != set(other):
        yield f"the runs have {', '.join(sorted(one))} and {', '.join(sorted(other))}"
        return
    for source in sorted(one):
        for step in sorted({*one[source], *other[source]}):
            figures, others = one[source].get(step), other[source].get(step)
            if figures is None or others is None:
                yield f"{source}, step {step}: only in the {'second' if figures is None else 'first'} run"
                continue
            for name in TAGS:
                # By their text, so that NaN equals NaN and 0.0 is not -0.0.
                if repr(figures.get(name)) != repr(others.get(name)):
                    yield f"{source}, step {step}, {name}: {figures.get(name)!r} and {others.get(name)!r}"


if __name__ == "__main__":
    sys.exit(main())
