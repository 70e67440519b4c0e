"""Event files: values of steps in the form that TensorBoard reads, appended and handed to the system at once.

Each session of a job has a file of its own in the folder of a run. TensorBoard reads them one after the other, by name,
as one run; where a later file begins at a step that an earlier one has passed, the later one is right.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.hparams import summary_v2 as hparams_summary
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["EventFile", "hparams", "image", "last_step", "layout", "scalar", "text"]

_PATTERN = "events.out.tfevents.*"

# Classes that protobuf makes when it is imported, and that no type checker sees.
_event: Any = event_pb2
_summary: Any = summary_pb2
_tensor: Any = tensor_pb2
_shape: Any = tensor_shape_pb2
_types: Any = types_pb2


class EventFile:
    """The event file of this session in `folder`, which is made where it is missing.

    What is written is with the system when a method returns: a process that is killed loses none of it.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / _new_name(folder)).open("xb")
        self._records = RecordWriter(self._file)
        self._write(_event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # Readers drop what earlier files say of this step and later ones: the job went back to a checkpoint.
        self._write(
            _event.Event(
                wall_time=time.time(), step=step, session_log=_event.SessionLog(status=_event.SessionLog.START)
            )
        )
        self._file.flush()

    def write(self, step: int, wall_time: float, values: Iterable[Any]) -> None:
        """Append the values of one step."""
        self._write(_event.Event(wall_time=wall_time, step=step, summary=_summary.Summary(value=list(values))))
        self._file.flush()

    def close(self) -> None:
        """Close the file. Everything was written before."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def last_step(folder: Path) -> int:
    """The last step in the newest event file of `folder`; 0 where there is none.

    Looks at the lengths of the records and at the last whole one, whatever the size of the file.
    """
    files = sorted(folder.glob(_PATTERN))
    if not files:
        return 0
    last = b""
    with files[-1].open("rb") as file:
        while len(head := file.read(12)) == 12:
            data = file.read(struct.unpack_from("<Q", head)[0])
            if len(file.read(4)) < 4:
                break  # the process was killed while it wrote
            last = data
    return _event.Event.FromString(last).step


def scalar(tag: str, value: float) -> Any:
    """One point of a line."""
    return _summary.Summary.Value(tag=tag, simple_value=value)


def image(tag: str, png: bytes, size: tuple[int, int]) -> Any:
    """A picture, of `size` pixels."""
    return _summary.Summary.Value(
        tag=tag, image=_summary.Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=png)
    )


def text(tag: str, markdown: str) -> Any:
    """A text, for the page of texts."""
    metadata = text_metadata.create_summary_metadata(display_name=tag, description="")
    return _strings(tag, [markdown.encode()], _summary.SummaryMetadata.FromString(metadata.SerializeToString()))


def layout(charts: Any) -> Any:
    """What the page of custom scalars shows."""
    metadata = layout_metadata.create_summary_metadata()
    return _strings(layout_metadata.CONFIG_SUMMARY_TAG, [charts.SerializeToString()], metadata)


def hparams(values: dict[str, bool | float | str]) -> list[Any]:
    """What the run was set to."""
    return list(hparams_summary.hparams_pb(values).value)


def _strings(tag: str, values: list[bytes], metadata: Any) -> Any:
    shape = _shape.TensorShapeProto(dim=[_shape.TensorShapeProto.Dim(size=len(values))])
    tensor = _tensor.TensorProto(dtype=_types.DT_STRING, string_val=values, tensor_shape=shape)
    return _summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _new_name(folder: Path) -> str:
    """A name that comes after those of earlier sessions."""
    seconds = int(time.time())
    for path in folder.glob(_PATTERN):
        number = path.name.split(".")[3]
        seconds = max(seconds, int(number) + 1 if number.isdigit() else 0)
    return f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}.remat"
