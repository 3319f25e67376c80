"""Hold the KV cache only while generating."""

from __future__ import annotations

import ctypes
import mmap

import torch


class KVCache:
    """The engine's cache tensors, whose memory can be given back; their storages stay the same objects."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self.tensors = tensors

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(storage.nbytes() for storage, _ in self._storages)

    def allocate(self) -> None:
        """Take the memory; zeroed, because attention multiplies masked blocks by 0 and 0 * NaN is NaN."""
        for storage, num_bytes in self._storages:
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
            zero(storage)

    def release(self) -> None:
        """Give the memory back."""
        for storage, _ in self._storages:
            storage.resize_(0)


def zero(storage: torch.UntypedStorage) -> None:
    """Fill with zeros. On a CPU whole pages are dropped, and the system gives each anew, zeroed, when it is touched:
    of a cache that is larger than what a batch needs the rest is never taken.

    Raises OSError where the system refuses.
    """
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type != "cpu":
        whole.zero_()
        return
    address, num_bytes = storage.data_ptr(), storage.nbytes()
    start = min(-address % mmap.PAGESIZE, num_bytes)
    stop = max(start, num_bytes - (address + num_bytes) % mmap.PAGESIZE)
    whole[:start].zero_()
    whole[stop:].zero_()
    if stop > start:
        drop_pages(address + start, stop - start)


def drop_pages(address: int, num_bytes: int) -> None:
    """Let private anonymous memory read as zeros, taking none before it is touched. Both: whole pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)
    if libc.madvise(*arguments):
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) of the KV cache")
