"""Memory that training does not need while generating: kept on the host, or given back, and restored afterwards.

Whole storages are moved, so every view of a tensor (parameters, optimizer shards) stays valid across the trip. On a
CPU the host copy takes as much as it frees; the path is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from megatron_rl.hybrid_engine.storages import as_bytes


class Resting(Protocol):
    """Something that can rest while generating."""

    def leave(self) -> None:
        """Free the memory."""

    def come_back(self) -> None:
        """Take it again, with what it held; nothing happens where it never left."""


LARGEST_PIECE, SMALLEST_PIECE = 256 << 20, 1 << 20
"""Bytes of host memory that are taken at once: at most, and as what every amount is rounded up to."""


def piece_sizes(num_bytes: int) -> list[int]:
    """Powers of two that add up to num_bytes, rounded up to SMALLEST_PIECE: as few as there can be.

    Torch's allocator of pinned memory rounds every size up to a power of two, and would take twice what it was asked.
    """
    whole, rest = divmod(-(-num_bytes // SMALLEST_PIECE) * SMALLEST_PIECE, LARGEST_PIECE)
    return [LARGEST_PIECE] * whole + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


class HostBuffer:
    """Host memory that is taken once and used again. pinned: for copies to and from a GPU; taking it is slow."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._pieces: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def reserve(self, num_bytes: int) -> None:
        """Have room for as many, besides what is there already."""
        for size in piece_sizes(max(0, num_bytes - self.num_bytes)):
            self._pieces.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned))

    def drop(self) -> None:
        """Give the memory back."""
        self._pieces.clear()

    def parts(self, offset: int, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(memory here, its part of `content`) for uint8 content [N] that lies from byte `offset` on."""
        start = 0
        for piece in self._pieces:
            first, stop = max(offset, start), min(offset + len(content), start + len(piece))
            if first < stop:
                yield piece[first - start : stop - start], content[first - offset : stop - offset]
            start += len(piece)


class HostCopy:
    """Tensors of one device whose content waits in host memory: pinned, and kept for the next time, for a GPU's.

    tensors: called on leaving, because an optimizer makes its state at the first step.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []  # with size and place in the buffer
        self._buffer: HostBuffer | None = None

    @property
    def held_bytes(self) -> int:
        """Host memory that is held now."""
        return 0 if self._buffer is None else self._buffer.num_bytes

    def leave(self) -> None:
        """Copy every storage to the host and free it."""
        storages = [tensor.untyped_storage() for tensor in unique_storages(self._tensors())]
        if not storages:
            return
        buffer = self._buffer = self._buffer or HostBuffer(storages[0].device.type == "cuda")
        buffer.reserve(sum(storage.nbytes() for storage in storages))
        offset = 0
        for storage in storages:
            for host, content in buffer.parts(offset, as_bytes(storage)):
                host.copy_(content)
            self._away.append((storage, storage.nbytes(), offset))
            offset += storage.nbytes()
            storage.resize_(0)

    def come_back(self) -> None:
        """Bring back what left."""
        while self._away and self._buffer is not None:
            storage, num_bytes, offset = self._away[-1]
            storage.resize_(num_bytes)
            for host, content in self._buffer.parts(offset, as_bytes(storage)):
                content.copy_(host)
            self._away.pop()
        if self._buffer is not None and not self._buffer.pinned:
            self._buffer.drop()  # on a CPU it is the very memory that was to be freed


class Zeros:
    """Tensors that hold nothing worth keeping: they come back as zeros. For gradients, which every update clears."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(unique_storages(tensors))
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]

    def leave(self) -> None:
        """Free every storage."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Take the memory again, zeroed."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            if tensor.untyped_storage().nbytes() != size:
                tensor.untyped_storage().resize_(size)
                as_bytes(tensor.untyped_storage()).zero_()


def unique_storages(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """One tensor for each different, non-empty storage."""
    first = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.untyped_storage().nbytes()}
    return first.values()
