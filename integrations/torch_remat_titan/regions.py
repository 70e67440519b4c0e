"""Blocks become checkpoints and calls of their submodules become SAVE regions, on a model nobody edited.

No wrapper modules: a block's or submodule's `forward` is shadowed on the instance, so `named_modules`, `state_dict`,
`type(block)` and hooks on module calls (FSDP's included, which stay outside the replay) are as before. What shadows
it is a `functools.partial` over bound methods, so a deep copy of the model runs its own weights.
"""

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

import torch_remat as remat


@dataclass(frozen=True)
class RegionPolicy:
    """Which calls inside a block are SAVE regions; everything else in the block is recomputed.

    Attributes:
        save: shell patterns over module paths relative to a block, such as `"feed_forward.w1"` or `"attention.*"`. Each
            call of a matching module is a SAVE region named by its path. An empty tuple recomputes the whole block.
        determinism_check: passed to `torch_remat.checkpoint`.
    """

    save: tuple[str, ...] = ()
    determinism_check: str = "default"


LLAMA3_SAVE = (
    "attention.inner_attention",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
)
"""Attention core, output projection and feed-forward projections of torchtitan's Llama 3 block."""


def checkpoint_blocks(model: nn.Module, policy: RegionPolicy, *, blocks: str = "layers") -> list[str]:
    """Make every child of `model.<blocks>` a checkpoint whose regions follow `policy`.

    The checkpoint of child `i` has the region name `<blocks>.<i>`. A pipeline part without blocks is left alone.

    Args:
        model: the model, before FSDP or compilation is applied to its blocks.
        policy: see `RegionPolicy`.
        blocks: path of the container of blocks.

    Returns:
        The names of the checkpoints, in order.

    Raises:
        ValueError: a pattern matches no submodule of any block, or a block is a checkpoint already.
    """
    named_blocks = [(f"{blocks}.{name}", block) for name, block in model.get_submodule(blocks).named_children()]
    if not named_blocks:
        return []
    for name, block in named_blocks:
        if _shadowed_by(block, _run_checkpoint):
            raise ValueError(
                f"checkpoint {name!r}: this block is a checkpoint already.\n"
                "To fix: apply one policy to a model once; build the model again for another policy."
            )
    saved = {name: _matching_paths(block, policy.save) for name, block in named_blocks}
    _require_every_pattern_matched(policy, saved.values(), named_blocks[0][1])
    for name, block in named_blocks:
        for path in saved[name]:
            module = block.get_submodule(path)
            _shadow_forward(module, _run_save_region, path)
        _shadow_forward(block, _run_checkpoint, name, policy)
    return [name for name, _ in named_blocks]


def _matching_paths(block: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Paths of the submodules of `block` that match a pattern, in module order."""
    paths = [path for path, _ in block.named_modules() if path]
    return [path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]


def _require_every_pattern_matched(policy: RegionPolicy, saved: Iterable[list[str]], block: nn.Module) -> None:
    """Raise for the first pattern that names no submodule of any block, showing the nearest paths there are."""
    found = {path for paths in saved for path in paths}
    for pattern in policy.save:
        if any(fnmatch.fnmatchcase(path, pattern) for path in found):
            continue
        paths = [path for path, _ in block.named_modules() if path]
        nearest = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
        raise ValueError(
            f"save pattern {pattern!r} matches no submodule of any block.\n"
            f"To fix: name a module path relative to a block; the nearest are {', '.join(map(repr, nearest))}."
        )


def _shadow_forward(module: nn.Module, run: Callable[..., Any], *options: Any) -> None:
    """Put `run(original_forward, *options, ...)` in front of `module.forward`, on the instance."""
    module.forward = functools.partial(run, module.forward, *options)


def _shadowed_by(module: nn.Module, run: Callable[..., Any]) -> bool:
    """Whether `module.forward` was shadowed with `run`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func is run


def _run_checkpoint(
    forward: Callable[..., Any], region_name: str, policy: RegionPolicy, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a block's original `forward` as the body of a checkpoint."""
    checkpoint = remat.checkpoint(region_name=region_name, determinism_check=policy.determinism_check)
    return checkpoint(forward)(*args, **kwargs)


def _run_save_region(forward: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a submodule's original `forward` as a SAVE region."""
    return remat.region(forward, name, recompute=False)(*args, **kwargs)
