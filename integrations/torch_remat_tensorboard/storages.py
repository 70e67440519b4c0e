"""The storages under a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from torch_remat.diagnostics.storages import values_of

__all__ = ["storages_of"]


def storages_of(tensor: Tensor) -> Iterator[Any]:
    """The storages under `tensor`, those of the parts of a wrapper subclass; none for what has no memory."""
    for value in values_of(tensor, ""):
        yield value.tensor.untyped_storage()
