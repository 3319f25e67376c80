"""Scalars for TensorBoard, written by the logging thread: TensorBoard's own thread cannot report a full disk."""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_rl.observe.appended_file import AppendedFile

FORMAT = "brain.Event:2"
_NUMBERS = itertools.count()


class EventFile:
    """The events of one process, in a file of its own."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Create the file in `folder`, empty until a step is logged: then it hides events of steps >= `first_step` in
        earlier files of the folder. Raises OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file = AppendedFile(folder / name)
        self._header = [
            Event(file_version=FORMAT),
            Event(step=first_step, session_log=SessionLog(status=SessionLog.START)),
        ]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the scalars of `step`. Raises OSError."""
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        for event in (*self._header, Event(step=step, summary=Summary(value=values))):
            self._write(event)
        self._header = []

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())
