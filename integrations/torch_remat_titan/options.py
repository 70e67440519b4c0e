"""The options of `activation_checkpoint.mode = "remat"`: one dataclass behind both versions of torchtitan.

Imports neither torchtitan nor torch.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MODE = "remat"
"""The value of `activation_checkpoint.mode` that means us."""

PRESETS = ("none", "attention", "matmuls", "communication", "all")
"""See `presets.py` for what each saves."""


@dataclass(frozen=True, kw_only=True)
class RematOptions:
    """What the blocks of a model save and recompute.

    Attributes:
        preset: one of `PRESETS`, or empty; what it saves comes on top of `save_regions`.
        save_regions: shell patterns over module paths relative to a block. Each call of a match runs once.
        recompute_regions: patterns that win over what is saved.
        layer_overrides: `"BLOCKS=WHAT"` for blocks that differ: `BLOCKS` is a pattern over block names, `WHAT` is `off`
            (no checkpoint) or patterns joined by `+`; `!` before one recomputes, `@` before one names a preset.
        determinism_check: as for `torch_remat.checkpoint`.
        state_hooks: `"module:name"` of state hooks, or of functions that make the hooks of a block from the block.
        list_regions: print the region names of the model and stop.
        memory_dashboard: folder, below the job's own, of a run for TensorBoard with every rank's memory; or empty.
    """

    preset: str = ""
    save_regions: tuple[str, ...] = ()
    recompute_regions: tuple[str, ...] = ()
    layer_overrides: tuple[str, ...] = ()
    determinism_check: str = "default"
    state_hooks: tuple[str, ...] = ()
    list_regions: bool = False
    memory_dashboard: str = ""

    def __post_init__(self) -> None:
        if self.preset and self.preset not in PRESETS:
            raise ValueError(
                f"activation_checkpoint.preset is {self.preset!r}.\nTo fix: one of {', '.join(PRESETS)}, or empty."
            )
        if not (self.preset or self.save_regions or self.list_regions):
            raise ValueError(
                "activation_checkpoint.mode is remat and nothing says what to save.\n"
                "To fix: give activation_checkpoint.save_regions or activation_checkpoint.preset; preset none "
                "recomputes every block whole, activation_checkpoint.list_regions prints the names to choose from."
            )
        for override in self.layer_overrides:
            LayerOverride.parse(override)

    @classmethod
    def collect(cls, source: Any) -> "RematOptions":
        """The options among the attributes of `source`, a section of the host's configuration."""
        found = {field.name: getattr(source, field.name) for field in fields(cls) if hasattr(source, field.name)}
        return cls.of(found)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RematOptions":
        """The options from plain values: lists, or strings with commas, where there are several."""
        given: dict[str, Any] = dict(values)
        given.update({name: _several(value) for name, value in values.items() if name in SEVERAL})
        return cls(**given)

    def check_compiled(self) -> None:
        """Raise `ValueError` for what a block that is compiled whole cannot do: there is no replay of Python code."""
        if self.determinism_check == "bitwise":
            raise ValueError(
                "activation_checkpoint.determinism_check is bitwise, and compile.enable compiles whole blocks: the "
                "compiler repeats operations, nothing is at hand to compare.\n"
                "To fix: leave determinism_check out, or check a short run without compile.enable."
            )
        if self.state_hooks:
            raise ValueError(
                "activation_checkpoint.state_hooks is given, and compile.enable compiles whole blocks: the compiler "
                "repeats operations and no Python code.\n"
                "To fix: leave state_hooks out (random numbers need no hook in a compiled block), or compile.enable."
            )

    def hooks(self) -> Callable[[Any], list[Any]]:
        """A function that makes the state hooks of a block."""
        named = [_named(spec) for spec in self.state_hooks]

        def hooks_of(block: Any) -> list[Any]:
            made = []
            for hook in named:
                if isinstance(hook, type) or not (hasattr(hook, "snapshot") and hasattr(hook, "restore")):
                    made.extend(hook(block))
                else:
                    made.append(hook)
            return made

        return hooks_of


SEVERAL = ("save_regions", "recompute_regions", "layer_overrides", "state_hooks")
"""The options that hold several strings."""


@dataclass(frozen=True)
class LayerOverride:
    """One entry of `layer_overrides`, taken apart.

    Attributes:
        blocks: pattern over block names.
        save: patterns to save; None together with `recompute` for blocks that are no checkpoints.
        recompute: patterns to recompute.
        presets: presets to save.
    """

    blocks: str
    save: tuple[str, ...] | None
    recompute: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "LayerOverride":
        """Take `"layers.31=attention.wo+!feed_forward.w1"` apart.

        Raises:
            ValueError: it has not that form, or names a preset that there is not.
        """
        blocks, equals, what = (part.strip() for part in text.partition("="))
        if not (blocks and equals):
            raise ValueError(
                f"activation_checkpoint.layer_overrides has the entry {text!r}.\n"
                'To fix: "BLOCKS=WHAT", such as "layers.31=off", "layers.[0-3]=@all" or "layers.7=attention.wo+!moe".'
            )
        if what == "off":
            return cls(blocks, None)
        parts = [part.strip() for part in what.split("+") if part.strip()]
        presets = tuple(part[1:] for part in parts if part.startswith("@"))
        for preset in presets:
            if preset not in PRESETS:
                raise ValueError(
                    f"activation_checkpoint.layer_overrides has the entry {text!r}: no preset is named {preset!r}.\n"
                    f"To fix: one of {', '.join(PRESETS)}."
                )
        recompute = tuple(part[1:] for part in parts if part.startswith("!"))
        return cls(blocks, tuple(part for part in parts if part[0] not in "@!"), recompute, presets)


def _several(value: str | Iterable[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())


def _named(spec: str) -> Any:
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ValueError(
            f"activation_checkpoint.state_hooks has the entry {spec!r}.\n"
            f'To fix: "package.module:name" of a state hook, or of a function of a block that returns state hooks.'
        )
    return getattr(importlib.import_module(module), name)
