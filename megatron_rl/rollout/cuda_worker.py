"""vLLM's worker on CUDA, with a KV cache whose memory can leave while its addresses stay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.v1.worker.gpu_worker import Worker

from megatron_rl.hybrid_engine.cuda_memory import pool
from megatron_rl.rollout.kv_cache import POOL


class StableWorker(Worker):
    """vLLM's own, but for where memory is made: of its pools only the KV cache's is taken.

    vLLM's sleep mode would put weights and workspaces into pools, too, and asks for an allocator that nobody has used,
    which the trainer's foreign stages have by then.
    """

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return pool(POOL) if tag == POOL else nullcontext()
