"""Ranks of a Ray cluster: for each a CPU, and a GPU on CUDA; an agent on each node starts them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megatron_rl.cluster.agent_route import AgentRoute, Shared
from megatron_rl.cluster.launcher import RankProcess, Ranks
from megatron_rl.cluster.left_out_gpus import LeftOutGpus
from megatron_rl.cluster.loading import import_path
from megatron_rl.cluster.node_agent import NodeAgent
from megatron_rl.cluster.own_node import OwnNodeRoute
from megatron_rl.cluster.ray_remote_columns import wanted_of
from megatron_rl.cluster.ray_session import JOIN_LIMIT_S, RaySession
from megatron_rl.cluster.stale_processes import RUN_ID
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError
from megatron_rl.remote_columns import RemoteColumn

READY_LIMIT_S = 30.0
"""Seconds for the cluster to give a reservation that fits it; another run may be about to end."""

GIVEN_LIMIT_S = 0.1
"""Seconds to ask whether a reservation is there; Ray may not answer at once."""

OWN_GPU_ONLY = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Where a node has it set to 1, Ray shows every process all GPUs, and each rank would use the first."""

ANSWER_LIMIT_S = 5.0
"""Seconds in which agents list the segments of their nodes; a node that takes longer does not answer yet."""


class RayLauncher(RaySession):
    """A session that starts ranks. device_kind: "cpu" or "cuda"; on CUDA each rank gets a GPU of its own.

    left_out: GPUs that no rank gets.
    """

    may_grow = True

    def __init__(
        self, num_ranks: int, device_kind: str, modules: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(num_ranks, modules, variables)
        self._device_kind = device_kind
        self._holders: dict[str, ActorHandle] = {}
        self._asked: dict[str, ObjectRef] = {}  # replies that are late
        self.left_out = LeftOutGpus(OWN_GPU_ONLY | {"PYTHONPATH": import_path()})

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
        return shortage(self.left_out.without([*alive.values()]), sizes, needs_of(self._device_kind))

    def leave_out(self, node: str, gpu: str) -> None:
        """Give a GPU to no rank from now on."""
        self.left_out.hold(node, gpu)

    def take_back(self) -> None:
        """Give ranks the GPUs again that were left out."""
        self.left_out.give_back()

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


class RayRanks(Ranks):
    """`size.world_size` reserved ranks, numbered node by node; use it as a context manager.

    Each node's ranks are one bundle, kept together on one machine; Ray puts each bundle on a machine of its own while
    there are enough, and two on one that is large enough where there are not. `device_kind` is "cpu" or "cuda".
    session: an entered session. others: pools that will be reserved too and must also have room. On leaving, the agents
    are killed, with all their ranks, and the reservation is given back.
    """

    def __init__(
        self,
        size: PoolSize,
        device_kind: str,
        session: RayLauncher,
        *,
        others: Sequence[PoolSize] = (),
    ) -> None:
        num_ranks_per_node = size.num_ranks_per_node
        super().__init__(size.num_nodes * num_ranks_per_node, num_ranks_per_node, 0, num_ranks_per_node)
        self._size, self._others = size, list(others)
        self._bundle = needs_of(device_kind)
        self._session = session
        self._group: PlacementGroup | None = None
        self._was_given = False
        self._routes: dict[int, AgentRoute | OwnNodeRoute] = {}

    def __enter__(self) -> RayRanks:
        """Reserve the ranks. Raises ConfigError when the cluster does not have them within READY_LIMIT_S."""
        try:
            self._reserve()
        except BaseException:
            self.give_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def ask(self) -> None:
        self._was_given = False
        node = {kind: count * self.num_ranks_per_node for kind, count in self._bundle.items()}
        self._group = placement_group([node] * self._size.num_nodes, strategy="SPREAD")

    @property
    def is_given(self) -> bool:
        if not self._was_given and self._group is not None and not self.is_lost:
            self._was_given = bool(self._group.wait(GIVEN_LIMIT_S))
        return self._was_given

    def give_back(self) -> None:
        routes, self._routes = self._routes, {}
        for route in routes.values():
            route.end()
        if not self.is_lost and ray.is_initialized():
            for route in routes.values():
                self._session.held.forget(route.agent)
                ray.kill(route.agent)
            if self._group is not None:
                remove_placement_group(self._group)
        self._group, self._was_given = None, False

    def device_index(self, rank: int) -> int:
        """0 on CUDA, where each process sees its own GPU only, else the `local_rank`."""
        return 0 if "GPU" in self._bundle else self.local_rank(rank)

    def start(self, rank: int, variables: Mapping[str, str]) -> RankProcess:
        """The pool must have been entered."""
        return self._route(rank // self.num_ranks_per_node).start(self.local_rank(rank), dict(variables))

    def share(self, message: bytes, held: Sequence[RemoteColumn] = ()) -> Shared:
        self._session.held.remove_freed()
        return Shared(message, wanted_of(held))

    @property
    def address(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    @property
    def is_lost(self) -> bool:
        return self._session.is_lost

    @property
    def run_id(self) -> str:
        return self._session.run_id

    def _route(self, node: int) -> AgentRoute | OwnNodeRoute:
        """Return the way to the ranks of a node's bundle, whose GPUs an agent holds."""
        if node not in self._routes:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            own_gpu = OWN_GPU_ONLY if "GPU" in self._bundle else {}
            num_gpus = self._bundle.get("GPU", 0) * self.num_ranks_per_node
            agent = make_agent(self._session, strategy, num_gpus, own_gpu)
            lost = partial(self._forget, node, agent)
            if self._session.is_alone:
                self._routes[node] = OwnNodeRoute(agent, self._session, num_gpus > 0, lost)
            else:
                self._routes[node] = AgentRoute(agent, self._session, lost)
        return self._routes[node]

    def _forget(self, node: int, agent: ActorHandle) -> None:
        """Have the next start on a node make an agent again, as this one is gone."""
        self._session.held.forget(agent)
        if node in self._routes and self._routes[node].agent is agent:
            del self._routes[node]

    def _reserve(self) -> None:
        """Raises ConfigError: soon where the cluster is too small, after a longer wait where it is occupied."""
        self._require_enough()
        self.ask()
        self._was_given = self._group is not None and bool(self._group.wait(READY_LIMIT_S))
        if not self._was_given:
            raise ConfigError(
                f"the cluster cannot give {asked(self._size)} x [{listing(self._bundle)}] each within "
                f"{READY_LIMIT_S:g} s: it has [{listing(ray.cluster_resources())}] in all, "
                f"[{listing(ray.available_resources())}] free",
                is_shortage=True,
            )

    def _require_enough(self) -> None:
        """Wait until the cluster could hold the ranks if it were empty; nodes may still be joining."""
        deadline = time.monotonic() + JOIN_LIMIT_S
        while missing := self._shortage():
            if time.monotonic() > deadline:
                raise ConfigError(missing, is_shortage=True)
            time.sleep(0.5)

    def _shortage(self) -> str:
        living = self._session.left_out.without(living_nodes())
        return shortage(living, [self._size, *self._others], self._bundle)


def make_agent(
    session: RaySession, strategy: Any, num_gpus: float = 0, variables: Mapping[str, str] | None = None
) -> ActorHandle:
    """Start an agent where `strategy` puts it. num_gpus: that its ranks use. variables: of its environment."""
    options = {
        "scheduling_strategy": strategy,
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "max_restarts": 0,
        "runtime_env": {"env_vars": {"PYTHONPATH": import_path(), RUN_ID: session.run_id, **(variables or {})}},
    }
    agent = ray.remote(NodeAgent).options(**options)
    return agent.remote(session.run_id, session.modules, session.import_variables, session.is_own)


def needs_of(device_kind: str) -> dict[str, float]:
    """Return resource -> amount that one rank needs."""
    return {"CPU": 1.0, "GPU": 1.0} if device_kind == "cuda" else {"CPU": 1.0}


def living_nodes() -> list[dict[str, Any]]:
    """Return every node of the cluster that Ray counts as alive, as `ray.nodes` does."""
    return [node for node in ray.nodes() if node["Alive"]]


def asked(size: PoolSize) -> str:
    """Name a pool's ranks in a message."""
    return f"{size.nodes_key}={size.num_nodes} node(s) with {size.ranks_key}={size.num_ranks_per_node}"


def shortage(nodes: Iterable[Mapping[str, float]], pools: Sequence[PoolSize], rank: Mapping[str, float]) -> str:
    """Return the message when living nodes have no room for all pools at once, else "".

    nodes: resource -> total amount, of each node. rank: resource -> amount that one rank needs. Larger groups are
    placed first, each on the fullest node that still has room.
    """
    nodes = list(nodes)
    room = [min(int(node.get(kind, 0) // count) for kind, count in rank.items()) for node in nodes]
    placed = [0] * len(pools)
    for number, pool in sorted(enumerate(pools), key=lambda pair: -pair[1].num_ranks_per_node):
        for _ in range(pool.num_nodes):
            fitting = [node for node, free in enumerate(room) if free >= pool.num_ranks_per_node]
            if not fitting:
                break
            room[min(fitting, key=lambda node: room[node])] -= pool.num_ranks_per_node
            placed[number] += 1
    lacking = [number for number, pool in enumerate(pools) if placed[number] < pool.num_nodes]
    if not lacking:
        return ""
    have = "; ".join(listing(node) for node in nodes) or "none"
    places, pool = placed[lacking[0]], pools[lacking[0]]
    others = [asked(other) for number, other in enumerate(pools) if number != lacking[0]]
    beside = f" in addition to {', '.join(others)}" if others else ""
    nearest = f"{pool.nodes_key}={places}" if places else f"a smaller {pool.ranks_key}"
    return (
        f"the cluster cannot give {asked(pool)} x [{listing(rank)}] each{beside}: "
        f"its {len(nodes)} node(s) have [{have}], which is room for {places}; "
        f"try: {nearest}, or more nodes (`ray start --address=...` on each)"
    )


def listing(resources: Mapping[str, float]) -> str:
    """Name CPUs and GPUs in a message."""
    return ", ".join(f"{kind} {resources.get(kind, 0):g}" for kind in ("CPU", "GPU"))
