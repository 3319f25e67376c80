"""Memory that is given back and taken again under the same addresses, which captured graphs have noted.

On a CPU pages are dropped and come anew when they are touched; on CUDA an address range stays reserved and physical
memory is mapped into it (`cuda_memory.py`). Content after `allocate` is undefined everywhere, until it is written or
cleared.

Between `release` and `allocate` views must not be used. Who does it all the same reads zeros on a CPU (what shares a
page with others stays as it was), and a write takes pages unnoticed; on CUDA the kernel faults, which ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_rl.hybrid_engine.storages import as_bytes


class Memory(Protocol):
    """Bytes that come and go under tensors that stay. Every call may be repeated."""

    num_bytes: int
    """When it is there."""

    @property
    def is_allocated(self) -> bool:
        """Whether it is there."""

    def allocate(self) -> None:
        """Take it again; what is there keeps its content."""

    def release(self) -> None:
        """Give it back."""

    def clear(self) -> None:
        """Let all of it read as zeros; it must be there."""


class HostPages:
    """Whole pages of host memory under `storages`, which are private and anonymous, as allocators make them.

    What shares a page with other memory is kept: less than two pages of each storage.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = list(storages)
        self.num_bytes = sum(storage.nbytes() for storage in self._storages)
        self.is_allocated = True

    def allocate(self) -> None:
        """Pages come when they are touched."""
        self.is_allocated = True

    def release(self) -> None:
        """Raises OSError where the system refuses."""
        for storage in self._storages:
            drop_pages(storage.data_ptr(), *whole_pages(storage.data_ptr(), storage.nbytes()))
        self.is_allocated = self.num_bytes == 0

    def clear(self) -> None:
        """Takes no page. Raises OSError where the system refuses."""
        for storage in self._storages:
            address, num_bytes = storage.data_ptr(), storage.nbytes()
            start, stop = whole_pages(address, num_bytes)
            for edge in (slice(0, start), slice(stop, num_bytes)):
                as_bytes(storage)[edge].zero_()
            drop_pages(address, start, stop)


class Resized:
    """A storage that torch's allocator makes anew, wherever there is room: for what nobody notes the address of."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self.num_bytes = storage.nbytes()

    @property
    def is_allocated(self) -> bool:
        return self._storage.nbytes() == self.num_bytes

    def allocate(self) -> None:
        if not self.is_allocated:
            self._storage.resize_(self.num_bytes)

    def release(self) -> None:
        self._storage.resize_(0)

    def clear(self) -> None:
        as_bytes(self._storage).zero_()


def take(numel: int, dtype: torch.dtype, device: torch.device, tag: str | None) -> tuple[torch.Tensor, Memory]:
    """A flat tensor of its own memory, which is there.

    tag: what the memory is called among CUDA's that keeps its addresses; None: on CUDA it may come back elsewhere,
    which needs no vLLM.
    """
    if device.type == "cpu":
        data = own_pages(numel, dtype)
        return data, HostPages([data.untyped_storage()])
    if tag is None or numel == 0:
        data = torch.empty(numel, dtype=dtype, device=device)
        return data, Resized(data.untyped_storage())
    from megatron_rl.hybrid_engine.cuda_memory import mapped, pool

    with pool(tag):
        data = torch.empty(numel, dtype=dtype, device=device)
    return data, mapped([data.untyped_storage()], tag, device)


def adopt(tensors: Sequence[torch.Tensor], tag: str) -> Memory:
    """The memory under tensors that somebody else has made, all on one device; on CUDA inside of the pool `tag`.

    Raises ValueError where it was made elsewhere.
    """
    storages = list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        return HostPages(storages)
    from megatron_rl.hybrid_engine.cuda_memory import mapped

    return mapped(storages, tag, device)


def own_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at a page, in pages of its own. Raises OSError where there is no room."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel)  # keeps the mapping for as long as its storage lives


def whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """First and last offset, from `address`, of the pages that lie within so many bytes; equal where none does."""
    start = min(-address % mmap.PAGESIZE, num_bytes)
    return start, max(start, num_bytes - (address + num_bytes) % mmap.PAGESIZE)


def drop_pages(address: int, start: int, stop: int) -> None:
    """Let whole pages between two offsets from `address` read as zeros, taking none before it is touched."""
    if stop == start:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")
