"""How long sequences may get in a layout, and over how many ranks they must be cut where they do not fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.keys import put
from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.ledger.planner.hardware import Hardware
from megatron_rl.ledger.planner.memory import plan_pools
from megatron_rl.ledger.planner.memory_report import (
    Change,
    MemoryReport,
    cut_over,
    excess,
    recomputing,
    tried,
    usable_bytes,
)
from megatron_rl.ledger.planner.preflight import read_models
from megatron_rl.ledger.planner.run_models import RunModels

MEMORY = "memory"


@dataclass(frozen=True)
class LongestSequence:
    """tokens: of a prompt as long as it may be, with its answer; 0 where not one token of one fits.

    limited_by: why not one more.
    """

    tokens: int
    limited_by: str


def longest_sequence(config: RunConfig, models: RunModels, memory: MemoryReport) -> LongestSequence:
    """For answers of any length, in passes that take one such sequence where they are cut by tokens.

    The layout, the cache and all else stay. The configuration must have passed preflight.
    """
    prompt = config.data.max_prompt_length
    limits = {"the KV cache": memory.kv_cache.num_tokens(memory.kv_bytes)} | position_limits(config)
    limited_by = min(limits, key=lambda name: limits[name])
    most = limits[limited_by]

    def fits(length: int) -> bool:
        pools = plan_pools(RunModels(with_longest(config, length), alike=models))
        return all(stage.peak <= memory.usable for stages in pools.values() for stage in stages)

    if most <= prompt:
        return LongestSequence(0, limited_by)
    if fits(most):
        return LongestSequence(most, limited_by)
    lower, upper = prompt, most
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fits(middle) else (lower, middle)
    return LongestSequence(lower if lower > prompt else 0, MEMORY)


def position_limits(config: RunConfig) -> dict[str, int]:
    """Name -> the most tokens that a model of the run reads, of those that read its tokens."""
    override = config.actor_rollout_ref.model.override_config.max_position_embeddings
    found: dict[str, int] = {}
    for model in read_models(config, config_only=True)[0]:
        of_model = ({"max_position_embeddings": override} if override is not None else model.longest) | model.windows
        found |= {f"{name} of {model.path}": limit for name, limit in of_model.items()}
    return found


def with_longest(config: RunConfig, length: int) -> RunConfig:
    """A copy with sequences of so many tokens at most, and passes by tokens that take one of them."""
    changed = copy.deepcopy(config)
    changed.data.max_response_length = length - config.data.max_prompt_length
    for role in Placement.of(config).megatron_roles:
        for one in role.passes:
            if one.max_tokens is not None:
                put(changed, one.key, -(-(one.longest or length) // role.megatron.context_parallel_size))
    return changed


def cutting_sequences(config: RunConfig, models: RunModels, hardware: Hardware) -> Change | None:
    """The least context parallelism with which the plan fits, by itself or with activations made again.

    None where no size does, or none is allowed.
    """
    usable = usable_bytes(hardware)
    pools = set(excess(plan_pools(models), usable))
    for again in ({}, {key: value for one in recomputing(config, pools) for key, value in one.items()}):
        for settings in wider_cuts(config, pools):
            found = tried(config, None, settings | again, usable)
            if found is not None and not found.excess:
                return found.change
    return None


def wider_cuts(config: RunConfig, pools: set[str]) -> Iterator[dict[str, Any]]:
    """Settings of pools whose sequences are cut over 2, 4, 8 ... times as many ranks, as far as there are so many."""
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
    """Ranks that sequences are shared out among: those over which they could be cut further."""
    sizes = (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size, layout.context_parallel_size)
    return world_size // (sizes[0] * sizes[1] * sizes[2])
