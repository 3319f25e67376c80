"""Files of remote columns: a rank writes them into its node's shared memory, readers map them, the driver frees them.

SEGMENTS/megatron_rl-RUN-held-ID          on the node where the column was made
SEGMENTS/megatron_rl-RUN-held-ID.NODE     on another node: the same size, but only the rows that its ranks asked for
"""

from __future__ import annotations

import mmap
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.cluster.scratch import PREFIX, SEGMENTS
from megatron_rl.columns import COLUMNS
from megatron_rl.records import Batch, Stored, row_lengths
from megatron_rl.remote_columns import HasColumns, Range, RemoteColumn, RemoteSegment

HELD_BYTES = "MEGATRON_RL_HELD_BYTES"
"""The environment variable of ranks with the bytes from which on they hold a column."""

LEFT_FREE = 0.25
"""The share of a node's shared memory that remote columns leave to others, such as NCCL, which dies without."""


class MappedFiles:
    """The files that are here, for the driver of ranks that are all on this machine."""

    keeps_values = False

    def read(self, segment: RemoteSegment, ranges: Sequence[Range]) -> list[torch.Tensor]:
        return mapped(segment.path, segment, ranges)

    def free(self, path: str, node: str) -> None:
        Path(path).unlink(missing_ok=True)


class RankFiles:
    """The files of a rank. node: its node. least_bytes: smaller columns travel in replies."""

    keeps_values = True

    def __init__(self, run_id: str, node: str, least_bytes: float) -> None:
        self._prefix, self._node, self._least_bytes = f"{SEGMENTS}/{PREFIX}{run_id}-held-", node, least_bytes

    def read(self, segment: RemoteSegment, ranges: Sequence[Range]) -> list[torch.Tensor]:
        return mapped(place_on(self._node, segment.path, segment.node), segment, ranges)

    def free(self, path: str, node: str) -> None:
        """Do nothing: the driver frees."""

    def hold(self, answer: Any) -> Any:
        """Return a reply whose large columns that ranks alone read are held; of a tuple, each part."""
        if type(answer) is tuple:
            return tuple(self.hold(part) for part in answer)
        if isinstance(answer, Batch):
            columns = {name: answer[name] for name in answer.names if COLUMNS[name].is_held}
            answer.add(**{name: self._held(column) for name, column in columns.items() if column.is_nested})
        return answer.with_held(self._held) if isinstance(answer, HasColumns) else answer

    def _held(self, column: torch.Tensor) -> Stored:
        """Return the column held, or itself where it is small or the node does not have room."""
        values = column.values().detach()
        size, room = values.numel() * values.element_size(), shutil.disk_usage(SEGMENTS)
        if size < max(1, self._least_bytes) or room.free - size < LEFT_FREE * room.total:
            return column
        path = f"{self._prefix}{uuid.uuid4().hex}"
        try:
            write(path, [(0, values.cpu().contiguous().view(-1).view(torch.uint8).numpy())], size)
        except OSError:  # others have taken the room meanwhile
            Path(path).unlink(missing_ok=True)
            return column
        return RemoteColumn.of(
            RemoteSegment(path, self._node, values.dtype, tuple(values.shape), self), row_lengths(column)
        )


def place_on(node: str, path: str, owner: str) -> str:
    """Return where a node has a segment of `owner`'s, or the copy of some of its rows."""
    return path if node == owner else f"{path}.{node}"


def mapped(path: str, segment: RemoteSegment, ranges: Sequence[Range]) -> list[torch.Tensor]:
    """Return views of the elements of each range; what writes to them changes no file.

    Raises FileNotFoundError where the segment has been freed.
    """
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    whole = torch.frombuffer(content, dtype=segment.dtype).view(segment.shape)
    return [whole[start:stop] for start, stop in ranges]


def write(path: str, parts: Sequence[tuple[int, Any]], size: int) -> None:
    """Write (offset, bytes) into a file of `size` bytes, which may be there. Raises OSError where there is no room."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        for offset, content in parts:
            rest = memoryview(content)
            while rest:
                written = os.pwrite(descriptor, rest, offset)
                rest, offset = rest[written:], offset + written
    finally:
        os.close(descriptor)
