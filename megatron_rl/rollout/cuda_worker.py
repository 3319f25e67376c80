"""vLLM's worker on CUDA with a KV cache whose memory can be released while its addresses stay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.gpu_worker import Worker

from megatron_rl.hybrid_engine.cuda_memory import pool
from megatron_rl.rollout.kv_cache import POOL, POOL_OPTION


class StableWorker(Worker):
    """vLLM's worker, which allocates only the KV cache in a memory pool.

    vLLM's sleep mode would also put weights and workspaces into pools, and it requires an unused allocator. Here the
    received shards of the trainer have used it before.
    """

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        if tag != POOL:
            return nullcontext()
        return pool(self.vllm_config.additional_config.get(POOL_OPTION, POOL))
