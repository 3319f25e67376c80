"""Whether the memory plan fits a GPU, what room it leaves for the KV cache, and what to change if it does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megatron_rl.config.algorithms import uses_critic
from megatron_rl.config.load import follows
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.validate import ACTOR, CRITIC, REF, REWARD_MODEL, ROLLOUT
from megatron_rl.errors import shown
from megatron_rl.planner.cache_rules import KVCacheSize
from megatron_rl.planner.hardware import Hardware
from megatron_rl.planner.memory import StageMemory, plan_stages
from megatron_rl.planner.preflight import preflight, read_models
from megatron_rl.planner.run_models import RunModels

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
    """The plan beside a GPU.

    usable: bytes that tensors may have. kv_tokens, kv_sequences: what the configured cache holds on each replica,
    sequences at full length. room_kv_bytes: the largest cache that would fit in every phase that has one.
    """

    hardware: Hardware
    stages: list[StageMemory]
    usable: int
    kv_cache: KVCacheSize
    kv_bytes: int
    longest: int
    room_kv_bytes: int

    @property
    def peak(self) -> int:
        """Bytes of the worst rank at its worst moment."""
        return max(stage.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def kv_tokens(self) -> int:
        """Tokens that the configured cache holds."""
        return self.kv_cache.num_tokens(self.kv_bytes)

    @property
    def kv_sequences(self) -> int:
        """Sequences of full length that the configured cache holds at once."""
        return self.kv_cache.num_sequences(self.kv_bytes, self.longest)

    @property
    def kinds(self) -> dict[str, StageMemory]:
        """The first, the last and the heaviest of the other stages."""
        found: dict[str, StageMemory] = {}
        for stage in self.stages:
            if stage.kind not in found or stage.peak > found[stage.kind].peak:
                found[stage.kind] = stage
        return found

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, in bytes."""
        return {
            "hardware": self.hardware.name,
            "usable_bytes": self.usable,
            "peak_bytes": self.peak,
            "fits": self.fits,
            "stages": [{"pp_rank": s.pp_rank, "kind": s.kind, "phases": s.phases} for s in self.stages],
            "kv_cache": {
                "bytes": self.kv_bytes,
                "tokens": self.kv_tokens,
                "sequences": self.kv_sequences,
                "largest_bytes": self.room_kv_bytes,
                "largest_tokens": self.kv_cache.num_tokens(self.room_kv_bytes),
            },
        }


def usable_bytes(hardware: Hardware) -> int:
    """What tensors may have of a GPU's memory."""
    return int((hardware.memory_bytes - hardware.context_bytes) * (1 - FRAGMENTATION))


def memory_report(config: RunConfig, models: RunModels, hardware: Hardware) -> MemoryReport:
    """The plan of a configuration that has passed preflight, beside a GPU."""
    usable = usable_bytes(hardware)
    stages = plan_stages(models)
    kv_bytes = config.actor_rollout_ref.rollout.kv_cache_memory_bytes
    beside_cache = max(
        stage.total(phase) - kv_bytes for stage in stages for phase in stage.phases if "KV cache" in stage.phases[phase]
    )
    model_sizes = read_models(config, config_only=True)[0][0]
    return MemoryReport(
        hardware,
        stages,
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
    usable, found = usable_bytes(hardware), []
    left = _excess(plan_stages(models), usable)
    while left and len(found) < MOST_CHANGES:
        for choices, alike in ((candidates, models), (recomputing, models), (other_layouts, None)):
            tried = [_tried(config, alike, settings, usable) for settings in choices(config)]
            better = [one for one in tried if one is not None and one.excess < left]
            if better:
                break
        else:
            break
        best = min(better, key=lambda one: one.excess)
        config, models, left = best.config, best.models, best.excess
        found = [*(change for change in found if change.settings.keys() != best.change.settings.keys()), best.change]
    return found


def recomputing_everything(config: RunConfig, models: RunModels, hardware: Hardware) -> Change | None:
    """What recomputing all layers of all trained models comes to by itself; None where that is so, or is refused."""
    settings: dict[str, Any] = {}
    for changes in recomputing(config):
        settings |= changes
    tried = _tried(config, models, settings, usable_bytes(hardware)) if settings else None
    return None if tried is None else tried.change


@dataclass(frozen=True)
class _Tried:
    change: Change
    config: RunConfig
    models: RunModels
    excess: int


def _tried(config: RunConfig, models: RunModels | None, settings: dict[str, Any], usable: int) -> _Tried | None:
    """What changed settings come to; None where preflight refuses them. models: None for another layout."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        put(changed, key, value)
    if preflight(changed, config_only=True):
        return None
    planned = RunModels(changed, alike=models)
    stages = plan_stages(planned)
    peak = max(stage.peak for stage in stages)
    return _Tried(Change(settings, peak), changed, planned, _excess(stages, usable))


def _excess(stages: list[StageMemory], usable: int) -> int:
    """Bytes that are too much, summed over phases and stages."""
    return sum(max(0, stage.total(phase) - usable) for stage in stages for phase in stage.phases)


def candidates(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Key -> value of what could be changed next within the same layout; numbers are halved."""
    shared = config.actor_rollout_ref
    for role in (ACTOR, CRITIC):
        yield from ({f"{role}.megatron.{name}": True} for name in ("grad_offload", "optimizer_offload"))
    yield from ({f"{role}.megatron.param_offload": True} for role in (CRITIC, REF, REWARD_MODEL))
    if shared.actor.megatron.tensor_model_parallel_size > 1:
        yield {f"{ACTOR}.megatron.sequence_parallel": True}
    for key in (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{CRITIC}.ppo_micro_batch_size_per_gpu",
        f"{CRITIC}.forward_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        f"{REWARD_MODEL}.micro_batch_size_per_gpu",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ROLLOUT}.kv_cache_memory_bytes",
        f"{ROLLOUT}.max_num_batched_tokens",
    ):
        value = attrgetter(key)(config)
        if value > 1:
            yield {key: value // 2}


def recomputing(config: RunConfig) -> Iterator[dict[str, Any]]:
    """The settings of each trained role that has activations of every layer made again."""
    for role in (ACTOR, CRITIC) if uses_critic(config) else (ACTOR,):
        group = f"{role}.megatron.override_transformer_config"
        wanted = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        override = attrgetter(group)(config)
        if any(getattr(override, name) != value for name, value in wanted.items()):
            yield {f"{group}.{name}": value for name, value in wanted.items()}


def other_layouts(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Key -> value of what changes where weights lie."""
    megatron = config.actor_rollout_ref.actor.megatron
    yield {f"{ROLLOUT}.drop_train_weights": True}
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        yield {f"{ACTOR}.megatron.{name}": 2 * attrgetter(name)(megatron)}


def put(config: RunConfig, key: str, value: Any) -> None:
    """Set a key, and those that follow it as long as they had its value, as an override does."""
    old = attrgetter(key)(config)
    group, _, name = key.rpartition(".")
    setattr(attrgetter(group)(config), name, value)
    for follower, leader in follows().items():
        if leader == key and attrgetter(follower)(config) == old:
            put(config, follower, value)
