"""A picture of who keeps what: a row per rank, a column per region, the darker the more."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from torch_remat.diagnostics.report import format_bytes
from torch_remat_tensorboard.sample import OTHERS, Sample
from torch_remat_tensorboard.series import MOST_LINES, worst_first

__all__ = ["columns_of", "heatmap", "rows_of"]

MOST_COLUMNS = 16

_CELL_WIDTH, _CELL_HEIGHT, _GAP = 92, 26, 6
_WHITE, _INK = (255, 255, 255), (20, 24, 40)
_LIGHT, _DARK = (237, 243, 251), (8, 48, 107)


def rows_of(samples: Sequence[Sample]) -> list[Sample]:
    """The ranks that have a row: all, or the worst, in the order of their numbers."""
    return sorted(worst_first(samples)[:MOST_LINES], key=lambda sample: sample.rank)


def columns_of(samples: Sequence[Sample]) -> list[str]:
    """The regions that have a column: the largest ones, by what all ranks together keep for them; by name."""
    totals: dict[str, int] = {}
    for sample in samples:
        for label, size in sample.regions:
            totals[label] = totals.get(label, 0) + size
    largest = sorted(totals, key=lambda label: (-totals[label], label))[:MOST_COLUMNS]
    return sorted(largest, key=lambda label: (label == OTHERS, label))


def heatmap(samples: Sequence[Sample]) -> tuple[bytes, tuple[int, int]]:
    """The picture as a PNG, and its size."""
    rows, columns = rows_of(samples), columns_of(samples)
    worst = worst_first(samples)[0].rank
    font = _font()
    names = [f"rank {sample.rank}" + _stage(sample) + (" (worst)" if sample.rank == worst else "") for sample in rows]
    left = 2 * _GAP + max(int(font.getlength(name)) for name in names)
    top = 2 * _GAP + max((int(font.getlength(label)) for label in columns), default=0)
    size = left + _CELL_WIDTH * max(len(columns), 1) + _GAP, top + _CELL_HEIGHT * len(rows) + _GAP
    image = Image.new("RGB", size, _WHITE)
    draw = ImageDraw.Draw(image)
    for index, label in enumerate(columns):
        _upright(image, label, (left + _CELL_WIDTH * index + _CELL_WIDTH // 2, top - _GAP), font)
    most = max((kept for sample in rows for _, kept in sample.regions), default=0)
    for row, (name, sample) in enumerate(zip(names, rows, strict=True)):
        y = top + _CELL_HEIGHT * row
        draw.text((left - _GAP, y + _CELL_HEIGHT // 2), name, _INK, font, anchor="rm")
        kept_by = dict(sample.regions)
        for column, label in enumerate(columns):
            x = left + _CELL_WIDTH * column
            kept = kept_by.get(label, 0)
            share = kept / most if most else 0.0
            draw.rectangle((x, y, x + _CELL_WIDTH - 2, y + _CELL_HEIGHT - 2), _shade(share))
            middle = x + _CELL_WIDTH // 2 - 1, y + _CELL_HEIGHT // 2 - 1
            draw.text(middle, format_bytes(kept), _WHITE if share > 0.5 else _INK, font, anchor="mm")
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue(), size


@functools.cache
def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=14)


def _stage(sample: Sample) -> str:
    return "" if sample.stage is None else f", stage {sample.stage}"


def _shade(share: float) -> tuple[int, int, int]:
    red, green, blue = (round(light + (dark - light) * share) for light, dark in zip(_LIGHT, _DARK, strict=True))
    return red, green, blue


def _upright(image: Image.Image, text: str, foot: tuple[int, int], font: Any) -> None:
    """Draw `text` turned to read upwards, with the middle of its beginning at `foot`."""
    height = 20
    label = Image.new("RGB", (int(font.getlength(text)) + 2, height), _WHITE)
    ImageDraw.Draw(label).text((1, height // 2), text, _INK, font, anchor="lm")
    turned = label.rotate(90, expand=True)
    image.paste(turned, (foot[0] - turned.width // 2, foot[1] - turned.height))
