"""Every exception of torch_remat.

Each class derives from the built-in type that callers already catch for that kind of mistake::

    RematError
    ├── UsageError (RuntimeError)             a call that the API does not allow
    │   ├── DuplicateNameError                one region name twice in a pass
    │   ├── PlaceholderError                  data of an output that was not kept was needed
    │   └── RankPolicyError                   ranks decided differently about one region
    ├── ReplayError (RuntimeError)            replay cannot give the numbers of forward
    │   ├── PolicyDriftError                  a region has another policy, or is missing, in replay
    │   ├── SavesDriftError                   replay saves other tensors than forward did
    │   ├── ValuesDriftError                  replay computes other values than forward did (when asked to compare)
    │   ├── ModifiedError                     a tensor that replay or backward reads was modified in place
    │   └── RandomStateError                  random numbers drawn in recomputed code without a state hook
    ├── InvalidValueError (ValueError)
    ├── InvalidTypeError (TypeError)
    ├── UnsupportedError (NotImplementedError)
    └── InternalError (RuntimeError)          a fault of this library: please report

Messages say what happened, where (checkpoint and region), what was expected and what was met, and how to fix it.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "DuplicateNameError",
    "InternalError",
    "InvalidTypeError",
    "InvalidValueError",
    "ModifiedError",
    "PlaceholderError",
    "PolicyDriftError",
    "RandomStateError",
    "RankPolicyError",
    "RematError",
    "ReplayError",
    "SavesDriftError",
    "UnsupportedError",
    "UsageError",
    "ValuesDriftError",
    "display_name",
]


class RematError(Exception):
    """Base class of every error that torch_remat raises."""


class UsageError(RematError, RuntimeError):
    """The call is not allowed here, or not with these arguments."""


class DuplicateNameError(UsageError):
    """One region name was used twice in one pass over a checkpoint's body."""


class PlaceholderError(UsageError):
    """The data of a tensor that was not kept is needed in replay.

    ``region`` is the qualified name of the SAVE region that made it, ``leaf`` which of the region's outputs it is; None
    where it is an input of the checkpoint.
    """

    def __init__(self, message: str, region: str | None = None, leaf: int | None = None) -> None:
        super().__init__(message)
        self.region = region
        self.leaf = leaf


class RankPolicyError(UsageError):
    """Ranks of one process group have different policies for one region."""


class ReplayError(RematError, RuntimeError):
    """Replay cannot reproduce what forward computed."""


class PolicyDriftError(ReplayError):
    """A region's policy in replay is not the one of forward."""


class SavesDriftError(ReplayError):
    """Recomputed code saves other tensors in replay than in forward."""


class ValuesDriftError(ReplayError):
    """Recomputed code computes other values in replay than in forward. Only a bitwise check notices.

    ``report`` is what ``verify_replay`` has compared, and None where a checkpoint raised in backward.
    """

    report: Any = None


class ModifiedError(ReplayError):
    """A tensor that replay or backward has to read was modified in place after it was recorded."""


class RandomStateError(ReplayError):
    """Recomputed code draws random numbers and no state hook restores the generator for replay."""


class InvalidValueError(RematError, ValueError):
    """An argument has the right type and a value that is not allowed."""


class InvalidTypeError(RematError, TypeError):
    """An argument has the wrong type."""


class UnsupportedError(RematError, NotImplementedError):
    """The library does not do this, and says what to do instead."""


class InternalError(RematError, RuntimeError):
    """A fault of torch_remat itself."""

    def __str__(self) -> str:
        what = super().__str__()
        return f"torch_remat internal error: {what}. Please report this with the program that triggered it."


def display_name(checkpoint: str | None, region: str | None = None) -> str:
    """``checkpoint::region`` as errors and reports print it; an unnamed checkpoint prints nothing before a region."""
    if region is None:
        return checkpoint if checkpoint is not None else "<unnamed>"
    return region if checkpoint is None else f"{checkpoint}::{region}"
