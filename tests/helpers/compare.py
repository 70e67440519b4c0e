"""The oracle: the same body run as plain eager code and under a checkpoint must give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers.engine import EAGER, EagerEngine
from helpers.trees import assert_same_tree, clone_tree, tensors_of

Backward = Callable[[Any, list[torch.Tensor]], Any]


@dataclass
class Run:
    """What one run of a body left behind."""

    outputs: Any = None
    extra: Any = None
    """Whatever the backward function returned (gradients of ``autograd.grad``, for example)."""
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    param_grads: list[torch.Tensor | None] = field(default_factory=list)
    inputs_after: list[torch.Tensor] = field(default_factory=list)
    """Values of the inputs afterwards: a body may change them in place."""
    rng_state: torch.Tensor | None = None
    error: BaseException | None = None
    failed_in: str | None = None


def grad_weight(output: torch.Tensor) -> torch.Tensor:
    """A fixed gradient for ``output`` that no random generator has a part in."""
    ramp = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    return (torch.cos(ramp) + 0.5).reshape(output.shape).to(output.dtype)


def plain_backward(outputs: Any, inputs: list[torch.Tensor], **options: Any) -> None:
    """Backward through every output that requires grad, all at once."""
    roots = [output for output in tensors_of(outputs) if output.requires_grad]
    if roots:
        torch.autograd.backward(roots, [grad_weight(root) for root in roots], **options)


def run_once(
    call: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    kwargs: dict[str, Any] | None = None,
    params: Sequence[torch.Tensor] = (),
    backward: Backward | None = plain_backward,
    seed: int = 1234,
    catch: tuple[type[BaseException], ...] = (),
) -> Run:
    """Run ``call`` on fresh copies of its inputs, then backward, and collect everything a user can see."""
    memo: dict[int, Any] = {}
    inputs, kwargs = clone_tree(list(inputs), memo), clone_tree(kwargs or {}, memo)
    leaves = tensors_of([inputs, kwargs])
    for param in params:
        param.grad = None
    torch.manual_seed(seed)
    run = Run(failed_in="forward")
    try:
        run.outputs = call(*inputs, **kwargs)
        run.failed_in = "backward"
        if backward is not None:
            run.extra = backward(run.outputs, leaves)
        run.failed_in = None
    except catch as error:
        run.error = error
        return run
    run.input_grads = [leaf.grad if leaf.is_leaf else None for leaf in leaves]
    run.param_grads = [None if param.grad is None else param.grad.clone() for param in params]
    run.inputs_after = [leaf.detach().clone() for leaf in leaves]
    run.rng_state = torch.get_rng_state()
    return run


def raised(action: Callable[[], Any], kind: type[BaseException] = RuntimeError) -> BaseException | None:
    """The error of type ``kind`` that ``action`` raises, or None."""
    try:
        action()
    except kind as error:
        return error
    return None


def assert_same_run(expected: Run, actual: Run, where: str, ulps: int = 0) -> None:
    """Require that two runs left the same bits everywhere; floating point may differ by ``ulps``."""
    assert actual.error is None, f"{where}: {actual.error!r}"
    assert_same_tree(expected.outputs, actual.outputs, f"{where}: output", ulps=ulps)
    assert_same_tree(expected.extra, actual.extra, f"{where}: extra", ulps=ulps)
    assert_same_tree(expected.input_grads, actual.input_grads, f"{where}: input grad", ulps=ulps)
    assert_same_tree(expected.param_grads, actual.param_grads, f"{where}: parameter grad", ulps=ulps)
    assert_same_tree(expected.inputs_after, actual.inputs_after, f"{where}: input value", ulps=ulps)
    assert expected.rng_state is not None
    assert actual.rng_state is not None
    assert torch.equal(expected.rng_state, actual.rng_state), f"{where}: random state afterwards differs"


def compare(
    body: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    kwargs: dict[str, Any] | None = None,
    params: Sequence[torch.Tensor] = (),
    backward: Backward | None = plain_backward,
    options: dict[str, Any] | None = None,
    engine: EagerEngine = EAGER,
    calls: int = 3,
    seed: int = 1234,
) -> Run:
    """Require that ``body`` under a checkpoint leaves exactly what it leaves as plain code; returns the plain run.

    The checkpointed form runs ``calls`` times: the first call of a body may be treated differently from later ones.
    """
    settings: dict[str, Any] = {"kwargs": kwargs, "params": params, "backward": backward, "seed": seed}
    expected = run_once(body, inputs, **settings)
    checkpointed = engine.checkpoint(body, **(options or {}))
    for call in range(calls):
        actual = run_once(checkpointed, inputs, **settings)
        _assert_same_numbers(expected, actual, f"call {call}", engine.plain(body), inputs, settings)
    return expected


def _assert_same_numbers(
    expected: Run,
    actual: Run,
    where: str,
    plain: Callable[..., Any] | None,
    inputs: Sequence[Any],
    settings: dict[str, Any],
) -> None:
    """The bits of eager code, or those of the engine's own plain code, where it may have others.

    Where a graph breaks in a checkpoint, and nowhere without, gradients of one tensor are summed in yet another order.
    """
    try:
        assert_same_run(expected, actual, where)
    except AssertionError:
        if plain is None:
            raise
        try:
            assert_same_run(run_once(plain, inputs, **settings), actual, where)
        except AssertionError:
            assert_same_run(expected, actual, where, ulps=64)


def compare_or_refused(
    body: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    refused_with: tuple[type[BaseException], ...] = (RuntimeError,),
    kwargs: dict[str, Any] | None = None,
    params: Sequence[torch.Tensor] = (),
    backward: Backward | None = plain_backward,
    options: dict[str, Any] | None = None,
    engine: EagerEngine = EAGER,
    calls: int = 3,
    seed: int = 1234,
) -> tuple[Run, list[Run]]:
    """Like :func:`compare`, but an error of ours is as good as equal bits, and what eager refuses must be refused.

    Returns the plain run and the checkpointed ones; a run without an error left equal bits.
    """
    settings: dict[str, Any] = {"kwargs": kwargs, "params": params, "backward": backward, "seed": seed}
    expected = run_once(body, inputs, **settings, catch=(RuntimeError,))
    checkpointed = engine.checkpoint(body, **(options or {}))
    runs: list[Run] = []
    for call in range(calls):
        actual = run_once(checkpointed, inputs, **settings, catch=refused_with)
        runs.append(actual)
        if expected.error is not None:
            assert actual.error is not None, f"call {call}: eager raises {expected.error!r}, the checkpoint did not"
        elif actual.error is None:
            _assert_same_numbers(expected, actual, f"call {call}", engine.plain(body), inputs, settings)
    return expected, runs
