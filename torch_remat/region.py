"""The public annotations: ``region``, ``name_scope``, ``recompute_needs_tensor``, ``save_for_backward``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Token
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from torch_remat.compile.trace import UNREAD, Named, enter_scope, leave_scope, unguarded
from torch_remat.compile.traced import traced_declaration, traced_region
from torch_remat.errors import InvalidTypeError, InvalidValueError, UsageError
from torch_remat.runtime.dynamo import tracing
from torch_remat.runtime.frame import current_frame, scopes

__all__ = ["Region", "name_scope", "recompute_needs_tensor", "region", "save_for_backward"]

P = ParamSpec("P")
R = TypeVar("R")


class Region(Generic[P, R]):
    """A callable that runs its function as a region of the checkpoint around it. Made by :func:`region`."""

    def __init__(self, function: Callable[P, R], named: Named, recompute: bool) -> None:
        self.__wrapped__ = function
        self._named = named
        self._recompute = recompute

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function as a region."""
        if tracing():
            return traced_region(self.__wrapped__, self._named[1], self._recompute, args, kwargs)
        frame = current_frame.get()
        if frame is None or frame.inert:
            return self.__wrapped__(*args, **kwargs)
        return frame.call_region(self.__wrapped__, self._named[1], self._recompute, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # type: ignore[attr-defined]
        return Region(self.__wrapped__.__get__(instance, owner), self._named, self._recompute)

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "_named", "_recompute"):
            raise AttributeError(name)  # not set yet: being copied or unpickled
        return getattr(self.__wrapped__, name)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__wrapped__.__doc__

    def __repr__(self) -> str:
        return f"<region {self._named[1]} ({'recompute' if self._recompute else 'save'}) of {self.__wrapped__!r}>"


def region(function: Callable[P, R], name: str, *, recompute: bool) -> Region[P, R]:
    """Annotate a call inside a checkpoint: ``remat.region(fn, "attention.core", recompute=False)(q, k, v)``.

    Args:
        function: anything callable, used unmodified: a module, ``SomeFunction.apply``, a lambda.
        name: label, unique among the region calls of one pass over the body (:class:`name_scope` qualifies).
        recompute: False makes a SAVE region: it runs once, in forward; what its backward needs is kept, and replay
            skips it. True makes a RECOMPUTE region: it runs again in replay, as unannotated code does.

    Returns:
        A callable with the function's signature; any arguments, any pytree. Outside a checkpoint, and inside the body
        of a SAVE region, it is the plain function.

    A SAVE output is kept for replay only if recomputed code reads it; the runtime finds out by itself.

    Raises:
        RuntimeError: ``function`` is not callable or ``recompute`` is not a bool; at the call: the name was used before
            in this pass.
        ValueError: ``name`` is empty.
        TypeError: ``name`` is not a string.
    """
    if not tracing() and not callable(function):  # Dynamo cannot tell, of SomeFunction.apply for one
        raise UsageError(f"region expects a function as its first argument, got {type(function).__name__}.")
    if not (tracing() and unguarded("name")):
        _check_name(name)
    if recompute is not True and recompute is not False:
        raise UsageError(f"region expects recompute to be a bool, got {recompute!r} for region {name}.")
    return Region(function, (UNREAD, name), recompute)


def _check_name(name: Any) -> None:
    if not name:
        raise InvalidValueError(
            "a region name must be non-empty. To fix: name the call, for example by its module path."
        )
    if not isinstance(name, str):
        raise InvalidTypeError(f"region expects name to be a str, got {name!r}.")


class name_scope:  # noqa: N801 - used like a function
    """Context manager: names of regions called within get ``prefix/`` in front. Nests: ``outer/inner/op``.

    A scope around the checkpoint call is remembered for replay. Raises ``RuntimeError`` for a prefix that is not a
    string and ``ValueError`` for an empty one, on entry.
    """

    __slots__ = ("_prefix", "_tokens")

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._tokens: list[Token[tuple[str, ...]]] = []

    def __enter__(self) -> None:
        if not isinstance(self._prefix, str):
            raise UsageError(f"name_scope expects a str, got {type(self._prefix).__name__}.")
        if not self._prefix:
            raise InvalidValueError("a name_scope prefix must be non-empty.")
        if tracing():
            enter_scope(self._prefix)
        else:
            self._tokens.append(scopes.set((*scopes.get(), self._prefix)))

    def __exit__(self, *exc_info: object) -> None:
        if tracing():
            leave_scope(True)
        else:
            scopes.reset(self._tokens.pop())


def recompute_needs_tensor(*tensors: Tensor) -> None:
    """Declare that recomputed code reads ``tensors``: the SAVE regions that made them keep them for replay.

    The runtime finds readers by itself; declare only what it cannot see: a kernel that takes ``data_ptr()`` of a SAVE
    output outside an ``autograd.Function``. Views and detached aliases stand for the output they alias. Adds to what is
    kept, never removes. No effect outside a checkpoint, in replay, and for tensors that no SAVE region returned.

    Raises:
        RuntimeError: an argument is not a tensor.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"recompute_needs_tensor expects Tensor arguments, got {type(tensor).__name__}. "
                f"To fix: pass the tensors themselves, one argument each."
            )
    if tracing():
        traced_declaration(_declare, tensors)
    else:
        _declare(tensors)


def _declare(tensors: tuple[Tensor, ...]) -> None:
    frame = current_frame.get()
    if frame is not None and not frame.replaying:
        frame.declare(tensors)


def save_for_backward(ctx: Any, saved: Mapping[str, Tensor | None]) -> None:
    """``ctx.save_for_backward(*saved.values())`` of a custom ``autograd.Function``, with names for errors and reports.

    Args:
        ctx: the context that ``forward`` or ``setup_context`` got.
        saved: names and tensors, in order; ``None`` is saved as None. Names must be non-empty and must not contain a
            dot.

    Raises:
        TypeError: ``saved`` is not a mapping or a name is not a string.
        ValueError: a name is empty.
        RuntimeError: a name contains a dot, or a value is neither a tensor nor None.
    """
    if not isinstance(saved, Mapping):
        raise InvalidTypeError(f"save_for_backward expects a mapping of names to tensors, got {type(saved).__name__}.")
    for name, value in saved.items():
        if not isinstance(name, str):
            raise InvalidTypeError(f"save_for_backward expects names to be str, got {type(name).__name__}.")
        if not name:
            raise InvalidValueError("a save_for_backward name must be non-empty.")
        if "." in name:
            raise UsageError(f"a save_for_backward name must not contain a dot, got {name!r}.")
        if value is not None and not isinstance(value, Tensor):
            raise UsageError(f"save_for_backward expects tensors or None, got {type(value).__name__} for {name!r}.")
    if not tracing():
        frame = current_frame.get()
        if frame is not None:
            frame.name_saves(ctx, saved)
    ctx.save_for_backward(*saved.values())
