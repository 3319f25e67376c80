"""A meter of all tensors that operations make: it finds what lives only for a moment, and slows a CPU run down."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """While active, follows every tensor storage that an operation makes until it is freed.

    excluded: storages that are not followed. owned: the bytes of those, added at every operation.
    Not seen: memory inside of a kernel, of collectives, and of what never was a tensor.
    """

    def __init__(self, excluded: list[torch.Tensor], owned: Callable[[], int]) -> None:
        super().__init__()
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._owned = owned
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = 0
        self.peak = owned()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self._bytes + self._owned())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._excluded or key in self._live:
            return
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())
        self._bytes += storage.nbytes()

    def _forget(self, key: int) -> None:
        _, num_bytes = self._live.pop(key)
        self._bytes -= num_bytes
