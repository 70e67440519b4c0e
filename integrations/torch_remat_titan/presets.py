"""What a preset saves in a model: module paths relative to a block, found by what the modules are.

| preset | SAVE regions |
|---|---|
| `none` | nothing: every block is recomputed whole |
| `attention` | the attention core and the output projection behind it |
| `matmuls` | every module with a weight matrix of its own, experts included, and the attention core |
| `communication` | every module with a collective inside, for what the job uses: tensor parallelism (attention, \
feed-forward, MoE), context parallelism (attention core), expert parallelism (routed experts) |
| `all` | every module of the block; what remains to recompute are the operations of the block itself |
"""

import fnmatch
from collections.abc import Iterable

from torch import nn

CORES = ("inner_attention",)
"""Names of the modules that compute attention from queries, keys and values, in every family."""

_OUTPUTS = ("wo", "proj", "linear2")
_EXPERTS = ("routed_experts", "experts")


def saved_by(preset: str, block: nn.Module, parallel: frozenset[str]) -> list[str]:
    """The paths that `preset` saves in `block`.

    Args:
        preset: one of `options.PRESETS`.
        block: a block of the model.
        parallel: which of `"tp"`, `"cp"`, `"ep"` the job uses.
    """
    modules = {path: module for path, module in block.named_modules() if path}
    if preset == "none":
        return []
    if preset == "all":
        return list(modules)
    if preset == "matmuls":
        return [path for path, module in modules.items() if _last(path) in CORES or _has_matrix(module)]
    if preset == "attention":
        inside = [path.rpartition(".")[0] for path in modules if _last(path) in CORES]
        outputs = [path for path in modules if _last(path) in _OUTPUTS and path.rpartition(".")[0] in inside]
        return [*(path for path in modules if _last(path) in CORES), *outputs]
    found = []
    if "tp" in parallel:
        # The collectives hang on the sub-layers: a gather before each, a reduction behind its last projection.
        found += [path for path, module in block.named_children() if _holds_matrix(module)]
    if "cp" in parallel:
        found += [path for path in modules if _last(path) in CORES]
    if "ep" in parallel:
        found += [path for path in modules if _last(path) in _EXPERTS]
    return found


def blocks_matching(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Those of `patterns` that match a module of `model`."""
    paths = [path for path, _ in model.named_modules()]
    return [pattern for pattern in patterns if any(fnmatch.fnmatchcase(path, pattern) for path in paths)]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def _holds_matrix(module: nn.Module) -> bool:
    return any(map(_has_matrix, module.modules()))
