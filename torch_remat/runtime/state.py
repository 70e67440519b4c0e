"""State outside tensors that replay must find as forward left it.

What torch keeps per thread and we carry unasked: autocast, default dtype, function modes. For what the user carries see
``state_hooks.py``, for random generators ``generators.py``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_dispatch_stack_at

from torch_remat.runtime.dynamo import frames_compiled_by, set_frames_compiled_by

__all__ = ["Ambient", "early_stop_allowed", "restored", "with_torch_functions"]


class Ambient:
    """Autocast, default dtype, attention kernels, torch functions and their modes, and who compiles, at a moment."""

    __slots__ = ("attention", "autocast", "compiled_by", "default_dtype", "functions", "modes")

    def __init__(self) -> None:
        self.autocast: list[tuple[str, bool, torch.dtype]] | None = None  # None: off everywhere
        if any(map(torch.is_autocast_enabled, _autocast_devices())):
            self.autocast = _autocast()
        self.default_dtype = torch.get_default_dtype()
        self.attention = _attention()
        self.compiled_by = None if _nothing_compiled() else frames_compiled_by()
        self.functions = _functions()  # off in ``backward()`` of a tensor subclass, for one
        self.modes: list[Any] = []
        if torch._C._len_torch_function_stack():
            self.modes = _get_current_function_mode_stack()

    def is_plain(self) -> bool:
        """No autocast and no modes."""
        return self.autocast is None and not self.modes


_KERNELS = (  # of scaled_dot_product_attention: ``torch.nn.attention.sdpa_kernel`` sets them
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def _attention() -> tuple[bool, ...]:
    return tuple([enabled() for enabled, _ in _KERNELS])


def _set_attention(state: tuple[bool, ...]) -> None:
    for enabled, (_, enable) in zip(state, _KERNELS, strict=True):
        enable(enabled)


_functions: Any = getattr(torch._C, "_get_torch_function_state", None) or bool
_set_functions: Any = getattr(torch._C, "_set_torch_function_state", None)


@contextlib.contextmanager
def with_torch_functions(then: Ambient) -> Iterator[None]:
    """Torch functions on or off as they were then."""
    now = _functions()
    if now == then.functions:
        yield
        return
    _set_functions(then.functions)
    try:
        yield
    finally:
        _set_functions(now)


def _nothing_compiled() -> bool:
    """Whether this thread is in a dispatch mode under which Dynamo compiles nothing, and compiled code runs as it is.

    Torch has a flag for this as well, which is one for all threads and stays on when two of them leave modes at once.
    """
    modes = map(_get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return any(not mode.is_infra_mode() and not mode.ignore_compile_internals() for mode in modes)


def _is_plain_now(default_dtype: torch.dtype) -> bool:
    return (
        not torch._C._len_torch_function_stack()
        and torch.get_default_dtype() == default_dtype
        and not any(map(torch.is_autocast_enabled, _autocast_devices()))
    )


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _autocast_devices()
    ]


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class SameOperations(TorchDispatchMode):
    """A mode that does nothing, for the replay of a forward that ran under a mode, as every observed one does.

    Under a dispatch mode torch takes other operations for some functions (``F.ctc_loss``), which save other tensors.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class restored:  # noqa: N801 - used like a function
    """Context manager: run with gradients on and the state of ``then``, and put the present state back afterwards.

    Autocast runs without its cache of cast weights: the cache is keyed by weight alone, and what lies in it belongs to
    whatever autocast block surrounds the backward call.
    """

    __slots__ = ("_then", "_undo")

    def __init__(self, then: Ambient) -> None:
        self._then = then
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> None:
        then = self._then
        undo = self._undo
        undo.append(functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(True)
        compiled_by = frames_compiled_by()
        if then.compiled_by is not compiled_by:
            undo.append(functools.partial(set_frames_compiled_by, compiled_by))
            set_frames_compiled_by(then.compiled_by)
        attention = _attention()
        if attention != then.attention:
            undo.append(functools.partial(_set_attention, attention))
            _set_attention(then.attention)
        functions = _functions()
        if functions != then.functions:
            undo.append(functools.partial(_set_functions, functions))
            _set_functions(then.functions)
        if then.is_plain() and _is_plain_now(then.default_dtype):
            return
        now = Ambient()
        if then.autocast is not None or now.autocast is not None:
            undo.append(functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()))
            undo.append(functools.partial(_set_autocast, _autocast()))
            torch.set_autocast_cache_enabled(False)
            _set_autocast(then.autocast or [(device, False, dtype) for device, _, dtype in _autocast()])
        if then.default_dtype != now.default_dtype:
            undo.append(functools.partial(torch.set_default_dtype, now.default_dtype))
            torch.set_default_dtype(then.default_dtype)
        if then.modes or now.modes:
            undo.append(functools.partial(_swap_modes, len(then.modes), now.modes))
            _swap_modes(len(now.modes), then.modes)

    def __exit__(self, *exc_info: object) -> None:
        for step in reversed(self._undo):
            step()
        self._undo.clear()


def _set_autocast(state: list[tuple[str, bool, torch.dtype]]) -> None:
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _swap_modes(present: int, wanted: list[Any]) -> None:
    for _ in range(present):
        _pop_mode()
    for mode in wanted:
        _push_mode(mode)


def early_stop_allowed() -> bool:
    """False inside ``torch.utils.checkpoint.set_checkpoint_early_stop(False)``."""
    module = sys.modules.get("torch.utils.checkpoint")
    return getattr(module, "_enable_checkpoint_early_stop", None) is not False
