"""`RematOptions` on a torchtitan model, or on the part of one that a pipeline stage has. Imports no torchtitan."""

import copy
import os
import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import torch_remat as remat
from torch_remat.runtime.dynamo import keep_dynamo_out
from torch_remat_titan.options import LayerOverride, RematOptions
from torch_remat_titan.presets import blocks_matching, saved_by

BLOCKS = ("layers.*", "mtp_layers.*", "double_blocks.*", "single_blocks.*", "vision_encoder.layers.*")
"""Where torchtitan's models keep their blocks."""

REQUIRED = ("router", "*.router")
"""Decisions that are never taken twice: replay must send every token where forward sent it."""

_COUNTERS = ("tokens_per_expert", "tokens_per_expert_E")


def apply_options(model: nn.Module, options: RematOptions, parallel: frozenset[str]) -> remat.PolicyReport:
    """Make checkpoints of the blocks of `model` and regions of calls in them.

    Patterns that match nothing here are no error: `model` may be one of several parts. See `check_options`.

    Args:
        model: a torchtitan model or a pipeline stage of one.
        options: what to save.
        parallel: which of `"tp"`, `"cp"`, `"ep"` the job uses.
    """
    return _apply(model, options, parallel, part=True)


def check_options(whole: nn.Module, options: RematOptions, parallel: frozenset[str]) -> None:
    """Raise `ValueError` for a pattern that matches nothing in the whole model, once for all its pipeline stages.

    `whole` may be on the meta device, and stays as it is.
    """
    _apply(copy.deepcopy(whole), options, parallel, part=False)


def list_regions(whole: nn.Module) -> str:
    """The region names of a model, for people."""
    return str(remat.available_regions(whole, blocks_matching(whole, BLOCKS)))


def print_regions_and_exit(whole: nn.Module) -> NoReturn:
    """Print the region names of a model on the first rank, and end every rank with success."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        sys.stdout.write(list_regions(whole) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not SystemExit: the recorder of errors around the trainer's constructor takes that with status 0 for a return.
    os._exit(0)


def _apply(model: nn.Module, options: RematOptions, parallel: frozenset[str], *, part: bool) -> remat.PolicyReport:
    patterns = blocks_matching(model, BLOCKS)
    if not patterns and not part:
        raise ValueError(
            f"{type(model).__name__} has no blocks where torchtitan's models have them: {', '.join(BLOCKS)}.\n"
            f"To fix: call torch_remat.apply_policy(model, blocks=...) yourself where the model is parallelized."
        )
    entries = remat.available_regions(model, patterns).blocks if patterns else ()
    blocks = {entry.name: model.get_submodule(entry.name) for entry in entries}

    def saved(presets: tuple[str, ...], patterns: tuple[str, ...]) -> list[str]:
        # By presets first, exactly what the blocks of this model have; each path once.
        found = [path for preset in presets for block in blocks.values() for path in saved_by(preset, block, parallel)]
        return list(dict.fromkeys([*found, *patterns]))

    overrides: dict[str, dict[str, list[str]] | None] = {}
    for entry in map(LayerOverride.parse, options.layer_overrides):
        if entry.save is None:
            overrides[entry.blocks] = None
        else:
            overrides[entry.blocks] = {
                "save": saved(entry.presets, entry.save),
                "recompute": list(entry.recompute),
            }
    return remat.apply_policy(
        model,
        patterns,
        save=saved((options.preset,) if options.preset else (), options.save_regions),
        recompute=options.recompute_regions,
        required=REQUIRED,
        overrides=overrides,
        determinism_check=options.determinism_check,
        recompute_state_hooks=_StateHooks(options),
        part=part,
    )


class _StateHooks:
    """Makes the state hooks of a block: the user's, and one for what its experts count."""

    def __init__(self, options: RematOptions) -> None:
        self._options = options

    def __call__(self, block: nn.Module) -> list[Any]:
        if torch.compiler.is_dynamo_compiling():
            return self._options.hooks()(block)  # a graph changes a buffer once: the compiler repeats no write to it
        owners = [module for module in block.modules() if any(name in module._buffers for name in _COUNTERS)]
        counters = [_Counters(owners)] if owners else []
        return [*self._options.hooks()(block), *counters]


class _Counters:
    """State hook: the tokens that each expert got are counted once, and not again in replay."""

    def __init__(self, owners: list[nn.Module]) -> None:
        self._owners = owners

    def _buffers(self) -> list[Tensor]:
        found = [owner._buffers.get(name) for owner in self._owners for name in _COUNTERS]
        return [buffer for buffer in found if buffer is not None]

    def snapshot(self) -> list[Tensor] | None:
        """The counts before a replay; nothing in forward, where they are as they should be."""
        if torch._C._current_graph_task_id() == -1:
            return None
        with torch.no_grad():
            return [buffer.clone() for buffer in self._buffers()]

    def restore(self, state: list[Tensor] | None) -> None:
        """Put the counts back."""
        if state is not None:
            with torch.no_grad():
                for buffer, value in zip(self._buffers(), state, strict=True):
                    buffer.copy_(value)


keep_dynamo_out(__name__)  # state hooks are called beside compiled parts of a block too, and are none of them
