"""A model to look at, and a run read back with TensorBoard's own reader."""

from pathlib import Path

import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import torch_remat as remat

GIB = 2**30
TOKENS, DIM, HIDDEN = 32, 16, 64
INPUT = TOKENS * DIM * 4  # bytes of an activation of the residual stream
WIDE = TOKENS * HIDDEN * 4


class Block(nn.Module):
    """Norm, a wide projection that is a SAVE region, GELU, a narrow projection that is recomputed."""

    def __init__(self, index=0):
        super().__init__()
        self.index = index
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def body(self, x):
        h = remat.region(self.up, "up", recompute=False)(F.layer_norm(x, [DIM]))
        return x + remat.region(self.down, "down", recompute=True)(F.gelu(h))

    def forward(self, x):
        return remat.checkpoint(region_name=f"layers.{self.index}")(self.body)(x)


def stack(depth=3):
    """Blocks `layers.0`, `layers.1`..."""
    return nn.Sequential(*(Block(index) for index in range(depth)))


def batch():
    """What a stack takes."""
    return torch.randn(TOKENS, DIM)


def kept_in(report):
    """What a sample counts as kept, of a report of the library."""
    return report.region_bytes + report.input_bytes


class Board:
    """What a dashboard has written, as TensorBoard's own reader sees it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._read = {}

    @property
    def runs(self):
        """Names of the runs."""
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())

    def events(self, run="all_ranks"):
        """The reader of one run, with everything loaded."""
        if run not in self._read:
            limits = {"scalars": 0, "images": 0, "tensors": 0}
            self._read[run] = EventAccumulator(str(self.folder / run), size_guidance=limits).Reload()
        return self._read[run]

    def line(self, run, tag):
        """Step -> value."""
        return {event.step: event.value for event in self.events(run).Scalars(f"remat/{tag}")}

    def bytes(self, run, tag):
        """Step -> bytes, of a line in GiB, which TensorBoard keeps in single precision."""
        return {step: round(value * GIB) for step, value in self.line(run, tag).items()}

    @property
    def steps(self):
        """Steps that all ranks have."""
        found = [set(self.line(run, "kept_gib")) for run in self.runs if run.startswith("rank_")]
        assert all(one == found[0] for one in found)
        return found[0]

    @property
    def texts(self):
        """Step -> text."""
        texts = self.events().Tensors("remat/worst_rank_report")
        return {event.step: event.tensor_proto.string_val[0].decode() for event in texts}

    @property
    def images(self):
        """Step -> PNG."""
        return {
            event.step: event.encoded_image_string for event in self.events().Images("remat/kept_by_rank_and_region")
        }


def event_files(folder, run="all_ranks"):
    """The event files of a run, oldest first."""
    return sorted(Path(folder, run).glob("events.out.tfevents.*"))
