"""Memory that training does not need while generating: kept on the host, or given back, and restored afterwards.

Whole storages are moved, so every view of a tensor (parameters, optimizer shards) stays valid across the trip. On a
CPU the host copy takes as much as it frees; the path is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch


class Resting(Protocol):
    """Something that can rest while generating."""

    def leave(self) -> None:
        """Free the memory."""

    def come_back(self) -> None:
        """Take it again, with what it held; nothing happens where it never left."""


class HostCopy:
    """Tensors whose content waits in host memory (pinned where there is a GPU).

    tensors: called on leaving, because an optimizer makes its state at the first step.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor]] = []

    def leave(self) -> None:
        """Copy every storage to the host and free it."""
        for tensor in unique_storages(self._tensors()):
            storage = tensor.untyped_storage()
            content = storage_bytes(storage)
            host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
            host.copy_(content)
            self._away.append((storage, host))
            storage.resize_(0)

    def come_back(self) -> None:
        """Bring back what left."""
        while self._away:
            storage, host = self._away[-1]
            storage.resize_(len(host))
            storage_bytes(storage).copy_(host)
            self._away.pop()


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
                storage_bytes(tensor.untyped_storage()).zero_()


def unique_storages(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """One tensor for each different, non-empty storage."""
    first = {tensor.untyped_storage()._cdata: tensor for tensor in tensors if tensor.untyped_storage().nbytes()}
    return first.values()


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage, as a uint8 tensor over it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
