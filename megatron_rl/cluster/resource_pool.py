"""Reserve ranks from Ray: for each a CPU, and a GPU on CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.cluster.ranks import Ranks
from megatron_rl.cluster.ray_session import JOIN_LIMIT_S, RaySession
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError

OWN_GPU_ONLY = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Where a node has it set to 1, Ray shows every process all GPUs, and each rank would use the first."""


class ResourcePool(Ranks):
    """`num_nodes * num_ranks_per_node` reserved ranks, numbered node by node; use it as a context manager.

    Each node's ranks are one bundle, kept together on one machine; Ray puts each bundle on a machine of its own while
    there are enough, and two on one that is large enough where there are not. `device_kind` is "cpu" or "cuda".
    nodes_key, ranks_key: the configuration keys of the two numbers. session: an entered session; None: a session of its
    own, which ends with the pool. others: pools that will be reserved too and must also have room. On leaving, the
    reservation is given back.
    """

    def __init__(
        self,
        num_nodes: int,
        num_ranks_per_node: int,
        device_kind: str,
        *,
        ready_timeout_s: float = 30.0,
        session: RaySession | None = None,
        nodes_key: str = "trainer.nnodes",
        ranks_key: str = "trainer.n_gpus_per_node",
        others: Sequence[PoolSize] = (),
    ) -> None:
        super().__init__(num_nodes * num_ranks_per_node, num_ranks_per_node, 0, num_ranks_per_node)
        self._size = PoolSize(num_nodes, num_ranks_per_node, nodes_key, ranks_key)
        self._others = list(others)
        self._bundle = {"CPU": 1.0, "GPU": 1.0} if device_kind == "cuda" else {"CPU": 1.0}
        self._ready_timeout_s = ready_timeout_s
        self._group: PlacementGroup | None = None
        self._given_session = session
        self._session = session or RaySession(self.world_size)
        self._open = ExitStack()

    def __enter__(self) -> ResourcePool:
        """Reserve the ranks. Raises ConfigError when the cluster does not have them within `ready_timeout_s`."""
        with ExitStack() as opened:
            if self._given_session is None:
                opened.enter_context(self._session)
            opened.callback(self._give_back)
            self._reserve()
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def device_index(self, rank: int) -> int:
        """0 on CUDA, where Ray shows each process its own GPU only, else the `local_rank`."""
        return 0 if "GPU" in self._bundle else self.local_rank(rank)

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options that place an actor on the bundle of `rank`; the pool must have been entered."""
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank // self.num_ranks_per_node
        )
        return {
            "scheduling_strategy": strategy,
            "num_cpus": self._bundle["CPU"],
            "num_gpus": self._bundle.get("GPU", 0),
        }

    @property
    def is_lost(self) -> bool:
        return self._session.is_lost

    @property
    def variables(self) -> dict[str, str]:
        return self._session.variables | (OWN_GPU_ONLY if "GPU" in self._bundle else {})

    def _reserve(self) -> None:
        """Raises ConfigError: soon where the cluster is too small, after a longer wait where it is occupied."""
        node = {kind: count * self.num_ranks_per_node for kind, count in self._bundle.items()}
        self._require_enough()
        self._group = placement_group([node] * self._size.num_nodes, strategy="SPREAD")
        if not self._group.wait(self._ready_timeout_s):
            raise ConfigError(
                f"the cluster cannot give {asked(self._size)} x [{listing(self._bundle)}] each within "
                f"{self._ready_timeout_s:g} s: it has [{listing(ray.cluster_resources())}] in all, "
                f"[{listing(ray.available_resources())}] free"
            )

    def _require_enough(self) -> None:
        """Wait until the cluster could hold the ranks if it were empty; nodes may still be joining."""
        deadline = time.monotonic() + min(JOIN_LIMIT_S, self._ready_timeout_s)
        while missing := self._shortage():
            if time.monotonic() > deadline:
                raise ConfigError(missing)
            time.sleep(0.5)

    def _shortage(self) -> str:
        living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return shortage(living, [self._size, *self._others], self._bundle)

    def _give_back(self) -> None:
        if self._group is not None and not self.is_lost:
            remove_placement_group(self._group)
        self._group = None


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
    beside = f" beside {', '.join(others)}" if others else ""
    nearest = f"{pool.nodes_key}={places}" if places else f"a smaller {pool.ranks_key}"
    return (
        f"the cluster cannot give {asked(pool)} x [{listing(rank)}] each{beside}: "
        f"its {len(nodes)} node(s) have [{have}], which is room for {places}; "
        f"nearest: {nearest}, or more nodes (`ray start --address=...` on each)"
    )


def listing(resources: Mapping[str, float]) -> str:
    """Name CPUs and GPUs in a message."""
    return ", ".join(f"{kind} {resources.get(kind, 0):g}" for kind in ("CPU", "GPU"))
