"""The text of a step: which rank is worst, what it holds, and its largest regions."""

from __future__ import annotations

from collections.abc import Sequence

from torch_remat.diagnostics.report import format_bytes
from torch_remat_tensorboard.sample import Sample
from torch_remat_tensorboard.series import MOST_LINES, WORST, worst_first

__all__ = ["step_report"]

_MOST_REGIONS = 8


def step_report(step: int, samples: Sequence[Sample]) -> str:
    """The report as Markdown."""
    ordered = worst_first(samples)
    worst = ordered[0]
    stage = "" if worst.stage is None else f" (stage {worst.stage})"
    lines = [
        f"**Step {step}: rank {worst.rank}{stage} is the worst of {len(samples)}**",
        "",
        f"| rank {worst.rank} | bytes | of capacity |",
        "|---|---:|---:|",
        *(_row(title, size, worst) for title, size in _sizes(worst)),
        "",
        _times(worst),
        "",
        "| largest regions | kept | of what it keeps |",
        "|---|---:|---:|",
        *(
            f"| {_escaped(label)} | {format_bytes(size)} | {100 * size / worst.kept_bytes:.1f} % |"
            for label, size in worst.regions[:_MOST_REGIONS]
        ),
    ]
    if len(samples) > MOST_LINES:
        others = ", ".join(f"{sample.rank} ({format_bytes(sample.kept_bytes)} kept)" for sample in ordered[:WORST])
        lines += ["", f"Worst ranks: {others}."]
    return "\n".join(lines)


def _times(sample: Sample) -> str:
    return (
        f"{sample.replays} replays took {1e3 * sample.replay_seconds:.1f} ms of {1e3 * sample.seconds:.1f} ms; "
        f"{sample.retries} allocator retries, {sample.out_of_memory} out-of-memory events."
    )


def _sizes(sample: Sample) -> list[tuple[str, int]]:
    sizes = (
        ("kept by checkpoints after forward", sample.kept_bytes),
        ("rebuilt at the peak of replay", sample.rebuilt_bytes),
        ("packed by hooks, offloaded", sample.offloaded_bytes),
        ("allocated on the device, peak", sample.allocated_bytes),
        ("reserved by the allocator", sample.reserved_bytes),
        ("resident set of the process", sample.resident_bytes),
        ("capacity", sample.capacity_bytes),
    )
    return [(title, size) for title, size in sizes if size is not None]


def _row(title: str, size: int, sample: Sample) -> str:
    percent = sample.percent(size)
    return f"| {title} | {format_bytes(size)} | {'' if percent is None else f'{percent:.1f} %'} |"


def _escaped(label: str) -> str:
    return f"`{label}`".replace("|", "\\|")
