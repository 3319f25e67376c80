"""Give a decoding request its next slot at once where the block that it writes to has one.

Reason: vLLM asks for every token of every request whether blocks of the KV cache are skipped, missing, free and full.
Between two ends of a block the answer is always the same: no new block.
What it does: where all layers are of one kind that attends to everything, and one new token goes into a block that the
request has and does not fill, `allocate_slots` returns no blocks without asking. All other calls are vLLM's own.
"""

from __future__ import annotations

import functools
from typing import Any

from third_party_patches.guard import VLLM, Patch


def apply() -> None:
    """Replace one method; before requests are scheduled."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    usual = KVCacheManager.allocate_slots
    if usual.__module__ == __name__:
        return

    @functools.wraps(usual)
    def allocate_slots(self: Any, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        managers = self.coordinator.single_type_managers
        is_plain = num_new_tokens == 1 and not args and kwargs == {"num_lookahead_tokens": 0}
        if is_plain and len(managers) == 1 and type(managers[0]) is FullAttentionManager:
            (manager,), size, name = managers, managers[0].block_size, request.request_id
            stop = request.num_computed_tokens + 1
            if (
                stop % size  # it does not fill the block, which would be cached
                and stop <= min(len(manager.req_to_blocks.get(name, ())) * size, self.max_model_len)
                and manager.num_cached_block.get(name, 0) >= stop // size
                and manager.block_pool.hash_block_size == size
                and name not in manager._partial_hit_reqs
            ):
                return self.empty_kv_cache_blocks
        return usual(self, request, num_new_tokens, *args, **kwargs)

    allocate_slots.__module__ = __name__
    KVCacheManager.allocate_slots = allocate_slots


PATCH = Patch(VLLM, apply, drop_when="vLLM's allocate_slots returns early for a token that needs no new block")
