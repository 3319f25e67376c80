"""Entering and leaving rollout mode in a rehearsal: all of the hybrid engine but vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine
from megatron_rl.hybrid_engine.offload import offloaded
from megatron_rl.parallel.rank_grid import rollout_grid
from megatron_rl.rehearse.memory_tracker import MemoryTracker
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import Role
from megatron_rl.roles.rollout import all_offloadable, shared_weights


class NoEngine:
    """A generator without a KV cache, which is vLLM's."""

    def wake(self) -> None:
        """Allocate nothing."""

    def sleep(self) -> None:
        """Release nothing."""


class PeakFromHere:
    """The last memory that is offloaded: none. What was there before is no part of the peak of an exchange."""

    def __init__(self, rank: Rank, memory: MemoryTracker) -> None:
        self._rank, self._memory = rank, memory

    def offload(self) -> None:
        """Begin to measure."""
        self._rank.device.reset_peak_memory()
        self._memory.begin()

    def reload(self) -> None:
        """Do nothing."""


def rehearsed_engine(spec: RoleSpec, rank: Rank, neighbours: Mapping[str, Role], memory: MemoryTracker) -> HybridEngine:
    """Make the hybrid engine of a rollout in the actor's pool, in the order of `Rollout`; in train mode.

    memory: of the device, whose peak begins again when all that leaves for generation has left.
    """
    offloadable = all_offloadable(neighbours)
    source, grid = rank.source(spec), rollout_grid(rank.groups.grid, spec.settings)
    with offloaded(offloadable):
        weights = shared_weights(cast("Actor", neighbours[ACTOR]), spec, rank, source, grid)
        weights.gather()
        weights.release()
    offloadable.append(PeakFromHere(rank, memory))
    return HybridEngine(weights, NoEngine(), rank.device, offloadable, spec.settings.verify_weights_every)
