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
    """A run as TensorBoard's reader sees it."""

    def __init__(self, folder):
        limits = {"scalars": 0, "images": 0, "tensors": 0}
        self.events = EventAccumulator(str(folder), size_guidance=limits).Reload()

    def line(self, tag):
        """Step -> value."""
        return {event.step: event.value for event in self.events.Scalars(tag)}

    @property
    def tags(self):
        """Tags of lines."""
        return self.events.Tags()["scalars"]

    def texts(self, tag="remat/worst_rank_report"):
        """Step -> text."""
        return {event.step: event.tensor_proto.string_val[0].decode() for event in self.events.Tensors(tag)}

    def images(self, tag="remat/kept_by_rank_and_region"):
        """Step -> PNG."""
        return {event.step: event.encoded_image_string for event in self.events.Images(tag)}

    def bytes(self, tag):
        """Step -> bytes, of a line in GiB, which TensorBoard keeps in single precision."""
        return {step: round(value * GIB) for step, value in self.line(tag).items()}


def event_files(folder):
    """The event files of a run, oldest first."""
    return sorted(Path(folder).glob("events.out.tfevents.*"))
