"""The same run on one rank, for a run in one process: every role in one pool, and nothing shared out."""

from __future__ import annotations

import copy
from typing import Any

from megatron_rl.config.megatron import LAYOUT_KEYS, MegatronConfig
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.trainer import GLOBAL_POOL

ALONE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "dynamic_context_parallel": False,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
}
"""The layout of one rank."""


def collapsed(config: RunConfig) -> RunConfig:
    """A deep copy whose roles all live on one rank of global_pool.

    What is left of the layout, dtype and vocabulary padding, is the actor's for all roles, as roles of one pool share
    it. The KV cache holds as many tokens as a replica's did over its ranks. The actor's parameters stay where they are
    while generating, because generation then reads them. Generation that runs ahead is in turns with training.
    """
    found = copy.deepcopy(config)
    shared, reward = found.actor_rollout_ref, found.reward_model
    found.trainer.nnodes = found.trainer.n_gpus_per_node = 1
    found.pools = {}
    shared.hybrid_engine, reward.enable_resource_pool = None, False
    for group in (shared.rollout, reward):
        group.nnodes, group.n_gpus_per_node = 0, 1
    roles: list[Any] = [shared.actor, shared.ref, found.critic, reward, *found.reward_models.values()]
    for role in (*roles, shared.rollout):
        role.pool = GLOBAL_POOL
    for role in roles:
        _on_one_rank(role.megatron, shared.actor.megatron)
    shared.actor.megatron.param_offload = False
    shared.rollout.kv_cache_memory_bytes *= shared.rollout.tensor_model_parallel_size
    shared.rollout.tensor_model_parallel_size = 1
    if found.trainer.rollout_ahead:
        # Nothing is drawn while this rank trains: only unfinished answers outlive a step.
        found.async_training.partial_rollout = True
        found.async_training.trigger_parameter_sync_step = 1
    return found


def _on_one_rank(megatron: MegatronConfig, actor: MegatronConfig) -> None:
    for key in LAYOUT_KEYS:
        setattr(megatron, key, ALONE[key] if key in ALONE else getattr(actor, key))
