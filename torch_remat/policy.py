"""The public ``apply_policy``: checkpoints and regions on a model that nobody edited, by module path.

Everything is found and checked first, then attached: a call that raises leaves the model as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_remat.checkpoint import checkpoint
from torch_remat.errors import InvalidTypeError, InvalidValueError, UsageError
from torch_remat.policy_calls import StateHooks, attach_checkpoint, attach_region, attached_name
from torch_remat.policy_patterns import Rule, Verdict, checked_overrides, checked_patterns, decide, matches, nearest

__all__ = ["BlockPolicy", "BlockRegions", "PolicyReport", "RegionListing", "apply_policy", "available_regions"]

_logger = logging.getLogger("torch_remat")

Override = Mapping[str, Sequence[str]] | None


@dataclass(frozen=True)
class BlockPolicy:
    """What a policy made of one block.

    Attributes:
        name: path of the block in the model; the ``region_name`` of its checkpoint.
        save: names of its SAVE regions: module paths relative to the block.
        recompute: names of its RECOMPUTE regions. What is in neither is bare.
        checkpoint: False where an override says that the block is no checkpoint.
    """

    name: str
    save: tuple[str, ...]
    recompute: tuple[str, ...]
    checkpoint: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self._rule()}"

    def _rule(self) -> str:
        if not self.checkpoint:
            return "no checkpoint"
        saved = f"save {', '.join(self.save)}" if self.save else "save nothing"
        return f"{saved}; recompute {', '.join(self.recompute)}" if self.recompute else saved


@dataclass(frozen=True)
class PolicyReport:
    """What :func:`apply_policy` did. ``print`` it, or use it as data (``dataclasses.asdict``).

    Attributes:
        blocks: every block, in module order.
        notes: what may not be meant: blocks that save nothing although patterns are given, a frozen model.
    """

    blocks: tuple[BlockPolicy, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = _grouped((block.name, block._rule()) for block in self.blocks)
        return "\n".join(["torch_remat policy", *lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class BlockRegions:
    """The regions that one block offers.

    Attributes:
        name: path of the block in the model.
        regions: paths of its submodules, relative to the block.
    """

    name: str
    regions: tuple[str, ...]


@dataclass(frozen=True)
class RegionListing:
    """What :func:`available_regions` found. ``print`` it, or use it as data.

    Attributes:
        blocks: every block, in module order.
    """

    blocks: tuple[BlockRegions, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The region names of all blocks, each once."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.regions))

    def __str__(self) -> str:
        lines = _grouped((block.name, "\n  ".join(["", *block.regions])) for block in self.blocks)
        return "\n".join(["torch_remat regions", *lines])


class _Block:
    """One block and the modules below it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.modules = {path: one for path, one in module.named_modules(remove_duplicate=False) if path}
        self.callable_paths = {path: _is_callable(one) for path, one in self.modules.items()}

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(path for path, can_be_called in self.callable_paths.items() if can_be_called)


def available_regions(model: nn.Module, blocks: str | Sequence[str] = "layers.*") -> RegionListing:
    """The region names that :func:`apply_policy` knows in each block: the paths of its submodules.

    Reads names only, so a model on the meta device will do. Containers that are never called themselves
    (``ModuleList``) are not listed; a pattern may name them and then means the modules in them.

    Args:
        model: any module.
        blocks: shell pattern, or several, over module paths in ``model``; of nested matches the outermost is a block.

    Raises:
        ValueError: a pattern of ``blocks`` matches no module.
    """
    found = _find_blocks(model, _block_patterns(blocks), part=False)
    return RegionListing(tuple(BlockRegions(block.name, block.regions) for block in found))


def apply_policy(
    model: nn.Module,
    blocks: str | Sequence[str] = "layers.*",
    save: Sequence[str] = (),
    recompute: Sequence[str] = (),
    *,
    required: Sequence[str] = (),
    overrides: Mapping[str, Override] | None = None,
    determinism_check: str = "default",
    saved_tensors_hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None,
    recompute_state_hooks: StateHooks = (),
    part: bool = False,
) -> PolicyReport:
    """Make checkpoints of a model's blocks and regions of calls in them, in place, without touching its code.

    ``apply_policy(model, "layers.*", save=["attention.wo", "feed_forward.*"])``: the forward of each block is a
    checkpoint named by its path; each call of a submodule that matches is a SAVE region named by its path relative to
    the block, hooks of the submodule included. Nothing is wrapped: types, module names and state dict keys stay.

    Args:
        model: any module, also on the meta device; before or after FSDP2, tensor parallelism and pipeline splitting.
        blocks: shell pattern, or several, over module paths in ``model``; of nested matches the outermost is a block.
        save: shell patterns over module paths relative to a block (``*`` crosses dots). A match holds for the whole
            module: it runs once, and nothing in it is recomputed.
        recompute: patterns that win over ``save``; a module with a match below it is not saved as a whole, its other
            submodules are. What is named here becomes a RECOMPUTE region, with a name in traces and errors.
        required: patterns that win over both where they match; no error where they do not. For decisions that must not
            be taken twice, such as a router's.
        overrides: block pattern -> ``{"save": [...], "recompute": [...]}`` in place of the model's, or None for a block
            that is no checkpoint. Of several that match the last holds.
        determinism_check: as for :func:`checkpoint`.
        saved_tensors_hooks: as for :func:`checkpoint`.
        recompute_state_hooks: as for :func:`checkpoint`, or a function that makes the hooks of a block from the block.
        part: ``model`` is a part of the one the policy is for, a pipeline stage, say: what matches nothing in it, and
            a part without blocks, is no error.

    Returns:
        What was done, block by block, and what may not be meant (also logged as warnings).

    Raises:
        ValueError: a pattern matches nothing (the message names the nearest paths), or an option has a bad value.
        TypeError: an option has the wrong type.
        RuntimeError: a policy was applied to a block or a submodule before.
    """
    rule = Rule(
        checked_patterns("save", save), checked_patterns("recompute", recompute), checked_patterns("required", required)
    )
    rules = checked_overrides({} if overrides is None else overrides, *rule)
    options = {"determinism_check": determinism_check, "saved_tensors_hooks": saved_tensors_hooks}
    checked_hooks = () if callable(recompute_state_hooks) else tuple(_iterable(recompute_state_hooks))
    checkpoint(recompute_state_hooks=checked_hooks, **options)  # raises for what it does not take
    state_hooks = recompute_state_hooks if callable(recompute_state_hooks) else checked_hooks

    found = _find_blocks(model, _block_patterns(blocks), part)
    chosen = [(block, _rule_of(block.name, rule, rules)) for block in found]
    if not part:
        _require_matches(rule, rules, chosen)
    decided = [(block, {} if one is None else decide(block.callable_paths, one)) for block, one in chosen]
    _refuse_a_second_policy(found)
    regions = _distinct_regions(decided)

    report = _report(model, chosen, decided)
    for module, name, verdict in regions:
        attach_region(module, name, recompute=verdict is Verdict.RECOMPUTE)
    for policy, block in zip(report.blocks, found, strict=True):
        if policy.checkpoint:
            attach_checkpoint(block.module, block.name, policy._rule(), state_hooks, options)
    for note in report.notes:
        _logger.warning("%s", note)
    return report


def _iterable(hooks: Any) -> Iterable[Any]:
    if isinstance(hooks, Iterable):
        return hooks
    raise InvalidTypeError(
        f"apply_policy expects recompute_state_hooks to be an iterable of state hooks or a function of a block, got "
        f"{type(hooks).__name__}. To fix: recompute_state_hooks=(hook,)."
    )


def _block_patterns(blocks: Any) -> tuple[str, ...]:
    return (blocks,) if isinstance(blocks, str) else checked_patterns("blocks", blocks)


def _is_callable(module: nn.Module) -> bool:
    """Whether the module has a forward of its own; containers do not."""
    return type(module).forward is not nn.Module.forward


def _find_blocks(model: nn.Module, patterns: tuple[str, ...], part: bool) -> list[_Block]:
    """The outermost callable modules that match, in module order."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"apply_policy expects a torch.nn.Module, got {type(model).__name__}.")
    found: list[_Block] = []
    for path, module in model.named_modules():
        inside = bool(found) and path.startswith(f"{found[-1].name}.")
        if path and not inside and matches(path, patterns) and _is_callable(module):
            found.append(_Block(path, module))
    if not part:
        paths = [path for path, _ in model.named_modules() if path]
        for pattern in patterns:
            if not any(matches(block.name, (pattern,)) for block in found):
                raise InvalidValueError(
                    f"blocks pattern {pattern!r} matches no module of the model.\n"
                    f"To fix: name modules by their path in the model; the nearest are {nearest(pattern, paths)}."
                )
    return found


def _rule_of(name: str, rule: Rule, overrides: dict[str, Rule | None]) -> Rule | None:
    for pattern, one in reversed(overrides.items()):
        if matches(name, (pattern,)):
            return one
    return rule


def _require_matches(rule: Rule, overrides: dict[str, Rule | None], chosen: list[tuple[_Block, Rule | None]]) -> None:
    """Raise for the first pattern that names nothing, showing the nearest names there are."""
    for pattern in overrides:
        if not any(matches(block.name, (pattern,)) for block, _ in chosen):
            names = [block.name for block, _ in chosen]
            raise InvalidValueError(
                f"override {pattern!r} matches no block.\n"
                f"To fix: name blocks by their path in the model; the nearest are {nearest(pattern, names)}."
            )
    everywhere = [block for block, _ in chosen]
    for owner, one, blocks in [
        ("", rule, everywhere),
        *(
            (f" of the override {pattern!r}", one, [block for block in everywhere if matches(block.name, (pattern,))])
            for pattern, one in overrides.items()
        ),
    ]:
        if one is None:
            continue
        paths = [path for block in blocks for path in block.modules]
        for kind, patterns in (("save", one.save), ("recompute", one.recompute)):
            for pattern in patterns:
                if owner and pattern in getattr(rule, kind):
                    continue  # the model's own pattern, which need not match in every block
                if not any(matches(path, (pattern,)) for path in paths):
                    raise InvalidValueError(
                        f"{kind} pattern {pattern!r}{owner} matches no submodule of any block.\n"
                        f"To fix: name a module path relative to a block; the nearest are {nearest(pattern, paths)}."
                    )


def _refuse_a_second_policy(blocks: list[_Block]) -> None:
    for block in blocks:
        for path, module in [("", block.module), *block.modules.items()]:
            name = attached_name(module)
            if name is not None:
                where = f"{block.name}.{path}" if path else block.name
                raise UsageError(
                    f"A policy was applied before: {where!r} is the {'region' if path else 'checkpoint'} {name!r} "
                    f"already.\nTo fix: apply one policy to a model, once; build the model again for another policy."
                )


def _distinct_regions(decided: list[tuple[_Block, dict[str, Verdict]]]) -> list[tuple[nn.Module, str, Verdict]]:
    """Each module once, under its first name; a module that is shared must be decided the same everywhere."""
    first: dict[int, tuple[nn.Module, str, str, Verdict | None]] = {}
    for block, verdicts in decided:
        for path, module in block.modules.items():
            verdict = verdicts.get(path)
            known = first.setdefault(id(module), (module, block.name, path, verdict))
            if known[3] is not verdict:
                raise InvalidValueError(
                    f"One module is both {known[1]}.{known[2]} and {block.name}.{path}, and the policy makes it "
                    f"{_word(known[3])} in the first place and {_word(verdict)} in the second.\n"
                    f"To fix: use patterns that decide the same for both."
                )
    return [(module, path, verdict) for module, _, path, verdict in first.values() if verdict is not None]


def _word(verdict: Verdict | None) -> str:
    return "bare" if verdict is None else f"a {verdict.name} region"


def _report(
    model: nn.Module,
    chosen: list[tuple[_Block, Rule | None]],
    decided: list[tuple[_Block, dict[str, Verdict]]],
) -> PolicyReport:
    policies = []
    without = []
    for (block, rule), (_, verdicts) in zip(chosen, decided, strict=True):
        save = tuple(path for path, verdict in verdicts.items() if verdict is Verdict.SAVE)
        recompute = tuple(path for path, verdict in verdicts.items() if verdict is Verdict.RECOMPUTE)
        policies.append(BlockPolicy(block.name, save, recompute, rule is not None))
        if rule is not None and rule.save and not save:
            without.append(block.name)
    notes = []
    if without:
        notes.append(
            f"{_names(without)} {'saves' if len(without) == 1 else 'save'} nothing although the policy has save "
            f"patterns: recomputed whole."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        notes.append("no parameter of the model requires grad: backward enters a block only if its input does.")
    return PolicyReport(tuple(policies), tuple(notes))


def _grouped(entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """One line per distinct text, with the names that have it."""
    names: dict[str, list[str]] = {}
    for name, text in entries:
        names.setdefault(text, []).append(name)
    for text, having in names.items():
        yield f"{_names(having)}:{text}" if text.startswith("\n") else f"{_names(having)}: {text}"


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} blocks)"
