"""From the samples of all ranks to the lines of the charts: plain functions of plain values.

Up to `MOST_LINES` ranks each has a line in every chart. Above, a chart has the worst `WORST` ranks, and for all of them
smallest, mean and largest value. The worst rank is the one that is nearest to running out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_remat_tensorboard.sample import Sample

__all__ = [
    "ALL",
    "MEMORY",
    "MOST_LINES",
    "REPLAY",
    "ROOT",
    "TROUBLE",
    "WORST",
    "Metric",
    "scalars",
    "shown",
    "worst_first",
]

ROOT = "remat"
"""All tags begin with this."""

ALL = "all_ranks"
"""Run of what is said of all ranks together."""

MOST_LINES = 32
"""The most ranks that are shown one by one."""

WORST = 4
"""How many of the worst ranks are shown where there are more."""

_GIB = 2**30


@dataclass(frozen=True)
class Metric:
    """One figure of a sample, as charts show it.

    Attributes:
        name: part of its tags; ends in its unit.
        title: of its charts.
        value: of a sample; None where the rank has no such figure.
    """

    name: str
    title: str
    value: Callable[[Sample], float | None]


def _size(name: str, title: str, size: Callable[[Sample], int | None]) -> tuple[Metric, Metric]:
    """A number of bytes in GiB, and beside it as a share of the capacity."""

    def gib(sample: Sample) -> float | None:
        found = size(sample)
        return None if found is None else found / _GIB

    return (
        Metric(f"{name}_gib", f"{title}, GiB", gib),
        Metric(f"{name}_percent", f"{title}, % of capacity", lambda sample: sample.percent(size(sample))),
    )


MEMORY: tuple[Metric, ...] = (
    *_size("kept", "Kept by checkpoints after forward", lambda sample: sample.kept_bytes),
    *_size("rebuilt", "Rebuilt at the peak of replay", lambda sample: sample.rebuilt_bytes),
    *_size("allocated", "Allocated on the device, peak", lambda sample: sample.allocated_bytes),
    *_size("reserved", "Reserved by the allocator", lambda sample: sample.reserved_bytes),
    *_size("resident", "Resident set of the process", lambda sample: sample.resident_bytes),
    *_size("offloaded", "Packed by hooks, offloaded", lambda sample: sample.offloaded_bytes),
)
"""Sizes. They are also shown as smallest, mean and largest of all ranks, and as the largest of each stage."""

REPLAY: tuple[Metric, ...] = (
    Metric("replay_ms", "Replay, ms per step", lambda sample: 1e3 * sample.replay_seconds),
    Metric(
        "replay_percent",
        "Replay, % of the step",
        lambda sample: 100 * sample.replay_seconds / sample.seconds if sample.seconds else 0.0,
    ),
    Metric("replays", "Replays", lambda sample: sample.replays),
    Metric("step_ms", "Step, ms", lambda sample: 1e3 * sample.seconds),
)
"""What replays cost."""

TROUBLE: tuple[Metric, ...] = (
    Metric("retries", "Allocator retries", lambda sample: sample.retries),
    Metric("out_of_memory", "Out-of-memory events", lambda sample: sample.out_of_memory),
)
"""What should not happen."""


def shown(metrics: Sequence[Metric], samples: Sequence[Sample]) -> list[Metric]:
    """Those of the metrics that some rank has a figure for."""
    return [metric for metric in metrics if any(metric.value(sample) is not None for sample in samples)]


def worst_first(samples: Sequence[Sample]) -> list[Sample]:
    """The ranks, the one nearest to running out of memory first.

    By the allocator's peak as a share of the device; on the CPU, whose resident set is mostly other things, by what
    checkpoints keep and replays rebuild.
    """

    def pressure(sample: Sample) -> float:
        if sample.allocated_bytes is not None:
            return sample.percent(sample.allocated_bytes) or 0.0
        return sample.kept_bytes + sample.rebuilt_bytes

    return sorted(samples, key=lambda sample: (-pressure(sample), sample.rank))


def scalars(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """The points of one step: name of the run -> tag -> value.

    A rank is a run, so TensorBoard draws one chart for all of them, each in a colour of its own; so is a stage. What is
    said of all ranks together is the run `ALL`.
    """
    worst = worst_first(samples)
    memory = shown(MEMORY, samples)
    points: dict[str, dict[str, float]] = {ALL: _of_all(samples, memory, worst)}
    for name, sample in _lines(samples, worst).items():
        figures = {f"{ROOT}/{metric.name}": metric.value(sample) for metric in (*memory, *REPLAY, *TROUBLE)}
        points[name] = {tag: value for tag, value in figures.items() if value is not None}
    stages: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.stage is not None:
            stages.setdefault(sample.stage, []).append(sample)
    for stage, members in sorted(stages.items()):
        figures = {f"{ROOT}/stage/{metric.name}": max(_values(metric, members), default=None) for metric in memory}
        points[f"stage_{stage}"] = {tag: value for tag, value in figures.items() if value is not None}
    return points


def _of_all(samples: Sequence[Sample], memory: Sequence[Metric], worst: Sequence[Sample]) -> dict[str, float]:
    points: dict[str, float] = {f"{ROOT}/worst_rank": worst[0].rank}
    for metric in memory if len(samples) > 1 else ():
        values = _values(metric, samples)
        points[f"{ROOT}/{metric.name}/min"] = min(values)
        points[f"{ROOT}/{metric.name}/mean"] = sum(values) / len(values)
        points[f"{ROOT}/{metric.name}/max"] = max(values)
    regions: dict[str, int] = {}
    for sample in samples:
        for label, size in sample.regions:
            regions[label] = max(size, regions.get(label, 0))
    points.update({f"{ROOT}/region_gib/{label}": size / _GIB for label, size in regions.items()})
    return points


def _lines(samples: Sequence[Sample], worst: Sequence[Sample]) -> dict[str, Sample]:
    """The ranks that have a line of their own, by the name of its run."""
    if len(samples) <= MOST_LINES:
        width = len(str(len(samples) - 1))
        return {f"rank_{sample.rank:0{width}d}": sample for sample in samples}
    return {f"worst_{place}": sample for place, sample in enumerate(worst[:WORST], 1)}


def _values(metric: Metric, samples: Sequence[Sample]) -> list[float]:
    return [value for sample in samples if (value := metric.value(sample)) is not None]
