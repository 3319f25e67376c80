"""Settings that make a memory plan fit: cheaper ones first, then recomputed activations, then other layouts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.keys import ROLLOUT as ROLLOUT_KEY
from megatron_rl.config.keys import followed_keys, put, value_of
from megatron_rl.config.lora import HOST, REFETCH
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import ACTOR, ROLLOUT, Placement, PoolSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import shown
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.memory import StageMemory, plan_pools
from megatron_rl.planning.memory_report import usable_bytes
from megatron_rl.planning.preflight import preflight
from megatron_rl.planning.run_models import RunModels

MOST_CHANGES = 16


@dataclass(frozen=True)
class Change:
    """Settings (key -> value) that save memory. peak: bytes of the worst rank with them."""

    settings: dict[str, Any]
    peak: int

    def __str__(self) -> str:
        return " ".join(f"{key}={shown(value)}" for key, value in self.settings.items())


def advice(config: RunConfig, models: RunModels, hardware: Hardware) -> list[Change]:
    """Return changes that together make the plan fit, or come as near as they can.

    Each one is the change that removes most of the excess, summed over all phases. Recomputing, which costs up to a
    third of training time, is tried where nothing cheaper helps, another layout last.
    """
    usable = usable_bytes(hardware)
    changes: list[Change] = []
    left = excess(plan_pools(models), usable)
    while left and len(changes) < MOST_CHANGES:
        for choices in (candidates, recomputing, other_layouts):
            options = [tried(config, models, settings, usable) for settings in choices(config, set(left))]
            better = [option for option in options if option and sum(option.excess.values()) < sum(left.values())]
            if better:
                break
        else:
            break
        best = min(better, key=lambda option: sum(option.excess.values()))
        config, models, left = best.config, best.models, best.excess
        kept = (change for change in changes if change.settings.keys() != best.change.settings.keys())
        changes = [*kept, best.change]
    return changes


def recomputing_everything(config: RunConfig, models: RunModels, hardware: Hardware) -> Change | None:
    """Return the change that recomputes all layers of trained models in the pools that do not fit.

    None if they already do, or where preflight refuses it.
    """
    settings: dict[str, Any] = {}
    usable = usable_bytes(hardware)
    for changes in recomputing(config, set(excess(plan_pools(models), usable))):
        settings |= changes
    alone = tried(config, models, settings, usable) if settings else None
    return None if alone is None else alone.change


@dataclass(frozen=True)
class Tried:
    """A change that preflight accepts, and the configuration with it. excess: pool -> bytes that are still too many."""

    change: Change
    config: RunConfig
    models: RunModels
    excess: dict[str, int]


def tried(config: RunConfig, models: RunModels, settings: dict[str, Any], usable: int) -> Tried | None:
    """Plan with changed settings; None if preflight refuses them. models: of `config`, or of a variant of it."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        put(changed, key, value)
    if preflight(changed, config_only=True, folders=models.folders):
        return None
    planned = RunModels(changed, variant_of=models)
    pools = plan_pools(planned)
    peak = max(stage.peak for stages in pools.values() for stage in stages)
    return Tried(Change(settings, peak), changed, planned, excess(pools, usable))


def excess(pools: dict[str, list[StageMemory]], usable: int) -> dict[str, int]:
    """Return pool that does not fit -> bytes above `usable`, summed over phases and stages."""
    over = {
        name: sum(max(0, stage.total(phase) - usable) for stage in stages for phase in stage.phases)
        for name, stages in pools.items()
    }
    return {name: num_bytes for name, num_bytes in over.items() if num_bytes}


def candidates(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Yield settings (key -> value) of these pools that keep every layout: offloading, and numbers that are halved."""
    placement = Placement.of(config)
    for pool in (placement.pools[name] for name in sorted(pools)):
        for role in pool.megatron_roles:
            yield from ({f"{role.key}.megatron.{name}": True} for name in _offloads(role))
        if pool.layout.tensor_model_parallel_size > 1:
            yield of_pool(config, pool, "sequence_parallel", True)
        yield from _brought_again(config, pool)
        keys = [pass_spec.key for role in pool.megatron_roles for pass_spec in role.passes]
        if placement.generates and pool.name == placement.roles[ROLLOUT].pool:
            keys += [f"{ROLLOUT_KEY}.kv_cache_memory_bytes", f"{ROLLOUT_KEY}.max_num_batched_tokens"]
        for key in dict.fromkeys(keys):
            value = value_of(config, key)
            if value > 1:
                yield {key: value // 2}


def _brought_again(config: RunConfig, pool: PoolSpec) -> Iterator[dict[str, Any]]:
    """Yield the setting that keeps no received part of a base on the device between generations, where adapters are
    trained. On a CPU the host is the device.
    """
    lora = config.actor_rollout_ref.model.lora
    if lora.base_stays and pool.role(ACTOR) and pool.role(ROLLOUT):
        yield {"actor_rollout_ref.model.lora.base": REFETCH if config.trainer.device == "cpu" else HOST}


def _offloads(role: RoleSpec) -> tuple[str, ...]:
    """Return the offload keys of a role, whose model may be another's."""
    return role.kind.offloads if role.model_of is None else ()


def of_pool(config: RunConfig, pool: PoolSpec, name: str, value: Any) -> dict[str, Any]:
    """Return the settings (key -> value) that change a layout key for all roles of a pool.

    Roles of the pool that follow its first role need no key of their own; roles of other pools that follow it keep
    their value by a key of their own.
    """
    followed, leader = followed_keys(config), f"{pool.megatron_roles[0].key}.megatron.{name}"
    settings = {leader: value}
    for role in Placement.of(config).megatron_roles:
        key = f"{role.key}.megatron.{name}"
        follows_it, old = followed.get(key) == leader, getattr(role.megatron, name)
        if role.pool == pool.name and not follows_it:
            settings[key] = value
        elif role.pool != pool.name and follows_it and old == value_of(config, leader):
            settings[key] = old
    return settings


def recomputing(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Yield for each trained role of these pools the settings that recompute the activations of every layer."""
    for role in Placement.of(config).trained:
        group = f"{role.key}.megatron.override_transformer_config"
        wanted = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        override = role.megatron.override_transformer_config
        if role.pool in pools and any(getattr(override, name) != value for name, value in wanted.items()):
            yield {f"{group}.{name}": value for name, value in wanted.items()}


def other_layouts(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Yield settings (key -> value) that change the layout of weights in these pools."""
    placement = Placement.of(config)
    if placement.generates and placement.roles[ROLLOUT].pool in pools:
        tp_size = placement.roles[ROLLOUT].settings.tensor_model_parallel_size
        in_place = {f"{ROLLOUT_KEY}.drop_train_weights": True}
        yield in_place if placement.is_colocated else {f"{ROLLOUT_KEY}.tensor_model_parallel_size": 2 * tp_size}
    for pool in (placement.pools[name] for name in sorted(pools)):
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size") if pool.megatron_roles else ():
            yield of_pool(config, pool, name, 2 * getattr(pool.layout, name))
        if pool.megatron_roles:
            yield cut_over(config, pool, 2 * pool.layout.context_parallel_size)


def cut_over(config: RunConfig, pool: PoolSpec, cp_size: int) -> dict[str, Any]:
    """Return the settings that shard the sequences of a pool over `cp_size` ranks. Token limits of passes are lowered
    to one rank's part of the longest sequence.
    """
    settings = of_pool(config, pool, "context_parallel_size", cp_size)
    for pass_spec in (pass_spec for role in pool.megatron_roles for pass_spec in role.passes):
        part = -(-(pass_spec.longest or config.longest_sequence) // cp_size)
        if pass_spec.max_tokens is not None and value_of(config, pass_spec.key) > part:
            settings[pass_spec.key] = max(part, settings.get(pass_spec.key, 0))
    return settings


def cutting_sequences(config: RunConfig, models: RunModels, hardware: Hardware) -> Change | None:
    """Return the change to the smallest context parallelism with which the plan fits, alone or with recomputing.

    None if no size fits, or preflight refuses all.
    """
    usable = usable_bytes(hardware)
    pools = set(excess(plan_pools(models), usable))
    everything = {key: value for settings in recomputing(config, pools) for key, value in settings.items()}
    for again in ({}, everything):
        for settings in wider_cuts(config, pools):
            option = tried(config, models, settings | again, usable)
            if option is not None and not option.excess:
                return option.change
    return None


def wider_cuts(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Yield settings that shard sequences over 2, 4, 8 ... times as many ranks, while the pools have that many."""
    placement, factor = Placement.of(config), 2
    hosting = [placement.pools[name] for name in sorted(pools) if placement.pools[name].megatron_roles]
    while hosting:
        hosting = [pool for pool in hosting if factor <= data_parallel(pool.world_size, pool.layout)]
        settings: dict[str, Any] = {}
        for pool in hosting:
            settings |= cut_over(config, pool, factor * pool.layout.context_parallel_size)
        if settings:
            yield settings
        factor *= 2


def data_parallel(world_size: int, layout: MegatronConfig) -> int:
    """Return the data-parallel size: by how much context parallelism can grow."""
    sizes = (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.context_parallel_size)
    return world_size // (sizes[0] * sizes[1] * sizes[2])
