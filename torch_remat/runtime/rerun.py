"""``on_missing="rerun"``: replay runs a SAVE region a second time for an output that turned out to be needed.

A replay that meets a placeholder whose data is needed is given up, and another one starts in which the region that made
it is run instead of skipped. Its saves are not taken again, and what it returns counts only where nothing was kept. A
region that draws random numbers which no state hook restores, that modifies what it did not make, or whose captured
tensors and module have changed since, cannot be run again: that is an error, as without the option. Collectives in it
are issued again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_remat.errors import ModifiedError, PlaceholderError, RandomStateError, SavesDriftError, display_name
from torch_remat.runtime.generators import DrawWatch, covered, random_message
from torch_remat.runtime.graft import as_result
from torch_remat.runtime.hooks import pop_hooks, push_hooks
from torch_remat.runtime.placeholder import user_line
from torch_remat.runtime.region_writes import no_writes
from torch_remat.runtime.tape import OutputKind, Region, Tape
from torch_remat.runtime.tree import flatten

__all__ = ["plan_rerun", "rerun"]


def plan_rerun(tape: Tape, error: PlaceholderError) -> bool:
    """Whether another replay, which runs the region that ``error`` is about, may do better. Warns if so."""
    region = error.region
    if tape.reruns is None or region is None or region in tape.reruns:
        return False
    tape.reruns.add(region)
    warnings.warn(
        f"Replay of checkpoint {display_name(tape.name)} needs an output of region {region} that was not kept, and "
        f'runs the region again (on_missing="rerun"). What replay reads is learned anew in the next call.\n{error}',
        stacklevel=2,
    )
    return True


def rerun(
    tape: Tape, record: Region, hooks: tuple[Any, Any], function: Callable[..., Any], args: Any, kwargs: Any
) -> dict[int, Tensor]:
    """Run the region; its tensors, detached, by position, where replay would hand out a placeholder.

    ``hooks`` are those of the running replay, which do not see what the region saves.
    """
    for seen in record.outside:
        name = seen.changed()
        if name is not None:
            raise ModifiedError(
                f"Region {display_name(tape.name, record.name)} cannot be run again for an output that replay needs "
                f'(on_missing="rerun"): {name}, which it may read, was modified or replaced since it ran.\n'
                f"To fix: call remat.recompute_needs_tensor on the output, so that it is kept."
            )
    watch = DrawWatch(functools.partial(_check_draw, tape))
    pop_hooks()
    try:
        with no_writes(tape, record.name), watch:
            result = function(*args, **kwargs)
    finally:
        push_hooks(*hooks)
    leaves: list[Any] = []
    flatten(result, leaves)
    return {
        position: _checked(tape, record, position, output.meta, leaves)
        for position, output in enumerate(record.outputs)
        if output.kind is OutputKind.PLACEHOLDER
    }


def _checked(tape: Tape, record: Region, position: int, meta: Any, leaves: list[Any]) -> Tensor:
    leaf = leaves[position] if position < len(leaves) else None
    if not isinstance(leaf, Tensor) or (tuple(leaf.shape), leaf.dtype) != (meta.size, meta.dtype):
        raise SavesDriftError(
            f"Region {display_name(tape.name, record.name)} returns something else when it is run again "
            f'(on_missing="rerun"): output {position} was a {meta.size} {meta.dtype} tensor.\n'
            f"To fix: make the region deterministic, or call remat.recompute_needs_tensor on the output."
        )
    leaf = leaf.detach()
    return as_result(leaf) if meta.requires_grad else leaf


def _check_draw(tape: Tape, operation: str, generator: Any) -> None:
    if not covered(tape.hooks, generator):
        raise RandomStateError(random_message(tape.name, f"{operation} at {user_line()}", generator))
