"""Ranks that a pool may run on: a whole reservation, or the consecutive ones of it that are one replica's."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_rl.cluster.leftovers import FATE


class Ranks(Protocol):
    """What a pool asks of the ranks that it runs on; they are numbered from 0 in its own world.

    num_ranks_per_node: consecutive ranks that are sure to be on one node.
    """

    num_ranks_per_node: int
    world_size: int

    def local_rank(self, rank: int) -> int:
        """Index of a rank among those of its world on its node."""

    def local_world_size(self, rank: int) -> int:
        """Ranks of its world on its node."""

    def device_index(self, rank: int) -> int:
        """Index of a rank's device among those its process sees."""

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options that place an actor on the reservation of `rank`."""

    @property
    def is_lost(self) -> bool:
        """Whether Ray itself is gone, so that no call into it would return."""

    @property
    def variables(self) -> dict[str, str]:
        """What every rank's environment must hold, on whichever machine it is."""


class ReplicaRanks:
    """Ranks [number * size, (number + 1) * size) of a reservation, as a world of their own.

    Their processes also find POOL_REPLICA (the number), POOL_REPLICAS (how many the reservation is cut into) and
    POOL_FIRST_RANK (its rank 0 among all ranks of the reservation) in their environment, and the replica's name under
    `leftovers.FATE`. Raises ValueError where the reservation has no such ranks.
    """

    def __init__(self, name: str, whole: Ranks, number: int, size: int) -> None:
        if size < 1 or whole.world_size % size or not 0 <= number < whole.world_size // size:
            raise ValueError(f"{whole.world_size} ranks have no replica {number} of {size} ranks each")
        self.world_size = size
        self.first = number * size
        self._name, self._whole, self._number = name, whole, number
        per_node = whole.num_ranks_per_node
        fits = per_node % size == 0 or size % per_node == 0
        self.num_ranks_per_node = min(size, per_node) if fits else 1

    def local_rank(self, rank: int) -> int:
        """As of `Ranks`."""
        return rank - self._on_node(rank).start

    def local_world_size(self, rank: int) -> int:
        """As of `Ranks`."""
        return len(self._on_node(rank))

    def device_index(self, rank: int) -> int:
        """As of `Ranks`: the reservation's where it gives each process its own device, else the `local_rank`."""
        return min(self._whole.device_index(self.first + rank), self.local_rank(rank))

    def actor_options(self, rank: int) -> dict[str, Any]:
        """As of `Ranks`."""
        return self._whole.actor_options(self.first + rank)

    @property
    def is_lost(self) -> bool:
        """As of `Ranks`."""
        return self._whole.is_lost

    @property
    def variables(self) -> dict[str, str]:
        """As of `Ranks`."""
        return self._whole.variables | {
            FATE: self._name,
            "POOL_REPLICA": str(self._number),
            "POOL_REPLICAS": str(self._whole.world_size // self.world_size),
            "POOL_FIRST_RANK": str(self.first),
        }

    def _on_node(self, rank: int) -> range:
        """The ranks of this world that are on the node of `rank`."""
        per_node = self._whole.num_ranks_per_node
        start = (self.first + rank) // per_node * per_node - self.first
        return range(max(0, start), min(self.world_size, start + per_node))
