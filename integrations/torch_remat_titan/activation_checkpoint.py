"""`RegionAC`: torchtitan's choice of activation checkpointing, filled by torch_remat."""

from dataclasses import dataclass, field
from typing import cast

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.tools.logging import logger

from torch_remat_titan.regions import LLAMA3_SAVE, RegionPolicy, checkpoint_blocks


class RegionAC(ActivationCheckpointing):
    """Each block of `model.layers` is a checkpoint; the submodules that match `save_regions` are SAVE regions in it."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """Options of `RegionAC`."""

        save_regions: list[str] = field(default_factory=lambda: list(LLAMA3_SAVE))
        """Shell patterns over module paths relative to a block; an empty list recomputes every block whole."""

        # A host default of True would promise what regions do differently: random state goes through state hooks.
        preserve_rng_state: bool = False

    def __init__(self, config: "RegionAC.Config", dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        if config.preserve_rng_state:
            raise ValueError(
                "RegionAC does not save and restore random state around a whole block.\n"
                "To fix: leave preserve_rng_state=False; code that draws random numbers in recomputed parts needs a "
                "state hook (torch_remat.RecomputeStateHook) or belongs in a SAVE region."
            )
        if config.debug:
            raise ValueError(
                "RegionAC has no debug mode: its errors name the checkpoint, the region and the fix by themselves.\n"
                "To fix: leave debug=False."
            )

    def apply(self, model: nn.Module) -> None:
        """Make checkpoints of the model's blocks.

        Raises:
            ValueError: a pattern of `save_regions` matches nothing.
        """
        config = cast(RegionAC.Config, self.config)
        policy = RegionPolicy(save=tuple(config.save_regions), determinism_check=config.determinism_check)
        names = checkpoint_blocks(model, policy)
        logger.info(f"Applied {policy} to {len(names)} blocks")
