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
from torch_remat_tensorboard.series import MOST_LINES, ROOT, scalars

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
        self._events: EventFile | None = None
        self._recording: Recording | None = None
        self._undrawn: Gathered | None = None
        self._broken = False

    def last_step(self) -> int:
        """The last step of the run so far; 0 where there is none."""
        try:
            return event_file.last_step(self._folder)
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
        if not self._broken:
            try:
                if self._events is not None and self._undrawn is not None:
                    self._draw(self._events, self._undrawn)
            except OSError as error:
                self._give_up(error)
        self._close_files()

    def _write(self, gathered: Gathered, hparams: dict[str, Any]) -> None:
        values: list[Any] = []
        if self._events is None:
            self._events = EventFile(self._folder, gathered.step)
            if len(gathered.samples) <= MOST_LINES:
                self._recording = Recording(self._folder, hparams)
            values = [event_file.layout(layout_for(gathered.samples)), *event_file.hparams(hparams)]
            self._draw(self._events, gathered)
        elif gathered.step % self._image_every == 0:
            self._draw(self._events, gathered)
        else:
            self._undrawn = gathered
        values += [event_file.scalar(tag, value) for tag, value in scalars(gathered.samples).items()]
        values.append(event_file.text(REPORT, step_report(gathered.step, gathered.samples)))
        self._events.write(gathered.step, gathered.time, values)
        if self._recording is not None:
            self._recording.write(gathered)

    def _draw(self, events: EventFile, gathered: Gathered) -> None:
        self._undrawn = None
        picture = event_file.image(HEATMAP, *heatmap(gathered.samples))
        events.write(gathered.step, gathered.time, [picture])

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
        for file in (self._events, self._recording):
            if file is not None:
                try:
                    file.close()
                except OSError:
                    self._broken = True  # what it still held is lost, as the warning says
        self._events = self._recording = None
