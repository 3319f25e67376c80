"""Flat memory whose bytes come and go while every view of it stays bound."""

from __future__ import annotations

import math

import torch


class MemoryBuffer:
    """A flat tensor of `numel` elements that can give its memory back and take it again.

    Views are made once. They share the buffer's storage object, so after `release()` and `allocate()` the same views
    (a rollout engine's parameters, say) see the new memory; its content is undefined until it is written.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.data.untyped_storage()
        self.num_bytes = self._storage.nbytes()

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The elements from `offset` on, in `shape`. The buffer must be allocated."""
        return self.data[offset : offset + math.prod(shape)].view(shape)

    @property
    def is_allocated(self) -> bool:
        return self._storage.nbytes() == self.num_bytes

    def allocate(self) -> None:
        """Take memory again; nothing happens when it is there."""
        if not self.is_allocated:
            self._storage.resize_(self.num_bytes)

    def release(self) -> None:
        """Give the memory back. Views must not be read or written until `allocate()`."""
        self._storage.resize_(0)
