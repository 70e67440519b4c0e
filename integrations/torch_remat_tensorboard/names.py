"""What a checkpoint and a region are called in charts: blocks of one kind are one group."""

from __future__ import annotations

import functools
import re

from torch_remat.errors import display_name

__all__ = ["INPUTS", "group_of", "label_of"]

INPUTS = "inputs"
"""Stands in place of a region for the inputs that a checkpoint keeps."""


@functools.lru_cache(maxsize=4096)
def group_of(checkpoint: str | None) -> str:
    """`layers.3` and `layers.17` are `layers.*`."""
    return re.sub(r"\d+", "*", display_name(checkpoint))


@functools.lru_cache(maxsize=4096)
def label_of(checkpoint: str | None, region: str) -> str:
    """Group and region. Only whole numbers in the path of a region count its kind: `w1` and `w2` are two regions."""
    return f"{group_of(checkpoint)}::{re.sub(r'(?<![^.])[0-9]+(?![^.])', '*', region)}"
