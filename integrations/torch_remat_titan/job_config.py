"""torchtitan 0.2's configuration with `activation_checkpoint.mode = "remat"` and its options.

Named by `[job] custom_config_module = "torch_remat_titan.job_config"`, and merged field by field into the host's
`JobConfig`; the launcher does that by itself. Naming it also installs the mode, so that nothing else is needed.
The host reads the types of the fields: no postponed annotations in this file.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch_remat_titan.titan_0_2 import install


@dataclass
class ActivationCheckpoint:
    """What the host's section of this name gets in addition."""

    mode: Literal["selective", "full", "memory_budget", "none", "remat"] = "selective"
    """Type of activation checkpointing to use; remat is torch_remat."""

    preset: Literal["", "none", "attention", "matmuls", "communication", "all"] = ""
    """remat: what to save, on top of save_regions."""

    save_regions: list[str] = field(default_factory=list)
    """remat: shell patterns over module paths relative to a block: what runs once."""

    recompute_regions: list[str] = field(default_factory=list)
    """remat: patterns that win over what is saved."""

    layer_overrides: list[str] = field(default_factory=list)
    """remat: blocks that differ, such as layers.31=off or layers.[0-3]=@all."""

    state_hooks: list[str] = field(default_factory=list)
    """remat: module:name of state hooks, or of functions that make them for a block."""

    list_regions: bool = False
    """remat: print the region names of the model and stop."""

    memory_dashboard: str = ""
    """remat: folder, below job.dump_folder, of a run for TensorBoard with every rank's memory."""


@dataclass
class JobConfig:
    """Merged into the host's."""

    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)


install()
