"""The KV cache that a share of a GPU leaves: vLLM's `gpu_memory_utilization`, as bytes that a plan can count with."""

from __future__ import annotations

import copy

from megatron_rl.config.schema import RunConfig
from megatron_rl.ledger.planner.cache_rules import KVCacheSize
from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.memory import GEN, plan_pools
from megatron_rl.ledger.planner.memory_report import memory_report
from megatron_rl.ledger.planner.preflight import read_models
from megatron_rl.ledger.planner.run_models import RunModels

OF_GENERATION = ("actor parameters", "rollout weights", "foreign stages", "vLLM activations")
"""What of a phase's memory counts towards the share beside the cache."""


def with_kv_cache(config: RunConfig, hardware: Hardware) -> RunConfig:
    """The configuration with `kv_cache_memory_bytes` in place of `gpu_memory_utilization`, where that is set.

    The cache is what weights and passes of generation leave of their share, at most what everything else on the rank
    leaves of the GPU, and at least enough for the longest sequence. The configuration must have passed preflight.
    """
    changed = copy.deepcopy(config)
    rollout = changed.actor_rollout_ref.rollout
    share, rollout.gpu_memory_utilization = rollout.gpu_memory_utilization, None
    if share is None or config.trainer.device != "cuda":
        return changed
    models = RunModels(changed)
    stages = plan_pools(models)[models.generating.spec.name]
    held = max(sum(stage.phases[GEN].get(name, 0) for name in OF_GENERATION) for stage in stages)
    room = memory_report(changed, models, hardware).room_kv_bytes
    longest = config.data.max_prompt_length + config.data.max_response_length
    cache = KVCacheSize.of(config, read_models(config, config_only=True)[0][0])
    wanted = min(int(share * hardware.memory_bytes) - held, room)
    rollout.kv_cache_memory_bytes = max(wanted, cache.needed_bytes(longest))
    return changed
