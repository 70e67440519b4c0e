"""A frame to call a function under, so that the checkpoints it runs are run by a forward frame of our choice."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_remat.checkpoint import checkpoint
from torch_remat.errors import InvalidTypeError, UsageError
from torch_remat.runtime.frame import Frame, current_frame, scopes
from torch_remat.runtime.tape import Tape
from torch_remat.runtime.tree import flatten

__all__ = ["Root", "as_body", "check_call", "in_eager_code", "may_compile"]


class Root(Frame):
    """Active around a call: checkpoints under it get a frame from ``make``, regions outside of them are plain calls."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__(Tape(None, _nothing))
        self.inert = 1
        self.checkpoint_frame = make

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        """Call the function with gradients enabled; the leaves of what it returns, which keep its graph alive.

        Raises:
            RuntimeError: nothing of it requires a gradient: checkpoints then keep and replay nothing.
        """
        token = current_frame.set(self)
        scope_token = scopes.set(scopes.get())
        try:
            with torch.enable_grad():
                result = function(*args, **kwargs)
        finally:
            scopes.reset(scope_token)
            current_frame.reset(token)
        outputs: list[Any] = []
        flatten(result, outputs)
        tensors = [one for one in outputs if isinstance(one, Tensor)]
        if result is None or (tensors and not any(one.requires_grad for one in tensors)):
            what = "it returned None" if result is None else "nothing that it returned requires a gradient"
            raise UsageError(
                f"No backward can come through what the function returned ({what}), so its checkpoints keep and replay "
                f"nothing. To fix: give it an input or parameters that require a gradient, as in training, and return "
                f"the output or the loss."
            )
        return outputs


def check_call(function: Any, caller: str) -> None:
    """Refuse what no such call can be made of."""
    if not callable(function):
        raise InvalidTypeError(
            f"{caller} expects a function, got {type(function).__name__}. To fix: {caller}(fn, *args)."
        )
    if current_frame.get() is not None:
        raise UsageError(
            f"{caller}() was called inside a checkpoint. To fix: call it outside, with the function and its arguments."
        )


def as_body(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint of a function that runs none of its own."""
    return checkpoint(region_name=getattr(function, "__qualname__", type(function).__qualname__))(function)


def may_compile(function: Any) -> bool:
    """Whether something may be compiled in there: anything has been given to ``torch.compile`` in this process.

    That Dynamo is imported says nothing: every dispatch mode does that, those of observed checkpoints, too.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", {None: True})  # of compiled functions, and None as soon as imported
    return hasattr(function, "_torchdynamo_orig_callable") or any(one is not None for one in backends.values())


def in_eager_code() -> contextlib.AbstractContextManager[Any]:
    """Under it, what is compiled runs as if it were not."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _nothing() -> None:
    """The body of the root's tape, which is never run."""
