"""What the partitioner is told about the operations of a checkpoint in a graph: which to keep, which to recompute."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import traceback
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["SAVE_MARK", "contexts"]

SAVE_MARK = "torch_remat_save"
"""Key in ``node.meta["custom"]`` of what a SAVE region computes; the value is the region's name."""


def contexts() -> Any:
    """The pair of contexts of a checkpoint in a graph."""
    return create_selective_checkpoint_contexts(_policy, allow_cache_entry_mutation=True)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    marks = traceback.current_meta.get("custom")
    if marks and SAVE_MARK in marks:
        # A view costs nothing to make again, and kept it would pin what it is a view of.
        return CheckpointPolicy.PREFER_RECOMPUTE if _is_view(operation) else CheckpointPolicy.MUST_SAVE
    if _draws(operation, args, kwargs) and not _draws_the_same_again(operation):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_view(operation: Any) -> bool:
    if not isinstance(operation, torch._ops.OpOverload):
        return False
    if operation is torch.ops.aten._unsafe_view.default:
        return True
    aliases = [argument.alias_info for argument in operation._schema.arguments if argument.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _draws(operation: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":  # attention is tagged for the dropout in it
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0
    return True


def _draws_the_same_again(operation: Any) -> bool:
    """Whether the compiler breaks the operation down to a seed that it keeps, as Inductor does."""
    table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})
    aten = torch.ops.aten
    return aten.rand_like.default in table and (
        operation in table or operation in (aten.rand.default, aten.randn.default, aten.randint.low)
    )
