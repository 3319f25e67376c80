"""A run on one rank, in one process: every role is in one pool, and nothing is sharded."""

from __future__ import annotations

import copy
from typing import Any

from megatron_rl.config.megatron import LAYOUT_KEYS, MegatronConfig
from megatron_rl.config.schema import Config
from megatron_rl.config.trainer import GLOBAL_POOL

KEPT = {"dtype", "make_vocab_size_divisible_by"}
"""Keys of the layout that one rank takes from the actor; the others have their defaults, which share nothing."""


def collapsed(config: Config) -> Config:
    """Return a deep copy with all roles on one rank of global_pool.

    All roles take dtype and vocabulary padding from the actor, because roles of one pool share a layout. The KV cache
    holds as many tokens as that of one replica did over all its ranks. The actor's parameters are not offloaded during
    generation, which reads them. Generation that ran ahead alternates with training.
    """
    alone = copy.deepcopy(config)
    shared, reward = alone.actor_rollout_ref, alone.reward_model
    alone.trainer.nnodes = alone.trainer.n_gpus_per_node = 1
    alone.pools = {}
    shared.hybrid_engine, reward.enable_resource_pool = None, False
    for group in (shared.rollout, reward):
        group.nnodes, group.n_gpus_per_node = 0, 1
    roles: list[Any] = [shared.actor, shared.ref, alone.critic, reward, *alone.reward_models.values()]
    roles += alone.distillation.teacher_models.values()
    for role in (*roles, shared.rollout):
        role.pool = GLOBAL_POOL
    for role in roles:
        _on_one_rank(role.megatron, shared.actor.megatron)
    shared.actor.megatron.param_offload = False
    shared.rollout.kv_cache_memory_bytes *= shared.rollout.replica_size
    shared.rollout.tensor_model_parallel_size = shared.rollout.expert_parallel_size = 1
    shared.rollout.data_parallel_size = 1
    if alone.trainer.rollout_ahead:
        # Nothing is generated while this rank trains: only unfinished responses outlive a step.
        alone.async_training.partial_rollout = True
        alone.async_training.trigger_parameter_sync_step = 1
    return alone


def _on_one_rank(megatron: MegatronConfig, actor: MegatronConfig) -> None:
    for key in LAYOUT_KEYS:
        setattr(megatron, key, getattr(actor if key in KEPT else MegatronConfig, key))
    megatron.expert_tensor_parallel_size = 1
