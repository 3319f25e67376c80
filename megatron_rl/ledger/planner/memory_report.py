"""Whether the memory plan fits a GPU, what room it leaves for the KV cache, and what to change if it does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.keys import followed_keys, put, value_of
from megatron_rl.config.roles import ACTOR, ROLLOUT, SCORER, TUNED, Placement, PoolSpec, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.value_tables import ROLLOUT as ROLLOUT_KEY
from megatron_rl.errors import shown
from megatron_rl.ledger.planner.cache_rules import KVCacheSize
from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.memory import StageMemory, plan_pools
from megatron_rl.ledger.planner.preflight import preflight, read_models
from megatron_rl.ledger.planner.run_models import RunModels

FRAGMENTATION = 0.05
"""Share of a GPU's memory that an allocator cannot hand out, because free blocks do not lie together."""
MOST_CHANGES = 16


@dataclass(frozen=True)
class Change:
    """Settings (key -> value) that need less memory, and what the worst rank would then need."""

    settings: dict[str, Any]
    peak: int

    def __str__(self) -> str:
        return " ".join(f"{key}={shown(value)}" for key, value in self.settings.items())


@dataclass(frozen=True)
class MemoryReport:
    """The plan beside a GPU, which all pools have alike.

    pools: the stages of each. usable: bytes that tensors may have. kv_tokens, kv_sequences: what the configured cache
    holds on each replica, sequences at full length. room_kv_bytes: the largest cache that would fit in every phase that
    has one.
    """

    hardware: Hardware
    pools: dict[str, list[StageMemory]]
    usable: int
    kv_cache: KVCacheSize
    kv_bytes: int
    longest: int
    room_kv_bytes: int

    @property
    def stages(self) -> list[StageMemory]:
        """Those of all pools."""
        return [stage for stages in self.pools.values() for stage in stages]

    @property
    def peak(self) -> int:
        """Bytes of the worst rank at its worst moment."""
        return max(stage.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every pool does."""
        return self.peak <= self.usable

    @property
    def kv_tokens(self) -> int:
        """Tokens that the configured cache holds."""
        return self.kv_cache.num_tokens(self.kv_bytes)

    @property
    def kv_sequences(self) -> int:
        """Sequences of full length that the configured cache holds at once."""
        return self.kv_cache.num_sequences(self.kv_bytes, self.longest)

    def kinds(self, pool: str) -> dict[str, StageMemory]:
        """The first, the last and the heaviest of the other stages of a pool."""
        return worst_of_kinds(self.pools[pool])

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, in bytes."""
        return {
            "hardware": self.hardware.name,
            "usable_bytes": self.usable,
            "peak_bytes": self.peak,
            "fits": self.fits,
            "stages": [{"pool": s.pool, "pp_rank": s.pp_rank, "kind": s.kind, "phases": s.phases} for s in self.stages],
            "kv_cache": {
                "bytes": self.kv_bytes,
                "tokens": self.kv_tokens,
                "sequences": self.kv_sequences,
                "largest_bytes": self.room_kv_bytes,
                "largest_tokens": self.kv_cache.num_tokens(self.room_kv_bytes),
            },
        }


def worst_of_kinds(stages: Sequence[StageMemory]) -> dict[str, StageMemory]:
    """Kind -> the heaviest of the stages of this kind, in the stages' order."""
    found: dict[str, StageMemory] = {}
    for stage in stages:
        if stage.kind not in found or stage.peak > found[stage.kind].peak:
            found[stage.kind] = stage
    return found


def usable_bytes(hardware: Hardware) -> int:
    """What tensors may have of a GPU's memory."""
    return int((hardware.memory_bytes - hardware.context_bytes) * (1 - FRAGMENTATION))


def memory_report(config: RunConfig, models: RunModels, hardware: Hardware) -> MemoryReport:
    """The plan of a configuration that has passed preflight, beside a GPU."""
    usable = usable_bytes(hardware)
    pools = plan_pools(models)
    kv_bytes = config.actor_rollout_ref.rollout.kv_cache_memory_bytes
    beside_cache = max(
        stage.total(phase) - kv_bytes
        for stage in pools[models.generating.spec.name]
        for phase in stage.phases
        if "KV cache" in stage.phases[phase]
    )
    model_sizes = read_models(config, config_only=True)[0][0]
    return MemoryReport(
        hardware,
        pools,
        usable,
        KVCacheSize.of(config, model_sizes),
        kv_bytes,
        config.data.max_prompt_length + config.data.max_response_length,
        max(0, usable - beside_cache),
    )


def advice(config: RunConfig, models: RunModels, hardware: Hardware) -> list[Change]:
    """Changes that, one after the other, make the plan fit; as far as they go, where none of them is enough.

    Each is the one that takes most off what is too much, over all phases. Recomputing, which costs up to a third of
    training's time, comes where nothing cheaper helps, and another layout last.
    """
    usable = usable_bytes(hardware)
    found: list[Change] = []
    left = excess(plan_pools(models), usable)
    while left and len(found) < MOST_CHANGES:
        for choices, alike in ((candidates, models), (recomputing, models), (other_layouts, None)):
            options = [tried(config, alike, settings, usable) for settings in choices(config, set(left))]
            better = [one for one in options if one is not None and sum(one.excess.values()) < sum(left.values())]
            if better:
                break
        else:
            break
        best = min(better, key=lambda one: sum(one.excess.values()))
        config, models, left = best.config, best.models, best.excess
        found = [*(change for change in found if change.settings.keys() != best.change.settings.keys()), best.change]
    return found


def recomputing_everything(config: RunConfig, models: RunModels, hardware: Hardware) -> Change | None:
    """What recomputing all layers of trained models comes to by itself, in the pools that do not fit.

    None where that is so already, or is refused.
    """
    settings: dict[str, Any] = {}
    usable = usable_bytes(hardware)
    for changes in recomputing(config, set(excess(plan_pools(models), usable))):
        settings |= changes
    alone = tried(config, models, settings, usable) if settings else None
    return None if alone is None else alone.change


@dataclass(frozen=True)
class Tried:
    """Changed settings, the configuration with them, and what is still too much: pool -> bytes."""

    change: Change
    config: RunConfig
    models: RunModels
    excess: dict[str, int]


def tried(config: RunConfig, models: RunModels | None, settings: dict[str, Any], usable: int) -> Tried | None:
    """What changed settings come to; None where preflight refuses them. models: None for another layout."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        put(changed, key, value)
    if preflight(changed, config_only=True):
        return None
    planned = RunModels(changed, alike=models)
    pools = plan_pools(planned)
    peak = max(stage.peak for stages in pools.values() for stage in stages)
    return Tried(Change(settings, peak), changed, planned, excess(pools, usable))


def excess(pools: dict[str, list[StageMemory]], usable: int) -> dict[str, int]:
    """Pool that does not fit -> bytes that are too much, summed over phases and stages."""
    found = {
        name: sum(max(0, stage.total(phase) - usable) for stage in stages for phase in stage.phases)
        for name, stages in pools.items()
    }
    return {name: excess for name, excess in found.items() if excess}


def candidates(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Key -> value of what could be changed next within the same layouts, in these pools; numbers are halved."""
    placement = Placement.of(config)
    for pool in (placement.pools[name] for name in sorted(pools)):
        for role in pool.megatron_roles:
            yield from ({f"{role.key}.megatron.{name}": True} for name in _offloads(role))
        if pool.layout.tensor_model_parallel_size > 1:
            yield of_pool(config, pool, "sequence_parallel", True)
        keys = [one.key for role in pool.megatron_roles for one in role.passes]
        if placement.generates and pool.name == placement.roles[ROLLOUT].pool:
            keys += [f"{ROLLOUT_KEY}.kv_cache_memory_bytes", f"{ROLLOUT_KEY}.max_num_batched_tokens"]
        for key in dict.fromkeys(keys):
            value = value_of(config, key)
            if value > 1:
                yield {key: value // 2}


def _offloads(role: RoleSpec) -> tuple[str, ...]:
    """What of a role may rest while its pool generates; the actor's parameters may not."""
    if role.kind in (TUNED, SCORER):
        return ()
    trained = ("grad_offload", "optimizer_offload") if role.is_trained else ()
    return trained if role.kind == ACTOR else (*trained, "param_offload")


def of_pool(config: RunConfig, pool: PoolSpec, name: str, value: Any) -> dict[str, Any]:
    """A layout key of a pool's first role, and of those of its others that do not follow it.

    Roles of other pools that follow it keep what they have.
    """
    followed, leader = followed_keys(config), f"{pool.megatron_roles[0].key}.megatron.{name}"
    found = {leader: value}
    for role in Placement.of(config).megatron_roles:
        key = f"{role.key}.megatron.{name}"
        follows_it, old = followed.get(key) == leader, getattr(role.megatron, name)
        if role.pool == pool.name and not follows_it:
            found[key] = value
        elif role.pool != pool.name and follows_it and old == value_of(config, leader):
            found[key] = old
    return found


def recomputing(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """The settings of each trained role of these pools that has activations of every layer made again."""
    for role in Placement.of(config).trained:
        group = f"{role.key}.megatron.override_transformer_config"
        wanted = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        override = role.megatron.override_transformer_config
        if role.pool in pools and any(getattr(override, name) != value for name, value in wanted.items()):
            yield {f"{group}.{name}": value for name, value in wanted.items()}


def other_layouts(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Key -> value of what changes where weights lie in these pools."""
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
    """The settings of a pool whose sequences are cut over so many ranks: where passes are cut by tokens, a rank's part
    of one is no longer than that of the longest sequence.
    """
    found = of_pool(config, pool, "context_parallel_size", cp_size)
    longest = config.data.max_prompt_length + config.data.max_response_length
    for one in (one for role in pool.megatron_roles for one in role.passes):
        part = -(-(one.longest or longest) // cp_size)
        if one.max_tokens is not None and value_of(config, one.key) > part:
            found[one.key] = max(part, found.get(one.key, 0))
    return found
