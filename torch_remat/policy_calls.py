"""What is attached to a module that a policy makes a region or a checkpoint.

No wrapper module and no other class: one attribute of the instance stands before the method of its class.

1. A region stands before ``_call_impl``, which ``module(...)`` runs: hooks of the module are inside, whether they were
   registered before or after.
2. A checkpoint stands before ``forward``: hooks of the block, FSDP's among them, run once and not in replay.
3. What is attached knows its module weakly (no reference cycle), and a copy or an unpickled module gets its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from torch_remat.checkpoint import checkpoint
from torch_remat.compile.traced import traced_region
from torch_remat.errors import UsageError
from torch_remat.region import region
from torch_remat.runtime.dynamo import tracing
from torch_remat.runtime.frame import current_frame
from torch_remat.runtime.state_hooks import RecomputeStateHook

__all__ = ["CheckpointForward", "RegionCall", "StateHooks", "attach_checkpoint", "attach_region", "attached_name"]

StateHooks = Iterable[RecomputeStateHook] | Callable[[nn.Module], Iterable[RecomputeStateHook]]
"""State hooks of checkpoints: for all of them, or made for each block when it is first called."""


class _Attached:
    """A callable that stands before the method ``_method`` of one module."""

    _method: str
    name: str

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        # What stood there before: another library's, as `Module.compile()` leaves one; None for the class's method.
        self._before: Callable[..., Any] | None = None

    def _owner(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise UsageError(
                f"The module of {self.name!r} is gone; only what a policy attached to it is left. "
                f"To fix: keep or copy the module itself."
            )
        return module

    def _function(self) -> Callable[..., Any]:
        """The method that this stands before."""
        if self._before is not None:
            return self._before
        module = self._owner()
        if tracing():  # Dynamo makes no bound methods
            return functools.partial(getattr(type(module), self._method), module)
        return types.MethodType(getattr(type(module), self._method), module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attached:
        new = memo[id(self)] = _new(type(self))
        # The copy of the module is in the memo: it is what is being copied. Options and state hooks are shared.
        vars(new).update(vars(self), _before=copy.deepcopy(self._before, memo))
        new._belongs_to(copy.deepcopy(self._owner(), memo))
        return new

    def __reduce__(self) -> Any:
        # Two steps, so that a module and what is attached to it can refer to each other.
        return _new, (type(self),), {**vars(self), "_module": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._belongs_to(state["_module"])

    def _belongs_to(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._function()

    @property
    def __func__(self) -> Any:
        # Compilers look for the function of a bound method here.
        return type(self).__call__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())


def _new(kind: type[_Attached]) -> _Attached:
    return kind.__new__(kind)


class RegionCall(_Attached):
    """``module(...)`` as a region."""

    _method = "_call_impl"

    def __init__(self, module: nn.Module, name: str, recompute: bool) -> None:
        super().__init__(module)
        self.name = name
        self.recompute = recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as a region."""
        if tracing():
            return traced_region(self._function(), self.name, self.recompute, args, kwargs, counted=True)
        name = self.name
        frame = current_frame.get()
        if frame is not None and not frame.inert:
            # A module that a body calls again: the calls are told apart by their order, which replay repeats.
            name = frame.free_name(name)
        return region(self._function(), name, recompute=self.recompute)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<region {self.name} ({'recompute' if self.recompute else 'save'})>"


class CheckpointForward(_Attached):
    """``module.forward(...)`` as a checkpoint."""

    _method = "forward"

    def __init__(
        self, module: nn.Module, name: str, policy: str, state_hooks: StateHooks, options: dict[str, Any]
    ) -> None:
        super().__init__(module)
        self.name = name
        self.state_hooks = state_hooks
        self.policy = policy
        self.options = options
        self._hooks: tuple[Any, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` of the module as a checkpoint."""
        if tracing():
            hooks = self._state_hooks()  # not those of eager calls: some have nothing to do in a graph
            checkpointed = checkpoint(region_name=self.name, recompute_state_hooks=hooks, **self.options)
            return checkpointed(self._function())(*args, **kwargs)
        body = functools.partial(_body, self._function(), self.policy)
        hooks = self._hooks
        if hooks is None:
            hooks = self._hooks = self._state_hooks()
        return checkpoint(region_name=self.name, recompute_state_hooks=hooks, **self.options)(body)(*args, **kwargs)

    def _state_hooks(self) -> tuple[Any, ...]:
        hooks = self.state_hooks
        return tuple(hooks(self._owner()) if callable(hooks) else hooks)

    def _belongs_to(self, module: nn.Module) -> None:
        super()._belongs_to(module)
        self._hooks = None  # made for a module, and this is another one

    def __reduce__(self) -> Any:
        made, kind, state = super().__reduce__()
        return made, kind, {**state, "_hooks": None}

    def __repr__(self) -> str:
        return f"<checkpoint {self.name}>"


def _body(forward: Callable[..., Any], policy: str, /, *args: Any, **kwargs: Any) -> Any:
    """A block's forward. ``policy`` is there to be seen: equal blocks with other policies are other bodies."""
    return forward(*args, **kwargs)


def attach_region(module: nn.Module, name: str, *, recompute: bool) -> None:
    """Make every call of ``module`` a region."""
    for attribute in ("_call_impl", "_compiled_call_impl"):
        before = vars(module).get(attribute)
        if attribute == "_compiled_call_impl" and before is None:
            continue
        call = RegionCall(module, name, recompute)
        call._before = before
        setattr(module, attribute, call)


def attach_checkpoint(
    module: nn.Module, name: str, policy: str, state_hooks: StateHooks, options: dict[str, Any]
) -> None:
    """Make every ``forward`` of ``module`` a checkpoint."""
    call = CheckpointForward(module, name, policy, state_hooks, options)
    call._before = vars(module).get("forward")
    module.forward = call


def attached_name(module: nn.Module) -> str | None:
    """The name under which a policy made ``module`` a checkpoint or a region; None where none did."""
    for attribute in ("forward", "_call_impl"):
        found = vars(module).get(attribute)
        if isinstance(found, _Attached):
            return found.name
    return None
