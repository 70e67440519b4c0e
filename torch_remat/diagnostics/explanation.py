"""What :func:`torch_remat.explain` returns: plain data, and the same as text.

Everything is a frozen dataclass of strings, numbers and tuples: ``to_json()`` makes it JSON, ``print`` makes it text.
Bytes are those of whole storages, each counted where it first appears, so that the rows add up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch_remat.diagnostics.report import Report

__all__ = [
    "CheckpointExplanation",
    "ExplainedTensor",
    "Explanation",
    "RandomOperation",
    "RegionExplanation",
    "ReplayExplanation",
]


@dataclass(frozen=True, slots=True)
class ExplainedTensor:
    """One tensor and what becomes of it.

    Attributes:
        what: ``"input x"``, ``"output['gate']"``, ``"save 0"`` (what a SAVE region saves for its backward), ``"argument
            0"`` (of a SAVE region, which saves it), ``"saved tensor"`` (of recomputed code); in a compiled graph the
            operation that makes it, such as ``"mm"``, or ``"graph input"``.
        shape: in elements.
        dtype: such as ``"float32"``.
        bytes: of the storages under it that no earlier row has; what is kept, made again or not kept.
        why: the reason, with the line of code where there is one.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    why: str

    def _line(self) -> str:
        return f"{self.what} {list(self.shape)} {self.dtype}, {self.bytes:,} bytes: {self.why}"


@dataclass(frozen=True, slots=True)
class RegionExplanation:
    """One region call, or all bare code of the body (``name`` is None).

    Attributes:
        name: as errors print it, without the checkpoint's.
        policy: ``"save"``, ``"recompute"`` or ``"bare"``.
        kept: what stays resident from forward to backward: persisted outputs, and saves of a SAVE region.
        rebuilt: what is dropped and made again by replay.
        placeholders: outputs that are not kept; a stand-in is served for each in replay.
        kept_bytes: sum of the bytes of ``kept``.
    """

    name: str | None
    policy: str
    kept: tuple[ExplainedTensor, ...]
    rebuilt: tuple[ExplainedTensor, ...]
    placeholders: tuple[ExplainedTensor, ...]
    kept_bytes: int

    def _lines(self) -> Iterator[str]:
        title = "bare code" if self.name is None else f"{self.name} ({self.policy})"
        yield f"  {title}: keeps {self.kept_bytes:,} bytes"
        for word, rows in (("kept", self.kept), ("rebuilt", self.rebuilt), ("placeholder", self.placeholders)):
            for row in rows:
                yield f"    {word}: {row._line()}"


@dataclass(frozen=True, slots=True)
class RandomOperation:
    """A random operation of recomputed code.

    Attributes:
        operation: such as ``"native_dropout"``, or the generator for those of Python and numpy.
        where: line of code.
        region: the RECOMPUTE region around it, None for bare code.
        carried: whether a state hook of the checkpoint restores the generator in replay; None where only a hook of the
            user's own could, about which the library knows nothing. False is an error when the checkpoint is called.
    """

    operation: str
    where: str
    region: str | None
    carried: bool | None

    def _line(self) -> str:
        carried = {True: "carried by a state hook", False: "NOT carried: pass a state hook", None: "your state hook's"}
        return f"random: `{self.operation}` at {self.where}, {carried[self.carried]}"


@dataclass(frozen=True, slots=True)
class ReplayExplanation:
    """Where the replay of a checkpoint ends.

    Attributes:
        runs: False when nothing has to be recomputed: there is no replay.
        to_end: the replay runs to the end of the body.
        region: the region in which, or at which, it stops; None in bare code.
        where: line of code of the last save that it makes again.
        text: all that in words.
        not_run: RECOMPUTE regions that are not run again, since backward needs nothing from them.
    """

    runs: bool
    to_end: bool
    region: str | None
    where: str | None
    text: str
    not_run: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointExplanation(Report):
    """One call of a checkpoint.

    Attributes:
        name: its ``region_name``; the name of the function where :func:`explain` got a body without a checkpoint.
        inputs: every tensor among the arguments; ``bytes`` is 0 for what is not kept or is kept at no cost.
        regions: the region calls, in order.
        bare: the code outside regions.
        random: random operations of recomputed code.
        replay: where replay stops.
        kept_bytes: what the checkpoint keeps from forward to backward: inputs, regions and bare code.
        rebuilt_bytes: what replay makes again. Not all of it lives at one time.
    """

    name: str | None
    inputs: tuple[ExplainedTensor, ...]
    regions: tuple[RegionExplanation, ...]
    bare: RegionExplanation
    random: tuple[RandomOperation, ...]
    replay: ReplayExplanation
    kept_bytes: int
    rebuilt_bytes: int

    def _lines(self) -> Iterator[str]:
        yield f"keeps {self.kept_bytes:,} bytes, replay makes {self.rebuilt_bytes:,} bytes again"
        for row in self.inputs:
            yield f"  {row._line()}"
        for region in self.regions:
            yield from region._lines()
        if self.bare.rebuilt:
            yield from self.bare._lines()
        for draw in self.random:
            yield f"  {draw._line()}"
        yield f"  replay: {self.replay.text}"


@dataclass(frozen=True, slots=True)
class Explanation(Report):
    """The checkpoints that one call ran, in order.

    Attributes:
        checkpoints: one for each call of a checkpoint.
        kept_bytes: of all of them; a storage that several keep counts once.
        outside: what compiled graphs that have checkpoints in them keep for their other code.
    """

    checkpoints: tuple[CheckpointExplanation, ...]
    kept_bytes: int
    outside: tuple[ExplainedTensor, ...] = ()

    def format(self) -> str:
        """The explanation as text; checkpoints in a row that differ by name only are shown once."""
        if not self.checkpoints:
            return "no checkpoint ran with gradients enabled: nothing is kept by one"
        lines = [f"{len(self.checkpoints)} checkpoint(s) keep {self.kept_bytes:,} bytes"]
        for _, group in itertools.groupby(self.checkpoints, lambda one: dataclasses.replace(one, name=None)):
            alike = list(group)
            names = [one.name or "<unnamed>" for one in alike]
            title = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} alike, each)"
            first, *rest = alike[0]._lines()
            lines += [f"{title}: {first}", *rest]
        if self.outside:
            total = sum(row.bytes for row in self.outside)
            lines.append(f"code of graphs outside checkpoints: keeps {total:,} bytes")
            lines += [f"  kept: {row._line()}" for row in self.outside]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.format()
