"""Which tensors the step of a fused optimizer has written to, and when.

The kernels behind ``fused=True`` write parameters without moving their version counters (torch 2.14 still). So that a
step between forward and backward is noticed all the same, every optimizer tells us after its step: a hook of
``torch.optim`` that does nothing unless the optimizer is fused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from torch_remat.runtime.dynamo import eager_only

__all__ = ["count", "is_written_since"]


class _Steps:
    """The steps of fused optimizers so far, and the latest that wrote each tensor."""

    def __init__(self) -> None:
        self.count = 0
        self._latest = WeakIdKeyDictionary()
        register_optimizer_step_post_hook(self._stepped)

    @eager_only("what the step of a fused optimizer has written is no part of a graph.")
    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        groups = [group for group in optimizer.param_groups if group.get("fused")]
        if groups:
            self.count += 1
            for group in groups:
                self._latest.update({one: self.count for one in group["params"] if one.grad is not None})

    def latest(self, tensor: Tensor) -> int:
        """The number of the latest step that wrote ``tensor``; 0 where none has."""
        return self._latest.get(tensor) or 0


_steps = _Steps()


def count() -> int:
    """How many steps of fused optimizers there have been."""
    return _steps.count


def is_written_since(then: int, tensor: Tensor) -> bool:
    """Whether a step after the first ``then`` has written ``tensor``."""
    return _steps.count > then and _steps.latest(tensor) > then
