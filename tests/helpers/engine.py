"""How a contract test wraps a body and runs backward: an object per engine, so that later engines inherit it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_remat as remat


class EagerEngine:
    """The eager runtime: a checkpoint is called as it stands and backward is autograd's own."""

    name = "eager"

    def checkpoint(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Wrap ``body`` in a checkpoint; ``options`` go to ``remat.checkpoint`` unchanged."""
        options.setdefault("region_name", "block")
        return remat.checkpoint(**options)(body)

    def backward(
        self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None = None, **options: Any
    ) -> None:
        """Run backward from ``tensors``."""
        torch.autograd.backward(list(tensors), None if grads is None else list(grads), **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


EAGER = EagerEngine()
ENGINES = [EAGER]
