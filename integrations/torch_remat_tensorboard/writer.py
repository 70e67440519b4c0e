"""Writes what was gathered: event file and recording. A folder that cannot be written is one warning, no error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch_remat_tensorboard import event_file
from torch_remat_tensorboard.event_file import EventFile
from torch_remat_tensorboard.gather import Gathered
from torch_remat_tensorboard.heatmap import heatmap
from torch_remat_tensorboard.layout import layout_for
from torch_remat_tensorboard.recording import Recording
from torch_remat_tensorboard.report import step_report
from torch_remat_tensorboard.series import ALL, MOST_LINES, ROOT, scalars

__all__ = ["HEATMAP", "REPORT", "RunWriter"]

REPORT = f"{ROOT}/worst_rank_report"
HEATMAP = f"{ROOT}/kept_by_rank_and_region"


class RunWriter:
    """The run in `folder`. Whatever the system refuses ends the writing with a warning, and nothing else.

    Args:
        folder: of the run; one that exists is continued.
        image_every: steps from one picture to the next; the first step and the last have one.
    """

    def __init__(self, folder: Path, image_every: int) -> None:
        self._folder = folder
        self._image_every = image_every
        self._runs: dict[str, EventFile] = {}
        self._recording: Recording | None = None
        self._undrawn: Gathered | None = None
        self._broken = False

    def last_step(self) -> int:
        """The last step of the run so far; 0 where there is none."""
        try:
            return event_file.last_step(self._folder / ALL)
        except OSError as error:
            self._give_up(error)
            return 0

    def write(self, gathered: Gathered, hparams: dict[str, Any]) -> None:
        """Write one step; in a session's first call also the charts and `hparams`."""
        if self._broken:
            return
        try:
            self._write(gathered, hparams)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Draw the last step and close the files."""
        if not self._broken and self._undrawn is not None:
            try:
                self._put(ALL, self._undrawn, [self._picture(self._undrawn)])
            except OSError as error:
                self._give_up(error)
        self._close_files()

    def _write(self, gathered: Gathered, hparams: dict[str, Any]) -> None:
        points = scalars(gathered.samples)
        values: list[Any] = []
        first = not self._runs
        if first:
            values += [event_file.layout(layout_for(gathered.samples)), *event_file.hparams(hparams)]
            if len(gathered.samples) <= MOST_LINES:
                self._recording = Recording(self._folder, hparams)
        if first or gathered.step % self._image_every == 0:
            values.append(self._picture(gathered))
        else:
            self._undrawn = gathered
        values.append(event_file.text(REPORT, step_report(gathered.step, gathered.samples)))
        # Last what a run that is continued goes by: a step that is there is there for every rank.
        for name, line in sorted(points.items(), key=lambda one: one[0] == ALL):
            more = values if name == ALL else []
            self._put(name, gathered, [*(event_file.scalar(tag, value) for tag, value in line.items()), *more])
        if self._recording is not None:
            self._recording.write(gathered)

    def _put(self, run: str, gathered: Gathered, values: list[Any]) -> None:
        if run not in self._runs:
            self._runs[run] = EventFile(self._folder / run, gathered.step)
        self._runs[run].write(gathered.step, gathered.time, values)

    def _picture(self, gathered: Gathered) -> Any:
        self._undrawn = None
        return event_file.image(HEATMAP, *heatmap(gathered.samples))

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self._close_files()
        warnings.warn(
            f"The memory dashboard in {self._folder} cannot be written, and is not from here on: {error}. "
            f"Training goes on.\n"
            f"To fix: give a folder that can be written and has space; a new job continues the run there.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _close_files(self) -> None:
        for file in (*self._runs.values(), self._recording):
            if file is not None:
                try:
                    file.close()
                except OSError:
                    self._broken = True  # what it still held is lost, as the warning says
        self._runs, self._recording = {}, None
