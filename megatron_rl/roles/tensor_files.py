"""Write tensors into a file of shared memory in pieces: safetensors, as `safe_open` reads it, but no copy in between.

safetensors' own `save_file` wants all tensors in host memory first: for a GPU a pageable copy of everything, which is
then copied once more. Here a piece of a GPU's tensor goes into one of two pinned buffers while the piece before goes
into the file. The file's memory is taken first: a full tmpfs is an error, where a write to mapped memory would be a
SIGBUS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron_rl.errors import StorageError

PIECE_BYTES = 64 << 20
"""Bytes of one piece: a power of two, to which pinned memory is rounded up."""
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
ALIGNMENT = 8
MORE_ROOM = (
    "a larger /dev/shm on every node (docker run --shm-size=, or an emptyDir with medium: Memory), or "
    "trainer.copy_freq=-1, with which a repair begins from a checkpoint"
)


class PieceWriter:
    """Writes files one after the other. piece_bytes: size of a buffer; for a GPU two pinned ones are kept.

    is_staged: a CPU's tensors go over buffers, too, as a GPU's do.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES, is_staged: bool = False) -> None:
        self._piece_bytes, self._is_staged = piece_bytes, is_staged
        self._buffers: list[torch.Tensor] = []

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write a new file. Raises StorageError where there is no room for it; then there is no file."""
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header = header_of_tensors([(name, tensors[name]) for name in names], metadata)
        file = new_file(path, len(header) + sum(tensor.nbytes for tensor in tensors.values()))
        try:
            os.write(file, header)
            self._append(file, pieces_of([tensors[name] for name in names], self._piece_bytes))
        finally:
            os.close(file)

    def _append(self, file: int, pieces: Iterator[torch.Tensor]) -> None:
        """Append each piece; a GPU copies the next one meanwhile."""
        waiting: Callable[[], None] | None = None
        for number, piece in enumerate(pieces):
            following = partial(append, file, piece)
            if piece.is_cuda or self._is_staged:
                following = partial(append, file, *self._copied(number, piece))
            if waiting is not None:
                waiting()
            waiting = following
        if waiting is not None:
            waiting()

    def _copied(self, number: int, piece: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Begin a copy into one of two buffers, which the last piece but one has left; return it and its end."""
        pinned = piece.is_cuda
        while len(self._buffers) < 2:
            self._buffers.append(torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=pinned))
        buffer = self._buffers[number % 2][: len(piece)]
        buffer.copy_(piece, non_blocking=True)
        if not pinned:
            return buffer, None
        end = torch.cuda.Event()
        end.record()
        return buffer, end


def pieces_of(tensors: Sequence[torch.Tensor], piece_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of tensors [n], at most `piece_bytes` at a time."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        yield from flat.split(piece_bytes) if len(flat) else ()


def append(file: int, content: torch.Tensor, end: torch.cuda.Event | None = None) -> None:
    """Write bytes of host memory [n] to the end of an open file. end: event at the end of their copy."""
    if end is not None:
        end.synchronize()
    left = content.numpy().data
    while left:
        left = left[os.write(file, left) :]


def header_of_tensors(tensors: list[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file of safetensors, whose tensors are stored end to end in this order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name, tensor in tensors:
        stop = start + tensor.nbytes
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def reserved_file(path: Path, num_bytes: int) -> torch.Tensor:
    """Make a file as `new_file` and return its bytes [num_bytes], mapped."""
    os.close(new_file(path, num_bytes))
    return torch.from_numpy(np.memmap(path, np.uint8, mode="r+", shape=(num_bytes,)))


def new_file(path: Path, num_bytes: int) -> int:
    """Make a file of this user alone, take its memory, and return its descriptor.

    Raises StorageError where its folder has no room; then there is no file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        path.unlink()
        room = os.statvfs(path.parent)
        free = room.f_bavail * room.f_frsize
        raise StorageError(
            f"a copy of the state for repairs needs {num_bytes / 1e9:.2f} GB in {path.parent}, which has "
            f"{free / 1e9:.2f} GB free: {error.strerror}; try: {MORE_ROOM}"
        ) from None
    return descriptor
