"""Offload memory during generation: to the host, or released when its content is not needed.

Whole storages are moved, so that every view of a tensor (parameters, optimizer shards) stays valid. On a CPU the host
copy takes as much memory as it frees; the code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from megatron_rl.hybrid_engine.plan import HOST_UNIT
from megatron_rl.hybrid_engine.storages import as_bytes


class Offloadable(Protocol):
    """Memory that can be offloaded during generation."""

    def offload(self) -> None:
        """Free the memory."""

    def reload(self) -> None:
        """Allocate it again with its content. Does nothing if it was not offloaded."""


@contextmanager
def offloaded(memories: Iterable[Offloadable]) -> Iterator[None]:
    """Offload them one by one, and reload them at the end in reverse order; an error on the way does so, too."""
    with ExitStack() as undo:
        for memory in memories:
            undo.callback(memory.reload)
            memory.offload()
        yield


LARGEST_PIECE, SMALLEST_PIECE = 256 << 20, HOST_UNIT
"""Bytes of one allocation of host memory: the most, and the unit to which amounts are rounded up."""


def piece_sizes(num_bytes: int) -> list[int]:
    """The fewest powers of two that add up to num_bytes, rounded up to SMALLEST_PIECE.

    Torch's allocator of pinned memory rounds every size up to a power of two, so one piece could take twice as much.
    """
    whole, rest = divmod(-(-num_bytes // SMALLEST_PIECE) * SMALLEST_PIECE, LARGEST_PIECE)
    return [LARGEST_PIECE] * whole + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


class HostBuffer:
    """Host memory that is allocated once and reused. pinned: for copies to and from a GPU; slow to allocate."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._pieces: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def reserve(self, num_bytes: int) -> None:
        """Allocate memory until the buffer has `num_bytes`."""
        for size in piece_sizes(max(0, num_bytes - self.num_bytes)):
            self._pieces.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned))

    def keep(self, content: torch.Tensor) -> None:
        """Copy a contiguous tensor to the buffer's beginning."""
        self.reserve(content.nbytes)
        for host, part in self.parts(0, content.view(torch.uint8)):
            host.copy_(part)

    def give(self, content: torch.Tensor) -> None:
        """Fill a contiguous tensor from the buffer's beginning; a GPU copies in its stream, and nobody waits."""
        for host, part in self.parts(0, content.view(torch.uint8)):
            part.copy_(host, non_blocking=True)

    def drop(self) -> None:
        """Release the memory."""
        self._pieces.clear()

    def parts(self, offset: int, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(host memory, its part of `content`) for uint8 content [N] at byte `offset` of the buffer."""
        start = 0
        for piece in self._pieces:
            first, stop = max(offset, start), min(offset + len(content), start + len(piece))
            if first < stop:
                yield piece[first - start : stop - start], content[first - offset : stop - offset]
            start += len(piece)


class HostCopy:
    """Offload tensors of one device to host memory. For a GPU that memory is pinned and kept for the next time.

    tensors: called in `offload`, because an optimizer makes its state at the first step.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, int, int]] = []  # (storage, bytes, offset in the buffer)
        self._buffer: HostBuffer | None = None

    def offload(self) -> None:
        """Copy every storage to the host and free it."""
        tensors = list(unique_storages(self._tensors()))
        if not tensors:
            return
        storages = [tensor.untyped_storage() for tensor in tensors]
        buffer = self._buffer = self._buffer or HostBuffer(tensors[0].is_cuda)
        buffer.reserve(sum(storage.nbytes() for storage in storages))
        offset = 0
        for storage in storages:
            for host, content in buffer.parts(offset, as_bytes(storage)):
                host.copy_(content)
            self._away.append((storage, storage.nbytes(), offset))
            offset += storage.nbytes()
            storage.resize_(0)

    def reload(self) -> None:
        """Copy everything back."""
        while self._away and self._buffer is not None:
            storage, num_bytes, offset = self._away[-1]
            storage.resize_(num_bytes)
            for host, content in self._buffer.parts(offset, as_bytes(storage)):
                content.copy_(host)
            self._away.pop()
        if self._buffer is not None and not self._buffer.pinned:
            self._buffer.drop()  # on a CPU it is memory of the kind that was to be freed


class Zeros:
    """Release tensors whose content is not needed; they are zeros afterwards. For gradients, which updates clear."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(unique_storages(tensors))
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self._tensors]

    def offload(self) -> None:
        """Free every storage."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def reload(self) -> None:
        """Allocate the memory again, zeroed."""
        for tensor, size in zip(self._tensors, self._sizes, strict=True):
            if tensor.untyped_storage().nbytes() != size:
                tensor.untyped_storage().resize_(size)
                as_bytes(tensor.untyped_storage()).zero_()


def unique_storages(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """One tensor for each different, non-empty storage."""
    first = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.untyped_storage().nbytes()}
    return first.values()
