"""torchtitan 0.3: the subcommand `activation-checkpoint:remat` beside the host's own."""

import functools
import operator
from typing import Annotated, get_args

import tyro
from torchtitan.trainer import Trainer

from torch_remat_titan.activation_checkpoint import RematAC

_SECTION = "activation_checkpoint"


def offer_subcommand() -> None:
    """Add `RematAC` to the choices of every trainer's configuration; once per process.

    The host reads the choices from the type of one field when it parses a command line; a configuration whose own class
    narrows that field keeps what it says.
    """
    choices = get_args(Trainer.Config.__annotations__[_SECTION])
    ours = Annotated[RematAC.Config, tyro.conf.subcommand("remat")]
    if ours in choices:
        return
    extended = functools.reduce(operator.or_, (ours, *choices))
    Trainer.Config.__annotations__[_SECTION] = extended
    Trainer.Config.__dataclass_fields__[_SECTION].type = extended
