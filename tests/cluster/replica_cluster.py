"""A cluster of a training pool and replicas of toy workers, a thread that drives the replicas, and what is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
from launchers import LOCAL, make_launcher
from replica_worker import ROLE, ReplicaHost, Sampler

from megatron_rl.cluster.heartbeat import HeartbeatLimits
from megatron_rl.cluster.pool_options import Hosting
from megatron_rl.cluster.process_cluster import ProcessCluster
from megatron_rl.cluster.replicas import Replica
from megatron_rl.cluster.stale_processes import RUN_ID, living, processes_with
from megatron_rl.config.roles import PoolSize, PoolSpec

TRAIN, ROLLOUT = "train", "rollout_pool"
GONE_S = 60.0
"""Far more than it takes on a machine that has nothing else to do."""


def spec(name: str, num_ranks: int, num_nodes: int = 1) -> PoolSpec:
    """A pool whose only role is a `Sampler`."""
    role = SimpleNamespace(name=ROLE, phases={})
    return PoolSpec(name, PoolSize(num_nodes, num_ranks, f"{name}.nodes", f"{name}.ranks"), (role,))


def cluster_of(
    num_replicas: int,
    size: int,
    limits: HeartbeatLimits | None = None,
    slow: Path = Path("/nowhere"),
    num_nodes: int = 1,
    kind: str = LOCAL,
) -> ProcessCluster:
    """Replicas of `size` ranks, and one rank that trains; a host that is built while `slow` exists takes a minute.

    num_nodes: of the replicas, whose ranks are reserved first. kind: of launcher.
    """
    hosting = Hosting(
        ReplicaHost,
        (str(slow),),
        {ROLE: Sampler},
        "cpu",
        limits=limits or HeartbeatLimits(),
        replicated={ROLLOUT: size},
    )
    pools = [spec(ROLLOUT, num_replicas * size // num_nodes, num_nodes), spec(TRAIN, 1)]
    return ProcessCluster(make_launcher(kind, ["replica_worker"], num_replicas * size + 1), pools, hosting)


def trainer(cluster: ProcessCluster) -> Sampler:
    return cluster.pools[TRAIN].handle(ROLE, Sampler)


def replicas(cluster: ProcessCluster) -> list[Replica]:
    return cluster.replicated[ROLLOUT].replicas


def sampler(replica: Replica) -> Sampler:
    return replica.handle(ROLE, Sampler)


class Driver(threading.Thread):
    """Runs `body` and keeps what it returns or raises."""

    def __init__(self, body: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self.result: object = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._body()
        except BaseException as error:
            self.error = error

    def must_end_within(self, seconds: float) -> BaseException | None:
        """What it raised."""
        self.join(seconds)
        assert not self.is_alive(), "the thread still waits"
        return self.error


def are_gone(pids: list[int], seconds: float = GONE_S) -> bool:
    """Whether no process has one of these pids, after `seconds` at most."""
    return eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids), seconds)


def eventually(holds: Callable[[], bool], seconds: float = GONE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    """Not where it is dead, and its parent has not noticed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_id_of(pid: int) -> str:
    """The run_id of the run that a rank belongs to."""
    return psutil.Process(pid).environ()[RUN_ID]


def nothing_left(run_id: str) -> bool:
    """Whether no process of a run is left, after `GONE_S` at most."""
    return eventually(lambda: not living(processes_with(run_id)))
