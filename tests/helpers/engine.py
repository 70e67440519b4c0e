"""How a contract test wraps a body and runs backward: an object per engine, so that later engines inherit it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_remat as remat


class EagerEngine:
    """The eager runtime: a checkpoint is called as it stands and backward is autograd's own."""

    name = "eager"

    def plain(self, body: Callable[..., Any]) -> Callable[..., Any] | None:
        """The body without a checkpoint as this engine runs it, where that may leave other bits than eager code."""
        return None

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


class CompiledEngine(EagerEngine):
    """``torch.compile`` around the checkpoint: one graph where it can be, the eager runtime where the graph breaks."""

    name = "compiled"

    def plain(self, body: Callable[..., Any]) -> Callable[..., Any] | None:
        """Compiled backward may sum the gradients of one tensor in another order."""
        return torch.compile(lambda *args, **kwargs: body(*args, **kwargs), backend="aot_eager")

    def checkpoint(self, body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Compile a function that calls ``body`` in a checkpoint."""
        checkpointed = super().checkpoint(body, **options)

        def step(*args: Any, **kwargs: Any) -> Any:
            return checkpointed(*args, **kwargs)

        step.__code__ = step.__code__.replace()  # what Dynamo gives up on for one test, it gives up on for good
        return torch.compile(step, backend="aot_eager")


EAGER = EagerEngine()
COMPILED = CompiledEngine()
ENGINES = [EAGER, COMPILED]
