"""What TensorBoard's page of custom scalars shows when it is opened: all ranks in one chart, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorboard.plugins.custom_scalar import layout_pb2

from torch_remat_tensorboard.sample import Sample
from torch_remat_tensorboard.series import MEMORY, MOST_LINES, REPLAY, ROOT, TROUBLE, WORST, Metric, shown

__all__ = ["layout_for"]

_pb: Any = layout_pb2


def layout_for(samples: Sequence[Sample]) -> Any:
    """The charts for a job whose ranks give such samples."""
    memory = shown(MEMORY, samples)
    title = f"the {WORST} worst ranks" if len(samples) > MOST_LINES else "all ranks"
    categories = [
        (f"Memory, {title}", [_lines(metric) for metric in memory]),
        (f"Replay, {title}", [_lines(metric) for metric in REPLAY]),
        (f"Trouble, {title}", [_lines(metric) for metric in TROUBLE]),
    ]
    if len(samples) > 1:
        categories.insert(1, ("Memory, smallest, mean and largest", [_band(metric) for metric in memory]))
    if any(sample.stage is not None for sample in samples):
        categories.insert(1, ("Memory, worst rank of each stage", [_lines(metric, "stage/") for metric in memory]))
    regions = _chart("Kept after forward by region, largest over the ranks, GiB", f"{ROOT}/region_gib/.*")
    worst = _chart("The worst rank", f"{ROOT}/worst_rank")
    categories.append(("Regions, and who is worst", [regions, worst]))
    return _pb.Layout(category=[_pb.Category(title=name, chart=charts) for name, charts in categories])


def _lines(metric: Metric, group: str = "") -> Any:
    """A line for each run that has such a tag: for each rank, or stage."""
    return _chart(metric.title, f"{ROOT}/{group}{metric.name}")


def _chart(title: str, pattern: str) -> Any:
    return _pb.Chart(title=title, multiline=_pb.MultilineChartContent(tag=[f"^{pattern}$"]))


def _band(metric: Metric) -> Any:
    series = _pb.MarginChartContent.Series(
        value=f"{ROOT}/{metric.name}/mean", lower=f"{ROOT}/{metric.name}/min", upper=f"{ROOT}/{metric.name}/max"
    )
    return _pb.Chart(title=metric.title, margin=_pb.MarginChartContent(series=[series]))
