"""Random generators: the stock state hook, and the checks that nobody draws numbers in recomputed code without one.

Three nets, from the earliest to the last: the observed call sees every random operation; a replay whose path was not
observed is watched operation by operation; and every replay compares the default generators before and after.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_remat.errors import InvalidTypeError, InvalidValueError, display_name

__all__ = [
    "DrawWatch",
    "GeneratorGuard",
    "GeneratorHook",
    "HostRandom",
    "covered",
    "drawing",
    "is_default",
    "random_message",
    "shared_with_threads",
]


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
        ValueError: there is no such device here, or it has no generator.
    """

    def __init__(self, *generators: str | torch.device | torch.Generator) -> None:
        for generator in generators:
            if not isinstance(generator, (str, torch.device, torch.Generator)):
                raise InvalidTypeError(
                    f"GeneratorHook expects device names, torch.device or torch.Generator, got "
                    f"{type(generator).__name__}. "
                    f'To fix: pass GeneratorHook("cpu"), GeneratorHook("cuda") or GeneratorHook(my_generator).'
                )
        self._targets = tuple(one if isinstance(one, torch.Generator) else _device(one) for one in generators)

    def snapshot(self) -> list[tuple[torch.Generator, Any]]:
        """The generators carried and their states."""
        return [(generator, _state(generator)) for generator in self.generators()]

    def restore(self, state: list[tuple[torch.Generator, Any]]) -> None:
        """Set each generator to its state."""
        for generator, saved in state:
            _set_state(generator, saved)

    def __repr__(self) -> str:
        return f"GeneratorHook({', '.join(str(target) for target in self._targets)})"

    def generators(self) -> list[torch.Generator]:
        """The generators that this hook carries at present."""
        if not self._targets:
            found = [torch.default_generator]
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                found.append(torch.cuda.default_generators[torch.cuda.current_device()])
            return found
        return [one if isinstance(one, torch.Generator) else _default_generator(one) for one in self._targets]


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
        if device.type == "cpu" or torch.get_device_module(device).is_available():
            return device
        why = f"there is no {device.type} device here"
    except (RuntimeError, AttributeError) as error:
        why = str(error).splitlines()[0]
    raise InvalidValueError(
        f"GeneratorHook cannot carry the generator of {str(given)!r}: {why}.\n"
        f"To fix: name a device that is there; without arguments the hook carries the CPU's generator and that of the "
        f"current CUDA device, where there is one."
    )


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

    __slots__ = ("_before",)

    def __init__(self, *own: torch.Generator) -> None:
        self._before: list[tuple[torch.Generator, Any]] = [(torch.default_generator, _state(torch.default_generator))]
        # While a CUDA graph is captured no generator can be read; the calls before the capture were looked at.
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            self._before.append((generator, _state(generator)))
        self._before.extend((generator, _state(generator)) for generator in own)

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
    # Bytes: quicker than torch.equal, and no dispatch mode that is active may see or change the comparison.
    return a.nbytes == b.nbytes and ctypes.string_at(a.data_ptr(), a.nbytes) == ctypes.string_at(b.data_ptr(), b.nbytes)


def is_default(generator: torch.Generator) -> bool:
    """Whether ``generator`` is a device's default one."""
    if _is_same(generator, torch.default_generator):
        return True
    return torch.cuda.is_initialized() and any(_is_same(generator, one) for one in torch.cuda.default_generators)


def _is_same(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether two Python objects are one generator; the dispatcher hands out a new object each time."""
    return a is b or (a.device == b.device and getattr(a, "_cdata", a) == getattr(b, "_cdata", b))


def shared_with_threads(generator: torch.Generator) -> bool:
    """Whether a Python thread besides the one that replays (and the one that waits for backward) may draw from it.

    Said of the CPU's default generator only; a device's is taken to belong to the training loop.
    """
    if not _is_same(generator, torch.default_generator):
        return False
    current = threading.current_thread()
    waiting = threading.main_thread() if isinstance(current, threading._DummyThread) else current
    return any(thread is not current and thread is not waiting for thread in threading.enumerate())


def covered(hooks: tuple[Any, ...], generator: torch.Generator) -> bool | None:
    """Whether one of the state hooks restores ``generator``; None where only hooks of the user's own could."""
    if any(_is_same(generator, one) for hook in hooks if isinstance(hook, GeneratorHook) for one in hook.generators()):
        return True
    return False if all(isinstance(hook, GeneratorHook) for hook in hooks) else None


def drawing(func: Any, args: Any, kwargs: dict[str, Any], drawn: Callable[[torch.Generator], None]) -> Any:
    """Run a random operation and call ``drawn`` with the generator that it moved, if any; undone if that raises."""
    own = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    guard = GeneratorGuard(*own)
    result = func(*args, **kwargs)
    moved = guard.moved()
    if moved is not None:
        try:
            drawn(moved)
        except BaseException:
            guard.put_back()
            raise
    return result


class DrawWatch(TorchDispatchMode):
    """Calls ``on_draw(operation, generator)`` for every operation that moves a generator."""

    def __init__(self, on_draw: Callable[[str, torch.Generator], None]) -> None:
        super().__init__()
        self._on_draw = on_draw

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled while we look."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        return drawing(func, args, kwargs, functools.partial(self._on_draw, str(func).removeprefix("aten.")))


class HostRandom:
    """The states of the random generators of Python and, where it is in use, numpy."""

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = self._numpy_state()

    @staticmethod
    def _numpy_state() -> Any:
        module = sys.modules.get("numpy.random")
        if module is None:
            return None
        name, keys, *rest = module.get_state()
        return name, keys.tobytes(), *rest

    def moved(self) -> str | None:
        """The name of the one that has moved since."""
        if random.getstate() != self._python:
            return "Python's random module"
        return None if self._numpy is None or self._numpy_state() == self._numpy else "numpy.random"


def random_message(checkpoint: str | None, where: str, generator: torch.Generator) -> str:
    """The text of every refusal of random numbers in recomputed code."""
    device = str(generator.device)
    own = not is_default(generator)
    hook = "remat.GeneratorHook(generator)" if own else f'remat.GeneratorHook("{device}")'
    return (
        f"Recomputed code of checkpoint {display_name(checkpoint)} draws random numbers ({where}), and no state hook "
        f"restores the "
        f"{'generator it was given' if own else f'generator of {device}'} for replay: the numbers would differ between "
        f"forward and "
        f"replay, and the gradients would be wrong.\n"
        f"To fix: remat.checkpoint(..., recompute_state_hooks=({hook},)), or put the random operation in a region with "
        f"recompute=False."
    )
