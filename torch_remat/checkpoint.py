"""The public ``checkpoint``: wires forward, tape and backward of one call together."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_remat.compile.trace import UNREAD, Named, unguarded
from torch_remat.compile.traced import traced_checkpoint
from torch_remat.errors import InvalidTypeError, InvalidValueError, UnsupportedError, display_name
from torch_remat.runtime import events
from torch_remat.runtime.backward import Trigger, unpacker
from torch_remat.runtime.bitwise import BitwiseCheck
from torch_remat.runtime.body_key import body_key
from torch_remat.runtime.captured import captured_by_call
from torch_remat.runtime.dynamo import eager_only, tracing
from torch_remat.runtime.forward import ForwardFrame, run_forward
from torch_remat.runtime.frame import current_frame, scopes
from torch_remat.runtime.hooks import HookPair, SavedTensorKind, call_pack, native_pair, recomputes, top_hooks
from torch_remat.runtime.hooks import saved_tensors_hooks as saved_tensors_hooks_context
from torch_remat.runtime.state import Ambient, early_stop_allowed
from torch_remat.runtime.state_hooks import RecomputeStateHook
from torch_remat.runtime.tape import (
    Output,
    OutputKind,
    Tape,
    attributes_of,
    gradient_of,
    plain_attributes,
    stride_of,
    version_of,
    version_probe,
)
from torch_remat.runtime.tree import flatten, is_container, is_iterator

__all__ = ["Checkpointed", "checkpoint"]

P = ParamSpec("P")
R = TypeVar("R")

_CHECKS = ("default", "none", "bitwise")
_ON_MISSING = ("error", "rerun")
_sequence_nr = getattr(torch._C._autograd, "_get_sequence_nr", None)


class _Options:
    """What ``checkpoint(...)`` was given, validated."""

    __slots__ = ("bitwise", "check", "hooks", "named", "pair", "reruns")

    def __init__(
        self, named: Named, check: str, pair: HookPair | None, hooks: tuple[RecomputeStateHook, ...], reruns: bool
    ) -> None:
        self.named = named
        self.check = check != "none"
        self.bitwise = check == "bitwise"
        self.pair = pair
        self.hooks = hooks
        self.reruns = reruns

    @property
    def name(self) -> str | None:
        return self.named[1]


def checkpoint(
    *args: Any,
    region_name: str | None = None,
    determinism_check: str = "default",
    preserve_rng_state: bool = False,
    saved_tensors_hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None,
    recompute_state_hooks: Iterable[RecomputeStateHook] = (),
    on_missing: str = "error",
) -> Callable[[Callable[P, R]], Checkpointed[P, R]]:
    """Make a function recompute itself in backward, except for its SAVE regions.

    ``checkpoint(region_name="layers.0")(block)(x)`` runs ``block(x)`` and keeps only what replay cannot make again: the
    inputs it reads, what the SAVE regions (:func:`region` with ``recompute=False``) save for their backward, and those
    of their outputs that recomputed code reads. Just before the block's backward the body runs once more, SAVE regions
    excepted.

    Args:
        *args: none; there to tell ``checkpoint(fn)`` what is missing.
        region_name: label in errors and reports; need not be unique.
        determinism_check: ``"default"`` compares shape, dtype and device of what replay saves with forward; ``"none"``
            does not; ``"bitwise"`` compares the values, too, by fingerprints computed on the device, and raises
            :class:`~torch_remat.errors.ValuesDriftError`. It reads each tensor once more in each pass and waits for
            the device once per replay: for finding faults, not for every step.
        preserve_rng_state: not supported; pass a :class:`GeneratorHook` in ``recompute_state_hooks`` instead. Random
            numbers drawn in recomputed code without one are an error.
        saved_tensors_hooks: (pack, unpack) for the inputs, the saves of SAVE regions and the persisted outputs of this
            checkpoint.
        recompute_state_hooks: objects with ``snapshot()`` and ``restore(state)``; see :class:`RecomputeStateHook`.
        on_missing: what happens when replay needs an output of a SAVE region that was not kept, because the body does
            not do what it did when it was last looked at: ``"error"`` raises ``PlaceholderError``; ``"rerun"`` starts
            the replay over, runs that region in it, and warns. Such a region must draw no random numbers without a
            state hook, modify nothing that it did not make and find its module and captured tensors as they were; its
            collectives are issued again. Either way the next call is looked at anew. Inside another checkpoint the
            outer one's choice counts.

    Returns:
        A decorator for any callable. The wrapped callable takes and returns what the function does: any arguments, any
        pytree. Under ``no_grad`` or ``inference_mode``, and when nothing needs a gradient, it runs the function once
        and keeps nothing.

    Raises:
        TypeError: ``checkpoint(fn)``: options come first, ``checkpoint(...)(fn)``; or an option has the wrong type.
        NotImplementedError: ``preserve_rng_state`` is true.
        ValueError: ``determinism_check`` or ``on_missing`` is not one of the allowed values, or ``region_name`` is
            empty.

    Cost: one more run of the recomputed code, and about the Python overhead of a few operations per call.
    """
    if args:
        raise InvalidTypeError(
            f"checkpoint() takes 0 positional arguments, its options are keywords; got {type(args[0]).__name__}. "
            f'To fix: checkpoint(region_name="...")(fn)(*args), or @checkpoint() with parentheses.'
        )
    if not (tracing() and unguarded("region_name")):
        _check_name(region_name)
    if determinism_check not in _CHECKS:
        raise InvalidValueError(f"determinism_check should be one of {_CHECKS}, got {determinism_check!r}.")
    if on_missing not in _ON_MISSING:
        raise InvalidValueError(f"on_missing should be one of {_ON_MISSING}, got {on_missing!r}.")
    if preserve_rng_state:
        raise UnsupportedError(
            "checkpoint does not preserve torch's RNG state by itself: that would cost a copy of every generator at "
            "every SAVE region. "
            "To fix: checkpoint(..., recompute_state_hooks=(remat.GeneratorHook(),)) for blocks that draw random "
            "numbers in recomputed code."
        )
    options = _Options(
        (UNREAD, region_name),
        determinism_check,
        _checked_pair(saved_tensors_hooks),
        _checked_hooks(recompute_state_hooks),
        on_missing == "rerun",
    )
    return functools.partial(_wrap, options)


def _check_name(region_name: Any) -> None:
    if region_name is not None and not isinstance(region_name, str):
        raise InvalidTypeError(f"checkpoint expects region_name to be a str or None, got {region_name!r}.")
    if region_name == "":
        raise InvalidValueError(
            "checkpoint expects region_name to be non-empty. To fix: name the block, or leave region_name out."
        )


def _wrap(options: _Options, function: Callable[P, R], /, *args: Any, **kwargs: Any) -> Checkpointed[P, R]:
    if args or kwargs:
        raise InvalidTypeError(
            "checkpoint(...) takes the function alone and returns the function to call. "
            "To fix: checkpoint(...)(fn)(*args)."
        )
    if not tracing() and not callable(function):
        raise InvalidTypeError(
            f"checkpoint(...) expects a function, got {type(function).__name__}. To fix: checkpoint(...)(fn)(*args)."
        )
    return Checkpointed(options, function)


class Checkpointed(Generic[P, R]):
    """A callable that runs its function as a checkpoint. Made by :func:`checkpoint`.

    Works as a function and as a method; copying and pickling copy and pickle the function.
    """

    def __init__(self, options: _Options, function: Callable[P, R]) -> None:
        self._options = options
        self.__wrapped__ = function

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function as a checkpoint."""
        if tracing():
            return traced_checkpoint(_call, self._options, self.__wrapped__, args, kwargs)
        return _call(self._options, self.__wrapped__, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        bound = self.__wrapped__.__get__(instance, owner)
        return Checkpointed(self._options, bound)

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "_options"):
            raise AttributeError(name)  # not set yet: being copied or unpickled
        return getattr(self.__wrapped__, name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __repr__(self) -> str:
        return f"<checkpoint {self._options.name or ''} of {self.__wrapped__!r}>"


@eager_only("a torch_remat.checkpoint that runs eagerly is no part of a graph.")
def _call(options: _Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outer = current_frame.get()
    if outer is not None and outer.checkpoint_frame is None:
        return _joined(outer, options, function, args, kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if _runs_plain():
        return function(*args, **kwargs)
    tape = Tape(options.name, function)
    pair = options.pair if options.pair is not None else native_pair(top_hooks())
    leaves = _take_inputs(tape, args, kwargs, pair)
    if options.reruns:
        tape.reruns = set()
    if options.bitwise:
        tape.check = BitwiseCheck(tape, leaves)
    tape.ambient = Ambient()
    circumstances = early_stop_allowed(), pair is not None, *map(type, options.hooks)
    tape.key = body_key(function, leaves, *circumstances, trained=tape.trained)
    if options.hooks:
        tape.hooks = options.hooks
        tape.states = [hook.snapshot() for hook in options.hooks]
    if _sequence_nr is not None:
        tape.first_sequence_nr = _sequence_nr()
    tape.captured = captured_by_call(function, leaves)
    frame_type = ForwardFrame if outer is None else outer.checkpoint_frame
    frame = frame_type(tape, tape.key, leaves, pair, options.check, unpacker(tape))
    try:
        result = run_forward(frame, function, args, kwargs)
        outputs: list[Any] = [result]
        if is_container(result):
            outputs = []
            flatten(result, outputs)
        frame.finish(outputs)
    finally:
        frame.close()
    if frame.slots or tape.order:
        _register(tape, outputs)
    if events.forward_ended.listeners:
        events.forward_ended(tape)
    return result


def _register(tape: Tape, outputs: list[Any]) -> None:
    """Start replay before the first backward node of the block, whichever output backward comes through."""
    nodes = []
    for output in outputs:
        if isinstance(output, Tensor):
            node = output.grad_fn
            if node is not None and node not in nodes and node._sequence_nr() >= tape.first_sequence_nr:
                nodes.append(node)
                node.register_prehook(Trigger(tape))
    if events.graph_made.listeners:
        events.graph_made(tape, nodes)


def _take_inputs(tape: Tape, args: tuple[Any, ...], kwargs: dict[str, Any], pair: HookPair | None) -> list[Any]:
    """Record the argument leaves on the tape; pack the tensors among them where a pair applies."""
    leaves: list[Any] = []
    tape.spec = _spec(args, kwargs, leaves)
    seen: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            if is_iterator(leaf):
                raise InvalidTypeError(
                    f"Checkpoint {display_name(tape.name)} got a {type(leaf).__name__} as an argument: forward would "
                    f"use it up, and replay find nothing in it.\nTo fix: pass a list or a tuple."
                )
            tape.inputs.append(Output(OutputKind.OBJECT, leaf))
            continue
        first = seen.setdefault(id(leaf), index)
        if first != index:
            tape.inputs.append(Output(OutputKind.REPEAT, first))
            continue
        output = Output(OutputKind.KEPT, leaf, gradient_of(leaf))
        output.version = version_of(leaf)
        output.attributes = plain_attributes(leaf) if pair is not None else attributes_of(leaf)
        if pair is not None:
            output.data = call_pack(pair, leaf, SavedTensorKind.CHECKPOINT_INPUT, None)
            output.unpack = pair.unpack
            output.stride = stride_of(leaf)
            output.version = (output.version, version_probe(leaf))
        tape.inputs.append(output)
    return leaves


def _spec(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
    if not kwargs and not any(is_container(arg) for arg in args):
        leaves.extend(args)
        return _no_kwargs, [None] * len(args)
    children = [flatten(arg, leaves) for arg in args] + [flatten(value, leaves) for value in kwargs.values()]
    names = tuple(kwargs)
    count = len(args)

    def rebuild(items: list[Any]) -> Any:
        return tuple(items[:count]), dict(zip(names, items[count:], strict=True))

    return rebuild, children


def _no_kwargs(items: list[Any]) -> Any:
    return items, {}


def _joined(
    outer: Any, options: _Options, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A checkpoint inside another one: nothing in a SAVE region, part of the outer one elsewhere."""
    if recomputes(top_hooks()):
        raise UnsupportedError(
            f"Checkpoint {display_name(options.name)} is called in a torch.utils.checkpoint that is called in "
            f"checkpoint {display_name(outer.tape.name)}: torch runs it again by itself, without the outer "
            f"one, and the two would not save the same.\n"
            f"To fix: take the torch.utils.checkpoint in between away; the checkpoint around it recomputes what is in "
            f"it."
        )
    if outer.inert:
        return function(*args, **kwargs)
    token = None if options.name is None else scopes.set((*scopes.get(), outer.inner_name(options.name)))
    before = outer.enter_checkpoint(options.hooks)
    pair = options.pair
    try:
        with contextlib.nullcontext() if pair is None else saved_tensors_hooks_context(pair.pack, pair.unpack):
            return function(*args, **kwargs)
    finally:
        outer.leave_checkpoint(before)
        if token is not None:
            scopes.reset(token)


def _runs_plain() -> bool:
    """Whether a transform is active under which the body runs without recomputation."""
    if forward_ad._current_level >= 0:
        return True  # the body may compute tangents, which replay, outside the dual level, would not
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    if peek is None or peek() is None:
        return False
    warnings.warn(
        "torch_remat.checkpoint inside a torch.func transform runs its function without recomputation: torch.func does "
        "not support "
        "saved-tensor hooks. The results are right, no memory is saved.",
        stacklevel=4,
    )
    return True


def _checked_pair(pair: Any) -> HookPair | None:
    if pair is None:
        return None
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(callable(one) for one in pair):
        raise InvalidTypeError(
            f"checkpoint expects saved_tensors_hooks to be a (pack, unpack) pair of callables, got {pair!r}. "
            f"To fix: saved_tensors_hooks=(pack, unpack); for capture_context use `with "
            f"remat.saved_tensors_hooks(...)` around the call."
        )
    return HookPair(*pair)


def _checked_hooks(hooks: Any) -> tuple[RecomputeStateHook, ...]:
    try:
        found = tuple(hooks)
    except TypeError:
        raise InvalidTypeError(
            f"checkpoint expects recompute_state_hooks to be an iterable of state hooks, got {type(hooks).__name__}. "
            f"To fix: recompute_state_hooks=(hook,)."
        ) from None
    for hook in found:
        if not (callable(getattr(hook, "snapshot", None)) and callable(getattr(hook, "restore", None))) or isinstance(
            hook, type
        ):
            raise InvalidTypeError(
                f"checkpoint expects every state hook in recompute_state_hooks to have snapshot() and restore(state), "
                f"got {hook!r}. "
                f"To fix: pass an instance of a class with both methods; remat.GeneratorHook() is one for random "
                f"generators."
            )
    return found
