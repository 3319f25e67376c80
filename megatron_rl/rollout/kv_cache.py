"""Hold the KV cache only while generating."""

from __future__ import annotations

import torch

from megatron_rl.hybrid_engine.stable_memory import adopt

POOL = "kv_cache"
"""The tag of the KV cache among vLLM's allocations on CUDA; vLLM's own word for it."""


class KVCache:
    """The engine's cache tensors, whose memory can be given back; they stay at their addresses.

    On CUDA they must lie in the pool `POOL` (`cuda_worker.py`); ValueError says which do not.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._memory = adopt(tensors, POOL)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._memory.num_bytes if self._memory.is_allocated else 0

    def allocate(self) -> None:
        """Take the memory; zeroed, because attention multiplies masked blocks by 0 and 0 * NaN is NaN.

        On a CPU no page is taken before it is touched: of a cache that is larger than what a batch needs the rest never
        is.
        """
        self._memory.allocate()
        self._memory.clear()

    def release(self) -> None:
        """Give the memory back."""
        self._memory.release()
