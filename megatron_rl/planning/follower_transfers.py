"""Weights of a policy on their way to roles of other pools that follow it: bytes, memory and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rl.config.roles import Following, RoleSpec
from megatron_rl.hybrid_engine.plan import aligned
from megatron_rl.parallel.sharding import Shard, box_numel, shard_of
from megatron_rl.planning.hardware import Hardware
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.time import LINK_EFFICIENCY
from megatron_rl.planning.transition import bias_bytes, numel_of
from megatron_rl.planning.weights import TrainedWeights


@dataclass(frozen=True)
class FollowerTransfer:
    """The transfer to one role. weights: those that arrive, in the role's layout: all of the model, or adapters alone.
    element: bytes of one of the policy's. biases: bytes of the biases of experts, which every rank receives.
    """

    role: RoleSpec
    follows: Following
    weights: TrainedWeights
    element: int
    biases: int
    num_senders: int

    @classmethod
    def of(cls, models: RunModels, role: RoleSpec) -> FollowerTransfer:
        """Count for a role that follows the policy."""
        assert role.follows is not None
        ledger = models.pools[role.pool].ledger(role)
        weights = ledger.weights if ledger.adapters else ledger.base
        senders = models.training.spec.world_size
        return cls(role, role.follows, weights, models.element, bias_bytes(models), senders)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Bytes that each rank of the role's pool receives."""
        grid, sizes = self.weights.grid, dict[object, int]()
        for rank in range(grid.world_size):
            key = self._key(rank)
            if key not in sizes:
                parts = [part for shard in self._shards(rank) for part in shard.parts]
                sizes[key] = sum(box_numel(part.box) for part in parts) * self.element + self.biases
        return tuple(sizes[self._key(rank)] for rank in range(grid.world_size))

    @cached_property
    def model_bytes(self) -> int:
        """Bytes that leave the policy's pool."""
        return numel_of(self.weights.params.specs) * self.element + self.biases

    def arriving_bytes(self, pp_rank: int) -> int:
        """Return the bytes of the memory in which weights arrive on a rank of a stage."""
        shards = self._shards(pp_rank * self.weights.grid.stage_size)
        return sum(aligned(shard.numel) for shard in shards) * self.element

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the transfer, on average over the steps. Pools are assumed to have their own machines;
        sending, receiving and passing on overlap.
        """
        most = max(*self.received, -(-self.model_bytes // self.num_senders))
        spent = most / hardware.network_bandwidth / LINK_EFFICIENCY + hardware.overheads.transition
        return spent / self.follows.every

    def as_json(self) -> dict[str, Any]:
        """Every number."""
        return {
            "role": self.role.name,
            "every": self.follows.every,
            "model_bytes": self.model_bytes,
            "received_bytes_per_rank": list(self.received),
        }

    def _key(self, rank: int) -> object:
        """Ranks with equal keys receive the same."""
        grid = self.weights.grid
        return grid.pp_rank(rank), grid.place(rank, self.weights.vocab_multiple)

    def _shards(self, rank: int) -> list[Shard]:
        """Return the shards that a rank of the role's pool receives, each tensor's once."""
        weights = self.weights
        place = weights.grid.place(rank, weights.vocab_multiple)
        tensors = (weights.params.specs[name].tensor for name in weights.names(weights.grid.pp_rank(rank)))
        return [shard_of(tensor, place) for tensor in {tensor.name: tensor for tensor in tensors}.values()]


def follower_transfers(models: RunModels) -> list[FollowerTransfer]:
    """Return the transfer to each role of another pool that follows the policy."""
    return [FollowerTransfer.of(models, role) for role in models.placement.followers]
