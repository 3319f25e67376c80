"""Hold the KV cache only while generating."""

from __future__ import annotations

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
        for tensor in self.tensors:
            tensor.zero_()

    def release(self) -> None:
        """Give the memory back."""
        for storage, _ in self._storages:
            storage.resize_(0)
