"""A placement as settings: every key that it decides is set, so that no role inherits another role's value."""

from __future__ import annotations

import copy
from typing import Any

from megatron_rl.config.keys import REF, put
from megatron_rl.config.keys import ROLLOUT as ROLLOUT_KEY
from megatron_rl.config.megatron import OverrideTransformerConfig
from megatron_rl.config.roles import ACTOR, REFERENCE, ROLLOUT
from megatron_rl.config.schema import PoolConfig, RunConfig
from megatron_rl.config.trainer import GLOBAL_POOL
from megatron_rl.planning.layout_search.partitions import HYBRID, PoolNames
from megatron_rl.planning.layout_search.pools import DROP, PoolChoice
from megatron_rl.planning.layout_search.role_on_layout import RECOMPUTE
from megatron_rl.planning.layout_search.search import Placed
from megatron_rl.planning.layout_search.search_problem import SearchProblem


def settings_of_placement(work: SearchProblem, names: PoolNames, placed: Placed) -> dict[str, Any]:
    """Return dotted key -> value, for the configuration of `work`."""
    settings: dict[str, Any] = {}
    for choice in placed.choices:
        settings |= names.size_settings(choice.block, choice.units)
    settings |= _verl_pools(work, placed)
    for choice in placed.choices:
        settings |= _of_pool(work, names, choice)
    if REFERENCE not in work.roles:
        grid = placed.choices[0].grid
        assert grid is not None  # the actor's
        settings |= {f"{REF}.pool": GLOBAL_POOL} | {
            f"{REF}.megatron.{key}": value for key, value in grid.settings.items()
        }
    generation = next(choice.generation for choice in placed.choices if choice.generation is not None)
    decided = {
        f"{ROLLOUT_KEY}.tensor_model_parallel_size": generation.tp,
        f"{ROLLOUT_KEY}.kv_cache_memory_bytes": generation.kv_bytes,
        f"{ROLLOUT_KEY}.gpu_memory_utilization": None,
        DROP: False,
        "trainer.rollout_ahead": placed.ahead,
    }
    rollout = work.config.actor_rollout_ref.rollout
    if rollout.expert_parallel_size > 1:
        decided[f"{ROLLOUT_KEY}.expert_parallel_size"] = rollout.ep_size_at(generation.tp)
    return settings | decided | {key: work.keeps.values[key] for key in decided if key in work.keeps.values}


def _verl_pools(work: SearchProblem, placed: Placed) -> dict[str, Any]:
    """Return settings that reset verl's own keys for pools, where they are set."""
    shared, reward, settings = work.config.actor_rollout_ref, work.config.reward_model, dict[str, Any]()
    if shared.hybrid_engine is not None:
        together = any(ACTOR in choice.block and ROLLOUT in choice.block for choice in placed.choices)
        keep = HYBRID in work.keeps.values or (shared.hybrid_engine and together)
        settings[HYBRID] = shared.hybrid_engine if keep else None
    if shared.rollout.nnodes:
        settings[f"{ROLLOUT_KEY}.nnodes"] = 0
    if reward.enable_resource_pool:
        settings |= {"reward_model.enable_resource_pool": False, "reward_model.nnodes": 0}
    return settings


def _of_pool(work: SearchProblem, names: PoolNames, choice: PoolChoice) -> dict[str, Any]:
    settings: dict[str, Any] = {f"{names.keys[name]}.pool": names.name(choice.block) for name in choice.block}
    level = choice.generation.offloaded if choice.generation is not None else ()
    for name in choice.block:
        if name not in work.roles:
            continue
        assert choice.grid is not None  # a pool of roles on Megatron's grid
        role = work.roles[name]
        settings |= {f"{role.group}.{key}": value for key, value in choice.grid.settings.items()}
        settings |= role.offloads[level]
        if choice.generation is None:  # has no effect in a pool that does not generate: a kept value may stay
            settings |= {key: value for key, value in work.keeps.values.items() if key in role.offloads[level]}
        for option in choice.options[name].values():
            settings |= option.settings
        if not role.spec.is_trained and role.spec.megatron.override_transformer_config != OverrideTransformerConfig():
            group = f"{role.group}.override_transformer_config"
            settings |= {f"{group}.{key}": None for key in RECOMPUTE}
    return settings


def configured(base: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """Return a copy with these settings. Pools of the base without a size in them are removed."""
    changed = copy.deepcopy(base)
    sized = {key.split(".")[1] for key in settings if key.startswith("pools.")}
    kept = {name: pool for name, pool in changed.pools.items() if name in sized}
    changed.pools = kept | {name: PoolConfig() for name in sized if name not in kept}
    for key, value in settings.items():
        put(changed, key, value)
    return changed
