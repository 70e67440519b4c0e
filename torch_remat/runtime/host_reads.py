"""Reads of tensor data that bypass torch's dispatcher, and backwards inside a body, seen in the observed call.

``tolist()``, ``numpy()`` and the like are calls of built-in methods, which Python reports to a profile function. A
torch function mode would see them as well, and would make every compiled function in the body compile once more.
Where another profiler is active nothing is seen, and such a read of a SAVE output meets the placeholder's error in
replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from torch_remat.runtime.compiled_code import is_compiled

__all__ = ["HostReads"]

# Python functions of torch's that others call from C: `numpy.asarray`, `numpy.from_dlpack`, `pickle.dump`.
_PROTOCOLS = {  # by identity: code that Dynamo made holds constants that have no hash
    id(getattr(method, "__code__", None)) for method in (Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__)
} - {id(None)}

_BACKWARDS = {id(function.__code__) for function in (torch.autograd.grad, torch.autograd.backward)}

_HOOKS = {
    id(getattr(method, "__code__", None))
    for method in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
}

_READS = frozenset(("tolist", "numpy", "data_ptr", "untyped_storage", "__array__", "__dlpack__", "share_memory_"))


# Functions for which torch takes operations that save other tensors when a dispatch mode is active. Of the operations
# in torch's own test database (torch.testing._internal, 4,099 samples on torch 2.13) this is the only one.
_MODE_DEPENDENT = frozenset(("ctc_loss",))


def _ignore(*_: Any) -> None:
    pass


class HostReads:
    """Context manager: ``on_read(tensor, method)`` for every such read in this thread.

    ``on_mode_dependent()`` is called before functions that do something else under a dispatch mode,
    ``on_backward(outputs, inputs, accumulates)`` before autograd runs, ``on_hook(tensor)`` before a gradient hook is
    registered, ``on_compiled(code, variables)`` when compiled code starts.
    """

    def __init__(
        self,
        on_read: Callable[[Tensor, str], None],
        on_mode_dependent: Callable[[], None] = _ignore,
        on_backward: Callable[[Any, Any, bool], None] = _ignore,
        on_hook: Callable[[Tensor], None] = _ignore,
        on_compiled: Callable[[CodeType, dict[str, Any]], None] | None = None,
    ) -> None:
        self._on_compiled = on_compiled
        self._on_hook = on_hook
        self._on_backward = on_backward
        self._on_read = on_read
        self._on_mode_dependent = on_mode_dependent
        self._active = False

    def __enter__(self) -> None:
        self._active = sys.getprofile() is None
        if self._active:
            sys.setprofile(self._profile)

    def __exit__(self, *exc_info: object) -> None:
        if self._active:
            sys.setprofile(None)

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        if event == "c_call" and arg.__name__ in _READS:
            self._read(getattr(arg, "__self__", None), arg.__name__, frame)
        elif event == "c_call" and arg.__name__ in _MODE_DEPENDENT:
            self._on_mode_dependent()
        elif event == "call" and id(frame.f_code) in _PROTOCOLS:
            self._read(frame.f_locals.get("self"), str(frame.f_code.co_name), frame.f_back)
        elif event == "call" and id(frame.f_code) in _HOOKS:
            self._on_hook(frame.f_locals["self"])
        elif event == "call" and id(frame.f_code) in _BACKWARDS:
            given = frame.f_locals
            accumulates = "tensors" in given
            self._on_backward(given["tensors" if accumulates else "outputs"], given["inputs"], accumulates)
        elif event == "call" and self._on_compiled is not None and is_compiled(frame.f_code):
            self._on_compiled(frame.f_code, dict(frame.f_locals))

    def _read(self, tensor: Any, method: str, reader: Any) -> None:
        # What this library and torch's own Python code look at is no read of the body's.
        if isinstance(tensor, Tensor) and "torch" not in reader.f_globals.get("__name__", "").partition(".")[0]:
            self._on_read(tensor, method)
