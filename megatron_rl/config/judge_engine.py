"""The engine of a judge: its tensor parallelism, and its keys in the form of the rollout's."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.roles import PoolSpec, RoleSpec, rollout_pool
from megatron_rl.config.rollout_keys import RolloutConfig
from megatron_rl.config.schema import RunConfig


def judge_tp_size(config: RunConfig, spec: RoleSpec) -> int:
    """The tensor parallelism of a judge's engine: that of its layout, but next to the rollout's engine that one's,
    because vLLM has one group of this kind in a process.
    """
    if spec.pool == rollout_pool(config):
        return config.actor_rollout_ref.rollout.tensor_model_parallel_size
    return spec.megatron.tensor_model_parallel_size


def engine_replica_size(config: RunConfig, pool: PoolSpec) -> int:
    """The ranks of a replica of the engines of a pool; 1 where it has none."""
    sizes = [judge_tp_size(config, role) for role in pool.roles if role.kind.judges]
    sizes += [role.settings.replica_size for role in pool.roles if role.kind.generates]
    return max(sizes, default=1)


def judge_engine_keys(config: RunConfig, spec: RoleSpec) -> RolloutConfig:
    """The keys of a judge's engine. What it has no key for is as the rollout's, but no draft token and no FP8."""
    keys, rollout = spec.settings.judge, config.actor_rollout_ref.rollout
    return replace(
        rollout,
        pool=spec.pool,
        tensor_model_parallel_size=judge_tp_size(config, spec),
        expert_parallel_size=1,
        data_parallel_size=1,
        kv_cache_memory_bytes=keys.kv_cache_memory_bytes,
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, keys.max_num_seqs),
        speculative=None,
        quantization=None,
        bitwise=False,
        async_scheduling=False,
    )
