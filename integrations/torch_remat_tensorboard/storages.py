"""The storages under a tensor, as the reports count them; quick for the plain tensor that most are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_remat.diagnostics.graph import unseen
from torch_remat.diagnostics.storages import values_of

__all__ = ["storages_of"]


def storages_of(tensor: Tensor) -> Iterable[Any]:
    """The storages under `tensor`, those of the parts of a wrapper subclass; none for what has no memory.

    Called with torch functions disabled, so that no mode of the user's sees it.
    """
    kind = type(tensor)
    if (kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_nested:
        return (tensor.untyped_storage(),)
    with unseen():
        return [value.tensor.untyped_storage() for value in values_of(tensor, "")]
