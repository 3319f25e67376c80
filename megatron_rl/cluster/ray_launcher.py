"""Ranks of a Ray cluster: Ray, started or joined, and the reservations of the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.cluster.ray_ranks import RayRanks
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.config.roles import PoolSize


class RayLauncher(RaySession):
    """A session that starts ranks. device_kind: "cpu" or "cuda"; on CUDA each rank gets a GPU of its own."""

    def __init__(
        self, num_ranks: int, device_kind: str, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(num_ranks, modules, variables)
        self._device_kind = device_kind

    def reserve(self, size: PoolSize, others: Sequence[PoolSize] = ()) -> RayRanks:
        """Return the places, to be entered."""
        return RayRanks(size, self._device_kind, self, others=others)
