"""State outside tensors that replay must find as forward left it.

Three kinds: what torch keeps per thread and we carry unasked (autocast, default dtype, function modes); what the user
carries with a :class:`RecomputeStateHook`; and random generators, for which :class:`GeneratorHook` is the stock hook
and :class:`GeneratorGuard` the check that nobody drew numbers in replay without one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.errors import InvalidTypeError

__all__ = ["Ambient", "GeneratorGuard", "GeneratorHook", "GeneratorWatch", "RecomputeStateHook", "restored"]


@runtime_checkable
class RecomputeStateHook(Protocol):
    """Carries state that lives outside the checkpoint's arguments from forward to replay.

    ``snapshot`` runs at entry of the checkpoint, after each SAVE region that ran, and before each replay (the outer
    state). ``restore`` runs in the thread that replays: with the entry snapshot at the start, with a region's exit
    snapshot where replay skips that region, and with the outer snapshot at the end, also when replay raises. A snapshot
    may be restored many times.
    """

    def snapshot(self) -> Any:
        """Return the present state."""
        ...

    def restore(self, state: Any) -> None:
        """Make ``state``, a result of :meth:`snapshot`, the present state."""
        ...


class GeneratorHook:
    """State hook for random generators: replay draws the numbers that forward drew.

    Args:
        *generators: what to carry: ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (the default generator of that device; without
            an index the device current at each call), a ``torch.device``, or a ``torch.Generator`` of your own. None
            given: the CPU generator and, where there is one, the current CUDA device's.

    A CUDA generator is carried by seed and offset, without a device synchronisation; the CPU generator as its state of
    5,056 bytes, about a microsecond for each snapshot.

    Raises:
        TypeError: an argument is none of these.
    """

    def __init__(self, *generators: str | torch.device | torch.Generator) -> None:
        for generator in generators:
            if not isinstance(generator, (str, torch.device, torch.Generator)):
                raise InvalidTypeError(
                    f"GeneratorHook expects device names, torch.device or torch.Generator, got "
                    f"{type(generator).__name__}. "
                    f'To fix: pass GeneratorHook("cpu"), GeneratorHook("cuda") or GeneratorHook(my_generator).'
                )
        self._targets = tuple(torch.device(one) if isinstance(one, str) else one for one in generators)

    def snapshot(self) -> list[tuple[torch.Generator, Any]]:
        """The generators carried and their states."""
        return [(generator, _state(generator)) for generator in self._generators()]

    def restore(self, state: list[tuple[torch.Generator, Any]]) -> None:
        """Set each generator to its state."""
        for generator, saved in state:
            _set_state(generator, saved)

    def __repr__(self) -> str:
        return f"GeneratorHook({', '.join(str(target) for target in self._targets)})"

    def _generators(self) -> list[torch.Generator]:
        if not self._targets:
            found = [torch.default_generator]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                found.append(torch.cuda.default_generators[torch.cuda.current_device()])
            return found
        return [one if isinstance(one, torch.Generator) else _default_generator(one) for one in self._targets]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    if device.type == "cuda":
        torch.cuda.init()
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]


def _state(generator: torch.Generator) -> Any:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _set_state(generator: torch.Generator, state: Any) -> None:
    if isinstance(state, tuple):
        seed, offset = state
        generator.manual_seed(seed)
        generator.set_offset(offset)
    else:
        generator.set_state(state)


class GeneratorGuard:
    """The states of the default generators, and of others given, at one moment; tells later whether one has moved."""

    __slots__ = ("_before", "_own")

    def __init__(self, own: list[torch.Generator] | None = None) -> None:
        self._before: list[tuple[torch.Generator, Any]] = [(torch.default_generator, _state(torch.default_generator))]
        self._own: list[torch.Generator] = []
        if torch.cuda.is_initialized():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            self._before.append((generator, _state(generator)))
        for generator in own or ():
            self.add(generator)

    def add(self, generator: torch.Generator) -> None:
        """Guard a generator from now on."""
        if all(known is not generator for known, _ in self._before):
            self._before.append((generator, _state(generator)))
            self._own.append(generator)

    def is_own(self, generator: torch.Generator) -> bool:
        """Whether ``generator`` is none of the default ones."""
        return any(one is generator for one in self._own)

    def moved(self) -> torch.Generator | None:
        """The first generator that is not where it was; None when all are."""
        for generator, before in self._before:
            if not _same(_state(generator), before):
                return generator
        return None

    def put_back(self) -> None:
        """Set every generator to where it was."""
        for generator, before in self._before:
            _set_state(generator, before)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return a == b
    # Bytes, not torch.equal: no dispatch mode that is active may see or change the comparison.
    return a.nbytes == b.nbytes and ctypes.string_at(a.data_ptr(), a.nbytes) == ctypes.string_at(b.data_ptr(), b.nbytes)


class GeneratorWatch(TorchDispatchMode):
    """Watches the random operations of a replay whose path nobody has observed.

    Generators that operations are given are guarded from their first use on. Without state hooks (``refuse``) the first
    draw is reported through ``on_draw``, also one that a surrounding ``fork_rng`` would undo.
    """

    def __init__(self, guard: GeneratorGuard, on_draw: Callable[[str, torch.Generator, bool], None] | None) -> None:
        super().__init__()
        self._guard = guard
        self._on_draw = on_draw

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled while we look."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        for generator in given:
            self._guard.add(generator)
        if self._on_draw is None or torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        before = GeneratorGuard(given)
        result = func(*args, **kwargs)
        moved = before.moved()
        if moved is not None:
            self._on_draw(str(func), moved, before.is_own(moved))
        return result


class Ambient:
    """Autocast, default dtype and torch function modes of a moment."""

    __slots__ = ("autocast", "default_dtype", "modes")

    def __init__(self) -> None:
        self.autocast: list[tuple[str, bool, torch.dtype]] | None = None  # None: off everywhere
        if any(map(torch.is_autocast_enabled, _autocast_devices())):
            self.autocast = _autocast()
        self.default_dtype = torch.get_default_dtype()
        self.modes: list[Any] = []
        if torch._C._len_torch_function_stack():
            self.modes = _get_current_function_mode_stack()


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _autocast_devices()
    ]


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


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
        now = Ambient()
        undo = self._undo
        undo.append(functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()))
        torch.set_grad_enabled(True)
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
