"""A pool of ranks reserved from Ray: for each a CPU, and a GPU where there are any.

Ray is started on this machine, or joined where the environment variable RAY_ADDRESS names a running cluster.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megatron_rl.cluster import ray_cluster
from megatron_rl.cluster.daemons import DaemonWatch
from megatron_rl.cluster.daemons import children as daemon_children
from megatron_rl.cluster.leftovers import MARK, end, marked
from megatron_rl.cluster.ray_cluster import JOIN_LIMIT_S, listing, shortage
from megatron_rl.cluster.reaper import Reaper
from megatron_rl.errors import ConfigError, RewardError, StoppedAfterStep, StoppedBeforeStep, WorkerFailure

_NO_FAULT_OF_PROCESSES = (ConfigError, RewardError, StoppedAfterStep, StoppedBeforeStep)
"""Errors after which nobody looks for the reason in the logs of Ray's processes."""


class ResourcePool:
    """`num_nodes * num_ranks_per_node` reserved ranks, numbered node by node; use it as a context manager.

    Each node's ranks are one bundle, kept together on one machine; Ray puts each bundle on a machine of its own while
    there are enough, and two on one that is large enough where there are not. `device_kind` is "cpu" or "cuda". On
    leaving, the reservation is given back and Ray is shut down, unless it was already initialised in this process
    before.
    """

    def __init__(
        self, num_nodes: int, num_ranks_per_node: int, device_kind: str, *, ready_timeout_s: float = 30.0
    ) -> None:
        self.num_ranks_per_node = num_ranks_per_node
        self.world_size = num_nodes * num_ranks_per_node
        self._num_nodes = num_nodes
        self._bundle = {"CPU": 1.0, "GPU": 1.0} if device_kind == "cuda" else {"CPU": 1.0}
        self._ready_timeout_s = ready_timeout_s
        self._group: PlacementGroup | None = None
        self._reaper: Reaper | None = None  # present when this pool started or joined Ray, and so is the watch
        self._watch: DaemonWatch | None = None

    def __enter__(self) -> ResourcePool:
        """Reserve the ranks. Raises ConfigError when the cluster does not have them within `ready_timeout_s`."""
        try:
            if not ray.is_initialized():
                self._start_ray()
            self._reserve()
        except BaseException as error:
            self._release(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(error)

    def local_rank(self, rank: int) -> int:
        """Index of a rank on its node."""
        return rank % self.num_ranks_per_node

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
        return self._watch is not None and self._watch.lost != ""

    @property
    def variables(self) -> dict[str, str]:
        """What every rank's environment must hold, on whichever machine it is."""
        return {MARK: self._reaper.scratch.mark} if self._reaper is not None else {}

    def _start_ray(self) -> None:
        address = os.environ.get("RAY_ADDRESS") or "local"
        self._reaper = Reaper()
        with self._reaper.marking():
            if address == "local":
                # One CPU per rank, however many there are: ranks on CPU take turns on the cores this machine has.
                ray_cluster.start(self.world_size, self._reaper.scratch.ray_folder)
                daemons, server = daemon_children(), None
            else:
                daemons, server = ray_cluster.join(address)
        self._watch = DaemonWatch(daemons, server, self._kill_marked)

    def _kill_marked(self) -> None:
        end(lambda: marked(self._reaper.scratch.mark), patience_s=0.0)

    def _reserve(self) -> None:
        """Raises ConfigError: soon where the cluster is too small, and after a longer wait where it is occupied."""
        node = {kind: count * self.num_ranks_per_node for kind, count in self._bundle.items()}
        self._require_enough()
        self._group = placement_group([node] * self._num_nodes, strategy="SPREAD")
        if not self._group.wait(self._ready_timeout_s):
            raise ConfigError(
                f"the cluster cannot give {self._num_nodes} node(s) with {self.num_ranks_per_node} x "
                f"[{listing(self._bundle)}] each within {self._ready_timeout_s:g} s: it has "
                f"[{listing(ray.cluster_resources())}] in all, [{listing(ray.available_resources())}] free"
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
        return shortage(living, self._num_nodes, self.num_ranks_per_node, self._bundle)

    def _release(self, error: BaseException | None) -> None:
        """Give everything back. Raises WorkerFailure where Ray itself was lost, as nothing else can then be true."""
        lost = self._watch.stop() if self._watch is not None else ""
        self._watch = None
        if self._group is not None and not lost:
            remove_placement_group(self._group)
        self._group = None
        if self._reaper is not None:
            if not lost:
                ray.shutdown()
            self._reaper.stop(clean=not isinstance(error, Exception) or isinstance(error, _NO_FAULT_OF_PROCESSES))
            self._reaper = None
        if lost:
            atexit.register(_exit_without_ray)
            raise WorkerFailure(lost) from None


def _exit_without_ray() -> None:
    """End this process before Ray's own exit handler does, which waits a minute for its server and then aborts."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(WorkerFailure.exit_code)
