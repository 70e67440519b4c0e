"""The price list of regions: data, and the table that is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch_remat.diagnostics.report import Report, format_bytes
from torch_remat.diagnostics.text import compressed

__all__ = ["PriceList", "RegionPrice"]


@dataclass(frozen=True)
class RegionPrice(Report):
    """One region call.

    ``policy`` is what the code says now. ``kept_bytes`` is what the region keeps if it alone is saved: what its
    backward needs and replay cannot make, and outputs that recomputed code reads; None where ``note`` says why it
    cannot be saved. ``seconds`` (None without real data) and ``flops`` are what recomputing it costs, ``collectives``
    the names and numbers of those it issues. Nested regions are contained in the one around them.
    """

    checkpoint: str
    region: str
    policy: str
    kept_bytes: int | None
    seconds: float | None
    flops: int
    collectives: tuple[tuple[str, int], ...]
    note: str | None = None


@dataclass(frozen=True)
class PriceList(Report):
    """What :func:`~torch_remat.profile_regions` returns."""

    regions: tuple[RegionPrice, ...]

    def format(self) -> str:
        """A table; checkpoints with equal prices in bytes and FLOPs share their lines, with the mean of their times."""
        lines: list[tuple[str, ...]] = []
        for names, members in self._groups():
            title = compressed(names) + (f" (x{len(names)})" if len(names) > 1 else "")
            for row in zip(*members, strict=True):
                first = row[0]
                times = [one.seconds for one in row if one.seconds is not None]
                lines.append(
                    (
                        title,
                        first.region,
                        first.policy,
                        "-" if first.kept_bytes is None else format_bytes(first.kept_bytes),
                        _time(sum(times) / len(times)) if times else "-",
                        _count(first.flops),
                        ", ".join(f"{count} {name}" for name, count in first.collectives) or "-",
                        first.note or "",
                    )
                )
                title = ""
        return "\n".join(_aligned([_HEAD, *lines]))

    def __str__(self) -> str:
        return self.format()

    def _groups(self) -> list[tuple[list[str], list[list[RegionPrice]]]]:
        by_checkpoint: dict[str, list[RegionPrice]] = {}
        for price in self.regions:
            by_checkpoint.setdefault(price.checkpoint, []).append(price)
        groups: dict[object, tuple[list[str], list[list[RegionPrice]]]] = {}
        for name, prices in by_checkpoint.items():
            key = tuple((one.region, one.policy, one.kept_bytes, one.flops, one.collectives) for one in prices)
            names, members = groups.setdefault(key, ([], []))
            names.append(name)
            members.append(prices)
        return list(groups.values())


_HEAD = ("checkpoint", "region", "now", "kept if saved", "time if not", "FLOPs", "collectives", "")
_NUMBERS = (3, 4, 5)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column in _NUMBERS else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _count(flops: int) -> str:
    size = float(flops)
    for unit in ("", " K", " M", " G", " T"):
        if size < 1000:
            return f"{size:.0f}{unit}" if unit == "" else f"{size:.2f}{unit}"
        size /= 1000
    return f"{size:.2f} P"
