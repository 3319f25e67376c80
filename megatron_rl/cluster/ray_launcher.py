"""Ranks of a Ray cluster: Ray, started or joined, and the reservations of the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_rl.cluster.ray_ranks import RayRanks, living_nodes, make_agent, needs_of, shortage
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.config.roles import PoolSize

ANSWER_LIMIT_S = 5.0
"""Seconds in which agents list the segments of their nodes; a node that takes longer does not answer yet."""


class RayLauncher(RaySession):
    """A session that starts ranks. device_kind: "cpu" or "cuda"; on CUDA each rank gets a GPU of its own."""

    def __init__(
        self, num_ranks: int, device_kind: str, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(num_ranks, modules, variables)
        self._device_kind = device_kind
        self._holders: dict[str, ActorHandle] = {}
        self._asked: dict[str, ObjectRef] = {}  # replies that are late

    def reserve(self, size: PoolSize, others: Sequence[PoolSize] = ()) -> RayRanks:
        """Return the places, to be entered."""
        return RayRanks(size, self._device_kind, self, others=others)

    def ask(self, size: PoolSize) -> RayRanks:
        """Ask Ray for the places, which it, or its autoscaler, may have later."""
        ranks = RayRanks(size, self._device_kind, self)
        ranks.ask()
        return ranks

    def shortage(self, sizes: Sequence[PoolSize]) -> str:
        """Return a message when living nodes have no room for pools of these sizes, were they empty, else "".

        A node that had ranks must answer: Ray continues giving ranks to a lost node until it has noticed the loss.
        """
        self.hold_nodes()
        answering = self.segments().keys()
        alive = {node["NodeID"]: node for node in living_nodes()}
        if silent := sorted((self._nodes_of_ranks & alive.keys()) - answering):
            return f"node {alive[silent[0]]['NodeManagerAddress']} does not respond, and Ray still counts it as alive"
        return shortage([node["Resources"] for node in alive.values()], sizes, needs_of(self._device_kind))

    def hold_nodes(self) -> None:
        """Keep the run's segments on every node that had ranks until the launcher is left, also without ranks."""
        for node in self._nodes_of_ranks - self._holders.keys():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            self._holders[node] = make_agent(self, strategy)
            self.held.note(node, self._holders[node])

    def segments(self) -> dict[str, list[str]]:
        """Return node -> names of the run's segments; of nodes that `hold_nodes` named and that reply."""
        asked = {node: self._asked.pop(node, None) or agent.segments.remote() for node, agent in self._holders.items()}
        if asked:
            ray.wait([*asked.values()], num_returns=len(asked), timeout=ANSWER_LIMIT_S)
        listed = {}
        for node, answer in asked.items():
            try:
                listed[node] = ray.get(answer, timeout=0)
            except GetTimeoutError:
                self._asked[node] = answer  # its agent may be starting on a busy machine
            except RayError:
                self.held.forget(self._holders.pop(node))
        return listed
