"""The KV cache, whose memory is held only during generation."""

from __future__ import annotations

import torch

from megatron_rl.hybrid_engine.stable_memory import adopt

POOL = "kv_cache"
"""vLLM's own tag of the KV cache in its CUDA allocator."""
POOL_OPTION = "kv_cache_pool"
"""Entry of vLLM's `additional_config` with the tag of an engine that is not the process's first. vLLM keeps one memory
pool for a tag, and a second engine with it would have torch drop the pool of the first."""


class KVCache:
    """The engine's cache tensors. Their memory can be released; they stay at their addresses.

    On CUDA they must be in the pool `pool` (`cuda_worker.py`), else ValueError.
    """

    def __init__(self, tensors: list[torch.Tensor], pool: str = POOL) -> None:
        self.tensors = tensors
        self._memory = adopt(tensors, pool)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._memory.num_bytes if self._memory.is_allocated else 0

    def allocate(self) -> None:
        """Allocate the memory, zeroed, because attention multiplies masked blocks by 0 and 0 * NaN is NaN.

        On a CPU a page takes memory only when it is touched, so the unused part of a large cache takes none.
        """
        self._memory.allocate()
        self._memory.clear()

    def release(self) -> None:
        """Release the memory."""
        self._memory.release()
