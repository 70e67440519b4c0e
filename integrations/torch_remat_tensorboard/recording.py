"""The samples of a run as JSON lines, one step a line: the figures behind the charts, which can be redrawn from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_remat_tensorboard.gather import Gathered
from torch_remat_tensorboard.sample import Sample

__all__ = ["FILE", "Recording", "read_recording"]

FILE = "samples.jsonl"
"""Its name in the folder of the run."""

_VERSION = 1


class Recording:
    """Appends to the recording of a run.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, hparams: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        torn = path.exists() and path.stat().st_size and path.read_bytes()[-1:] != b"\n"
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._file.write("\n")  # the last session was killed while it wrote a line
        self._line({"version": _VERSION, "hparams": hparams})

    def write(self, gathered: Gathered) -> None:
        """Append one step."""
        samples = [sample.as_dict() for sample in gathered.samples]
        self._line({"step": gathered.step, "time": gathered.time, "samples": samples})

    def close(self) -> None:
        """Close the file. Everything was written before."""
        self._file.close()

    def _line(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")


def read_recording(path: Path) -> tuple[dict[str, Any], list[Gathered]]:
    """The hparams and the steps of a recording, as the last session to write a step wrote it.

    Raises:
        ValueError: it was written by another version.
    """
    hparams: dict[str, Any] = {}
    steps: list[Gathered] = []
    for row in _rows(path):
        if "version" in row:
            if row["version"] != _VERSION:
                raise ValueError(
                    f"{path} is a recording of version {row['version']}, this one reads version {_VERSION}.\n"
                    "To fix: record the run again, or read it with the release that wrote it."
                )
            hparams = row["hparams"]
            continue
        while steps and steps[-1].step >= row["step"]:
            steps.pop()  # the job went back to a checkpoint
        steps.append(Gathered(row["step"], row["time"], tuple(Sample.of(values) for values in row["samples"])))
    return hparams, steps


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn: a process was killed while it wrote
        yield row
