"""`RematAC`: torchtitan 0.3's choice of activation checkpointing, filled by torch_remat.

`RematAC.Config(save_regions=["attention.wo", "feed_forward.*"])` in a config function, or `activation-checkpoint:remat`
on the command line of `python -m torch_remat_titan.train`. Importing this module makes the host know the class.
"""

import copy
import functools
import inspect
import operator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast, get_args
from weakref import WeakSet

import torch
import tyro
from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from torch_remat_titan.apply import apply_options, check_options, print_regions_and_exit
from torch_remat_titan.memory_dashboard import watch_trainers
from torch_remat_titan.options import SEVERAL, RematOptions
from torch_remat_titan.presets import CORES


class RematAC(ActivationCheckpointing):
    """Each block of the model is a checkpoint; calls of the submodules that match are SAVE regions in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Options of `RematAC`; those of `torch_remat_titan.options.RematOptions`, as lists."""

        preset: str = ""
        """One of none, attention, matmuls, communication, all; comes on top of save_regions."""

        save_regions: list[str] = field(default_factory=list)
        """Shell patterns over module paths relative to a block: what runs once."""

        recompute_regions: list[str] = field(default_factory=list)
        """Patterns that win over what is saved."""

        layer_overrides: list[str] = field(default_factory=list)
        """Blocks that differ, such as layers.31=off or layers.[0-3]=@all."""

        state_hooks: list[str] = field(default_factory=list)
        """module:name of state hooks, or of functions that make them for a block."""

        list_regions: bool = False
        """Print the region names of the model and stop."""

        memory_dashboard: str = ""
        """Folder, below dump_folder, of a run for TensorBoard with every rank's memory."""

        # The host's default of True would promise what regions do differently: random state goes through state hooks.
        preserve_rng_state: bool = False

    def __init__(self, config: "RematAC.Config", dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        if config.preserve_rng_state:
            raise ValueError(
                "RematAC does not save and restore random state around a whole block.\n"
                "To fix: leave preserve_rng_state=False; code that draws random numbers in recomputed parts needs a "
                "state hook (state_hooks) or belongs in a SAVE region."
            )
        if config.debug:
            raise ValueError(
                "RematAC has no debug mode: its errors name the checkpoint, the region and the fix by themselves.\n"
                "To fix: leave debug=False."
            )
        self.options = RematOptions.collect(config)
        if self.options.memory_dashboard:
            watch_trainers()
        self._seen: WeakSet[nn.Module] = WeakSet()

    def apply(self, model: nn.Module) -> None:
        """Make checkpoints of the model's blocks.

        Raises:
            ValueError: a pattern matches nothing in the whole model.
        """
        if model in self._seen:
            return  # an encoder inside a model whose blocks were done together
        self._seen.update(model.modules())
        whole = _whole(model)
        parallel = _parallel(model)
        if self.options.list_regions:
            print_regions_and_exit(whole)
        check_options(whole, self.options, parallel)
        report = apply_options(model, self.options, parallel)
        logger.info("Applied activation checkpointing by torch_remat\n%s", report)


def _whole(model: nn.Module) -> nn.Module:
    """The model that `model` is a pipeline stage of, on the meta device; `model` itself where it cannot be made."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "build"):
        return copy.deepcopy(model)
    with torch.device("meta"):
        return config.build()


def _parallel(model: nn.Module) -> frozenset[str]:
    """Which kinds of parallelism put collectives into the modules of `model`.

    A policy is not told. `Module.parallelize` leaves the answer in the forward that it gives to a module; context
    parallelism without it replaces the forward of the attention cores.
    """
    found = set()
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        for dims in inspect.getclosurevars(forward).nonlocals.values() if inspect.isfunction(forward) else ():
            if isinstance(dims, ParallelDims):
                found.update(name for name in ("tp", "cp", "ep") if getattr(dims, f"{name}_enabled"))
        if forward is not None and path.rpartition(".")[2] in CORES and not getattr(module, "_parallelized", False):
            found.add("cp")
        if getattr(getattr(module, "token_dispatcher", None), "ep_mesh", None) is not None:
            found.add("ep")
    return frozenset(found)


def with_remat(config: Any, options: RematOptions) -> Any:
    """A trainer's `config` with our activation checkpointing in place of the host's; changes and returns `config`.

    For models that ask their own code for checkpointing and not the chosen policy (Flux) the policy is applied before
    the model is parallelized, and the host's is switched off.
    """
    values: dict[str, Any] = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values.update({name: list(values[name]) for name in SEVERAL})
    config.activation_checkpoint = RematAC.Config(**values)
    spec = config.model_spec
    if spec is not None and spec.name == "flux":
        config.model_spec = replace(spec, parallelize_fn=_Before(spec.parallelize_fn))
    return config


def check_compiled(config: Any) -> Any:
    """A trainer's `config`, unchanged.

    Raises:
        ValueError: it compiles the model, and has options of ours that blocks which are compiled whole cannot keep.
    """
    ours, compiled = config.activation_checkpoint, config.compile
    if isinstance(ours, RematAC.Config) and compiled.enable and "model" in compiled.components:
        RematOptions.collect(ours).check_compiled()
    return config


@dataclass(frozen=True)
class _Before:
    """`parallelize_fn` of a model whose code does not ask the chosen policy."""

    parallelize: Any

    def __call__(self, model: nn.Module, **options: Any) -> Any:
        config = cast("RematAC.Config | None", options.get("ac_config"))
        if isinstance(config, RematAC.Config):
            config.build(dump_folder=options.get("dump_folder", "")).apply(model)
            options["ac_config"] = None
        return self.parallelize(model, **options)


def _offer_subcommand() -> None:
    """Add `RematAC` to the choices of every trainer's configuration.

    The host reads the choices from the type of one field when it parses a command line, and refuses a class that is not
    among them also as a default from a config function. A configuration whose own class narrows that field keeps what
    it says.
    """
    section = "activation_checkpoint"
    choices = get_args(Trainer.Config.__annotations__[section])
    ours = Annotated[RematAC.Config, tyro.conf.subcommand("remat")]
    extended = functools.reduce(operator.or_, (ours, *choices))
    Trainer.Config.__annotations__[section] = extended
    Trainer.Config.__dataclass_fields__[section].type = extended


_offer_subcommand()
