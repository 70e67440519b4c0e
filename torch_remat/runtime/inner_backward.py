"""A backward that recomputed code runs by itself: refused where a replay of it would compute something else.

In replay an output of a SAVE region has no graph to the region's arguments, so a gradient that came through the region
would be without that part. And what adds to ``.grad`` of a leaf that was there before the body adds to it in each pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torch_remat.errors import UnsupportedError, display_name
from torch_remat.runtime import externals
from torch_remat.runtime.tape import Tape
from torch_remat.runtime.tensors import is_leaf_node

__all__ = ["check_inner_backward", "was_there"]


def check_inner_backward(tape: Tape, outputs: Any, inputs: Any, *, accumulates: bool) -> None:
    """Refuse a gradient of ``outputs`` for ``inputs`` (None: for all leaves) that replay cannot compute.

    ``accumulates``: into ``.grad``.
    """
    starts, targets = _nodes(outputs), None if inputs is None else _nodes(inputs)
    order = _walk(starts)
    first = tape.first_sequence_nr
    leading: set[Any] = set()  # nodes that lead to a target
    for node in order:
        is_leaf = is_leaf_node(node)
        wanted = is_leaf if targets is None else node in targets
        adds = accumulates and not tape.guards and is_leaf
        if wanted and adds and was_there(tape, node.variable):
            raise UnsupportedError(
                f"Recomputed code of checkpoint {display_name(tape.name)} calls backward() and so adds to the .grad of "
                f"a leaf from outside, a {tuple(node.variable.shape)} tensor: replay would add to it a second time.\n"
                f"To fix: use torch.autograd.grad, call backward() after the checkpoint, or do it in a region with "
                f"recompute=False, or under `if not remat.is_recomputing():`."
            )
        onward = any(edge in leading for edge, _ in node.next_functions)
        above = [edge for edge, _ in node.next_functions if edge in leading and edge._sequence_nr() < first]
        if node._sequence_nr() >= first and targets is not None and not targets.issuperset(above):
            raise UnsupportedError(
                f"Recomputed code of checkpoint {display_name(tape.name)} computes a gradient for something above the "
                f"checkpoint's input, which in replay has no graph: the gradient would be without that part.\n"
                f"To fix: pass what the gradient is for as an argument, or compute it outside of the checkpoint."
            )
        name = _region_of(tape, node._sequence_nr()) if onward else None
        if name is not None:
            raise UnsupportedError(
                f"Recomputed code of checkpoint {display_name(tape.name)} computes a gradient through region "
                f"{display_name(tape.name, name)} (recompute=False), of which replay has the outputs and no graph: the "
                f"gradient would be without that part.\n"
                f"To fix: put the call of torch.autograd.grad, and what it differentiates, into one region with "
                f"recompute=False, or make region {name} recompute=True."
            )
        if wanted or onward:
            leading.add(node)


def _region_of(tape: Tape, number: int) -> str | None:
    """The SAVE region that made the autograd node of this number."""
    return next(
        (span.name for span in tape.spans.items if span.end is not None and span.start <= number < span.end), None
    )


def _nodes(given: Any) -> set[Any]:
    several = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else (given,)
    found = set()
    for one in several:
        if isinstance(one, GradientEdge):
            found.add(one.node)
        elif isinstance(one, Tensor) and one.requires_grad:
            found.add(get_gradient_edge(one).node)
    return found


def _walk(starts: set[Any]) -> list[Any]:
    """The nodes that can be reached, each behind all that it leads to."""
    order: list[Any] = []
    seen: set[Any] = set()
    pending: list[tuple[Any, bool]] = [(node, False) for node in starts]
    while pending:
        node, left = pending.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            pending.extend((edge, False) for edge, _ in node.next_functions if edge is not None)
    return order


def was_there(tape: Tape, leaf: Tensor, *, inputs: bool = True) -> bool:
    """Whether a tensor is a parameter, captured or (with ``inputs``) an argument: the body did not make it."""
    if isinstance(leaf, torch.nn.Parameter) or (inputs and any(output.data is leaf for output in tape.inputs)):
        return True
    return bool(externals.find(externals.root_of(tape), lambda tensor: tensor is leaf))
