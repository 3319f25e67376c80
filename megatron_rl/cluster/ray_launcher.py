"""Ranks of a Ray cluster: Ray, started or joined, and the reservations of the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.ray_ranks import RayRanks, living_nodes, make_agent, needs_of, shortage
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.config.roles import PoolSize

ANSWER_LIMIT_S = 20.0
"""Seconds for an agent to list a node's segments; a node that takes longer counts as lost."""


class RayLauncher(RaySession):
    """A session that starts ranks. device_kind: "cpu" or "cuda"; on CUDA each rank gets a GPU of its own."""

    def __init__(
        self, num_ranks: int, device_kind: str, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(num_ranks, modules, variables)
        self._device_kind = device_kind
        self._holders: dict[str, ActorHandle] = {}

    def reserve(self, size: PoolSize, others: Sequence[PoolSize] = ()) -> RayRanks:
        """Return the places, to be entered."""
        return RayRanks(size, self._device_kind, self, others=others)

    def shortage(self, sizes: Sequence[PoolSize]) -> str:
        """Return a message when living nodes have no room for pools of these sizes, were they empty, else ""."""
        return shortage(living_nodes(), sizes, needs_of(self._device_kind))

    def hold_nodes(self) -> None:
        """Keep the run's segments on every node that had ranks: an agent without ranks holds its supervisor."""
        for node in self._nodes_of_ranks - self._holders.keys():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._holders[node] = make_agent(self, strategy)

    def segments(self) -> dict[str, list[str]]:
        """Return node -> names of the run's segments; of nodes that `hold_nodes` named and that live."""
        asked = {node: agent.segments.remote() for node, agent in self._holders.items()}
        listed = {}
        for node, answer in asked.items():
            try:
                listed[node] = ray.get(answer, timeout=ANSWER_LIMIT_S)
            except RayError:
                del self._holders[node]
        return listed
