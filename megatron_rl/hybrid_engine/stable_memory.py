"""Memory that is released and allocated again at the same addresses, which captured graphs need.

On a CPU pages are dropped, and new ones are allocated when they are touched. On CUDA an address range stays reserved
and physical memory is mapped into it (`cuda_memory.py`). Content after `allocate` is undefined until it is written or
cleared.

Between `release` and `allocate` views must not be used. On a CPU a read would give zeros (memory that shares a page
with others keeps its content) and a write would allocate pages; on CUDA the kernel would fault, which ends the process.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

from megatron_rl.hybrid_engine.storages import as_bytes


class Memory(Protocol):
    """Memory under tensors that stay. Every call may be repeated.

    num_bytes: size when allocated.
    """

    num_bytes: int

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is allocated."""

    def allocate(self) -> None:
        """Allocate the memory; allocated memory keeps its content."""

    def release(self) -> None:
        """Release the memory."""

    def clear(self) -> None:
        """Set all of it to zero; it must be allocated."""


class HostPages:
    """Whole pages of host memory under `storages`, which must be private and anonymous, as allocators make them.

    Pages shared with other memory are kept: less than two pages of each storage.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._storages = list(storages)
        self.num_bytes = sum(storage.nbytes() for storage in self._storages)
        self.is_allocated = True

    def allocate(self) -> None:
        """Pages are allocated when they are touched."""
        self.is_allocated = True

    def release(self) -> None:
        """Raises OSError if the system refuses."""
        for storage in self._storages:
            drop_pages(storage.data_ptr(), *whole_pages(storage.data_ptr(), storage.nbytes()))
        self.is_allocated = self.num_bytes == 0

    def clear(self) -> None:
        """Allocates no page. Raises OSError if the system refuses."""
        for storage in self._storages:
            address, num_bytes = storage.data_ptr(), storage.nbytes()
            start, stop = whole_pages(address, num_bytes)
            for edge in (slice(0, start), slice(stop, num_bytes)):
                as_bytes(storage)[edge].zero_()
            drop_pages(address, start, stop)


class Resized:
    """A storage that torch's allocator allocates again at any address, for tensors without a fixed address."""

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
    """A flat tensor in memory of its own, allocated.

    tag: the memory's tag in vLLM's CUDA allocator; None: on CUDA its address may change, and vLLM is not needed.
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


class MemoryBuffer:
    """A flat tensor of `numel` elements whose memory can be released and allocated again.

    Views are made once. After `release()` and `allocate()` the same views (for example a rollout engine's parameters)
    see the new memory, whose content is undefined until it is written. Its address stays on a CPU, and on CUDA if the
    buffer has a `tag` in vLLM's allocator, which needs a vLLM built for CUDA.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, tag: str | None = None) -> None:
        self.data, self._memory = take(numel, dtype, device, tag)
        self.num_bytes = self._memory.num_bytes

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The elements from `offset` on, in `shape`. The buffer must be allocated."""
        return self.data[offset : offset + math.prod(shape)].view(shape)

    @property
    def is_allocated(self) -> bool:
        return self._memory.is_allocated

    def allocate(self) -> None:
        """Allocate the memory, if it is released."""
        self._memory.allocate()

    def release(self) -> None:
        """Release the memory. Views must not be read or written until `allocate()`."""
        self._memory.release()


def adopt(tensors: Sequence[torch.Tensor], tag: str) -> Memory:
    """The memory under existing tensors, all on one device; on CUDA they must be made in the pool `tag`.

    Raises ValueError for tensors made elsewhere.
    """
    storages = list({tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values())
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        return HostPages(storages)
    from megatron_rl.hybrid_engine.cuda_memory import mapped

    return mapped(storages, tag, device)


def adopt_alone(tensor: torch.Tensor) -> Memory:
    """The memory under a tensor with a storage of its own; on CUDA its address may change."""
    storage = tensor.untyped_storage()
    return HostPages([storage]) if tensor.device.type == "cpu" else Resized(storage)


def own_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that begins at a page, in pages of its own. Raises OSError without enough memory."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=numel)  # its storage keeps the mapping


def whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """First and last offset from `address` of the whole pages within `num_bytes`; equal if there is none."""
    start = min(-address % mmap.PAGESIZE, num_bytes)
    return start, max(start, num_bytes - (address + num_bytes) % mmap.PAGESIZE)


def drop_pages(address: int, start: int, stop: int) -> None:
    """Drop whole pages between two offsets from `address`; they read as zeros and are allocated when touched."""
    if stop == start:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED)")
