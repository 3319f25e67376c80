"""Messages between a client and a rank's process: bytes over a pipe, whatever started the process.

    to the rank     (method of `RankWorker`, its arguments)
    to the client   (None, reply) or (RankFailure, None)

A rank answers messages in their order, one answer for each.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import torch

from megatron_rl.cluster.failures import RankFailure
from megatron_rl.remote_columns import ColumnPiece, Files, Part, RemoteColumn, RemoteSegment

Payload = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a method."""


class RankFailed(Exception):
    """A rank has answered with its failure."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return RankFailed, (self.failure,)


class ProcessDied(Exception):
    """A rank's process is gone, so it will not answer; the text says how it ended, as far as is known."""


class Packed(NamedTuple):
    """A pickled message, and the remote columns in it; each piece that is in none is one of its own."""

    content: bytes
    held: list[RemoteColumn]


class _Pickler(cloudpickle.Pickler):
    """Writes plain CPU tensors as arrays: torch would write each into an archive, which takes five times as long.

    held: the remote columns that it has written, and the pieces outside of columns as such.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.held: list[RemoteColumn] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is RemoteColumn:
            self.held.append(obj)
        if type(obj) is ColumnPiece and isinstance(obj.part, RemoteSegment):
            self.held.append(RemoteColumn.of_pieces([[obj]]))
        if type(obj) is RemoteSegment:
            return _segment, (obj.path, obj.node, obj.dtype, obj.shape)
        if type(obj) is torch.Tensor and _is_plain(obj):
            values = obj.detach().contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor, (values, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


def dumps(content: object) -> bytes:
    """Pickle a message, with functions and classes that the receiver cannot import by value."""
    return packed(content).content


def packed(content: object) -> Packed:
    """Pickle a message as `dumps`, and name the remote columns in it."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(content)
    return Packed(stream.getvalue(), pickler.held)


class _Unpickler(pickle.Unpickler):
    """Gives segments the files of this process; kept: returns what stands for a segment here."""

    def __init__(self, content: bytes, files: Files, kept: Callable[[RemoteSegment], Part]) -> None:
        super().__init__(io.BytesIO(content))
        # No method of this object, which then would live, with all that it has read, until Python looks for cycles.
        self._segment = partial(_segment_of, files, kept)

    def find_class(self, module: str, name: str) -> Any:
        return self._segment if (module, name) == (__name__, _segment.__name__) else super().find_class(module, name)


def loads(message: bytes, files: Files) -> Any:
    """Return a message's content; its remote columns are read with `files`."""
    return _Unpickler(message, files, lambda segment: segment).load()


def answer_of(reply: bytes, files: Files, kept: Callable[[RemoteSegment], Part] = RemoteSegment.freed_with) -> Any:
    """Return the content of a reply. `files` frees its remote columns with the last reference. Raises RankFailed.

    kept: returns what stands for each segment of the reply.
    """
    failure, answer = _Unpickler(reply, files, kept).load()
    if failure is not None:
        raise RankFailed(failure)
    return answer


def _is_plain(tensor: torch.Tensor) -> bool:
    is_stored = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0
    return is_stored and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _segment(path: str, node: str, dtype: torch.dtype, shape: tuple[int, ...]) -> NoReturn:
    """Stand in messages for what makes a segment; `loads` replaces it."""
    raise TypeError(f"{path} is read with the files of its reader")


def _segment_of(
    files: Files,
    kept: Callable[[RemoteSegment], Part],
    path: str,
    node: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> Part:
    return kept(RemoteSegment(path, node, dtype, shape, files))


def _tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(values).view(dtype).view(shape)
