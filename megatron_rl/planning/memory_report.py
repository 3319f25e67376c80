"""Does the memory plan fit a GPU, and what room does it leave for the KV cache and for longer sequences?"""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolders
from megatron_rl.config.keys import put
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.hybrid_engine.plan import IN_SLOTS
from megatron_rl.planning.cache_rules import KVCacheSize
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.memory import GEN, StageMemory, plan_pools
from megatron_rl.planning.preflight import read_models
from megatron_rl.planning.run_models import RunModels

FRAGMENTATION = 0.05
"""Share of a GPU's memory that an allocator cannot hand out, because free blocks are not contiguous."""
OF_GENERATION = ("actor parameters", "rollout weights", "received shards", "own codes", IN_SLOTS, "vLLM activations")
"""Tensors that `gpu_memory_utilization` counts in addition to the KV cache."""
MEMORY = "memory"


@dataclass(frozen=True)
class MemoryReport:
    """The memory plan of a run compared with one GPU model, which all pools use.

    pools: pool -> one rank of each pipeline stage.
    """

    hardware: Hardware
    pools: dict[str, list[StageMemory]]

    @property
    def usable(self) -> int:
        """Bytes of a GPU that tensors may take."""
        return usable_bytes(self.hardware)

    @property
    def stages(self) -> list[StageMemory]:
        """The stages of all pools."""
        return [stage for stages in self.pools.values() for stage in stages]

    @property
    def worst(self) -> StageMemory:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> int:
        """Peak bytes of the worst rank."""
        return self.worst.peak

    @property
    def fits(self) -> bool:
        """Whether every pool fits."""
        return self.peak <= self.usable

    @property
    def usable_text(self) -> str:
        """The bytes that tensors may take, in words."""
        return f"the {amount(self.usable)} that one {self.hardware.name} has for tensors"

    def where(self, pool: str) -> str:
        """Name a pool where there are several."""
        return f" of {pool}" if len(self.pools) > 1 else ""

    def largest_moment(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of everything on the worst rank at its peak, the largest first."""
        return sorted(self.worst.phases[self.worst.worst_phase].items(), key=lambda item: -item[1])

    def kinds(self, pool: str) -> dict[str, StageMemory]:
        """Return kind (only, first, middle, last) -> the stage of this kind with the highest peak."""
        worst: dict[str, StageMemory] = {}
        for stage in self.pools[pool]:
            if stage.kind not in worst or stage.peak > worst[stage.kind].peak:
                worst[stage.kind] = stage
        return worst

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, in bytes."""
        return {
            "hardware": self.hardware.name,
            "usable_bytes": self.usable,
            "peak_bytes": self.peak,
            "fits": self.fits,
            "stages": [{"pool": s.pool, "pp_rank": s.pp_rank, "kind": s.kind, "phases": s.phases} for s in self.stages],
        }


@dataclass(frozen=True)
class GenerationMemory(MemoryReport):
    """A memory report of a run that generates.

    kv_bytes: the configured cache. longest: tokens of the longest sequence. room_kv_bytes: the largest cache that fits
    in every phase that has one.
    """

    kv_cache: KVCacheSize
    kv_bytes: int
    longest: int
    room_kv_bytes: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the configured cache of a replica holds."""
        return self.kv_cache.num_tokens(self.kv_bytes)

    def tokens_of(self, mean_lengths: tuple[float, float]) -> int:
        """Tokens that it holds of half-generated sequences. mean_lengths: of prompt and response."""
        prompt, response = mean_lengths
        return self.kv_cache.num_tokens(self.kv_bytes, prompt + response / 2)

    @property
    def kv_sequences(self) -> int:
        """Sequences of full length that the configured cache of a replica holds at once."""
        return self.kv_cache.num_sequences(self.kv_bytes, self.longest)

    def as_json(self) -> dict[str, Any]:
        """Every number of the plan, in bytes, with the KV cache."""
        return super().as_json() | {
            "kv_cache": {
                "bytes": self.kv_bytes,
                "tokens": self.kv_tokens,
                "sequences": self.kv_sequences,
                "largest_bytes": self.room_kv_bytes,
                "largest_tokens": self.kv_cache.num_tokens(self.room_kv_bytes),
            },
        }


def amount(num_bytes: float) -> str:
    """Return bytes in GB, or below 0.1 GB in MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


def usable_bytes(hardware: Hardware) -> int:
    """Return the bytes of a GPU that tensors may take."""
    return int((hardware.memory_bytes - hardware.context_bytes) * (1 - FRAGMENTATION))


def memory_report(config: RunConfig, models: RunModels, hardware: Hardware) -> GenerationMemory:
    """Compare the memory plan of a run that generates with a GPU. The configuration must have passed preflight."""
    pools = plan_pools(models)
    kv_bytes = config.actor_rollout_ref.rollout.kv_cache_memory_bytes
    beside_cache = max(
        stage.total(phase) - kv_bytes
        for stage in pools[models.generating.spec.name]
        for phase in stage.phases
        if "KV cache" in stage.phases[phase]
    )
    actor = read_models(config, models.folders, config_only=True)[0][0]
    room = max(0, usable_bytes(hardware) - beside_cache)
    return GenerationMemory(hardware, pools, KVCacheSize.of(config, actor), kv_bytes, config.longest_sequence, room)


def with_kv_cache(
    config: RunConfig, hardware: Hardware, folders: ModelFolders | None = None, variant_of: RunModels | None = None
) -> RunConfig:
    """Return a copy in which `kv_cache_memory_bytes` replaces `gpu_memory_utilization`, where that is set on CUDA.

    The cache takes what weights and passes of generation leave of their share, at most what everything else on the
    rank leaves of the GPU, and at least enough for the longest sequence. The configuration must have passed preflight.
    folders, variant_of: as of `RunModels`.
    """
    changed = copy.deepcopy(config)
    rollout = changed.actor_rollout_ref.rollout
    share, rollout.gpu_memory_utilization = rollout.gpu_memory_utilization, None
    if share is None or config.trainer.device != "cuda":
        return changed
    models = RunModels(changed, folders, variant_of)
    report = memory_report(changed, models, hardware)
    phases = [stage.phases[GEN] for stage in report.pools[models.generating.spec.name]]
    held = max(sum(phase.get(name, 0) for name in OF_GENERATION) for phase in phases)
    wanted = min(int(share * hardware.memory_bytes) - held, report.room_kv_bytes)
    rollout.kv_cache_memory_bytes = max(wanted, report.kv_cache.needed_bytes(report.longest))
    return changed


@dataclass(frozen=True)
class LongestSequence:
    """tokens: of a prompt of `max_prompt_length` with its response; 0 where not even one token of a response fits.

    limited_by: what rules out one token more.
    """

    tokens: int
    limited_by: str


def longest_sequence(config: RunConfig, models: RunModels, memory: GenerationMemory) -> LongestSequence:
    """Find the longest sequence that this layout and cache allow. Passes with a token limit take one such sequence.

    The configuration must have passed preflight.
    """
    prompt = config.data.max_prompt_length
    limits = {"the KV cache": memory.kv_cache.num_tokens(memory.kv_bytes)} | position_limits(config, models)
    limited_by = min(limits, key=lambda name: limits[name])
    most = limits[limited_by]

    def fits(length: int) -> bool:
        pools = plan_pools(RunModels(with_longest(config, length), variant_of=models))
        return all(stage.peak <= memory.usable for stages in pools.values() for stage in stages)

    if most <= prompt:
        return LongestSequence(0, limited_by)
    if fits(most):
        return LongestSequence(most, limited_by)
    num_fitting = bisect_left(range(prompt + 1, most), True, key=lambda length: not fits(length))
    return LongestSequence(prompt + num_fitting if num_fitting else 0, MEMORY)


def position_limits(config: RunConfig, models: RunModels) -> dict[str, int]:
    """Return name of a limit -> most tokens of a sequence, for every model that reads the actor's tokens."""
    override = config.actor_rollout_ref.model.override_config.max_position_embeddings
    limits: dict[str, int] = {}
    for model in read_models(config, models.folders, config_only=True)[0]:
        of_model = ({"max_position_embeddings": override} if override is not None else model.longest) | model.windows
        limits |= {f"{name} of {model.path}": limit for name, limit in of_model.items()}
    return limits


def with_longest(config: RunConfig, length: int) -> RunConfig:
    """Return a copy with sequences of at most `length` tokens; passes with a token limit take one of them."""
    changed = copy.deepcopy(config)
    changed.data.max_response_length = length - config.data.max_prompt_length
    for role in Placement.of(config).megatron_roles:
        for pass_spec in role.passes:
            if pass_spec.max_tokens is not None:
                put(changed, pass_spec.key, -(-(pass_spec.longest or length) // role.megatron.context_parallel_size))
    return changed
