"""Ranks reserved from Ray: for each a CPU, and a GPU where there are any."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.cluster.ray_server import JOIN_LIMIT_S, asked, listing, shortage
from megatron_rl.cluster.ray_session import RaySession
from megatron_rl.config.roles import PoolSize
from megatron_rl.errors import ConfigError

OWN_GPU_ONLY = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Where a node has it set to 1, Ray shows every process all GPUs, and each rank would take the first for its own."""


class ResourcePool:
    """`num_nodes * num_ranks_per_node` reserved ranks, numbered node by node; use it as a context manager.

    Each node's ranks are one bundle, kept together on one machine; Ray puts each bundle on a machine of its own while
    there are enough, and two on one that is large enough where there are not. `device_kind` is "cpu" or "cuda".
    nodes_key, ranks_key: the keys of the configuration that say how many there are. session: an entered one; None: one
    of its own, which ends with the pool. beside: what else will be reserved there, and must also have room. On leaving,
    the reservation is given back.
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
        beside: Sequence[PoolSize] = (),
    ) -> None:
        self.num_ranks_per_node = num_ranks_per_node
        self.world_size = num_nodes * num_ranks_per_node
        self._size = PoolSize(num_nodes, num_ranks_per_node, nodes_key, ranks_key)
        self._beside = list(beside)
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

    def local_rank(self, rank: int) -> int:
        """Index of a rank on its node."""
        return rank % self.num_ranks_per_node

    def local_world_size(self, rank: int) -> int:
        """Ranks on the node of `rank`."""
        return self.num_ranks_per_node

    def device_index(self, rank: int) -> int:
        """Index of a rank's device among those its process sees: Ray shows each process its own GPU only."""
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
        """Whether Ray itself is gone, so that no call into it would return."""
        return self._session.is_lost

    @property
    def variables(self) -> dict[str, str]:
        """What every rank's environment must hold, on whichever machine it is."""
        return self._session.variables | (OWN_GPU_ONLY if "GPU" in self._bundle else {})

    def _reserve(self) -> None:
        """Raises ConfigError: soon where the cluster is too small, and after a longer wait where it is occupied."""
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
        """Wait until the cluster could hold the ranks if nobody else were there; nodes may still be joining."""
        deadline = time.monotonic() + min(JOIN_LIMIT_S, self._ready_timeout_s)
        while missing := self._shortage():
            if time.monotonic() > deadline:
                raise ConfigError(missing)
            time.sleep(0.5)

    def _shortage(self) -> str:
        living = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return shortage(living, [self._size, *self._beside], self._bundle)

    def _give_back(self) -> None:
        if self._group is not None and not self.is_lost:
            remove_placement_group(self._group)
        self._group = None
