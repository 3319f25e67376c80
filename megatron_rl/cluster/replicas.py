"""A pool cut into replicas, each with its own processes, world, heartbeat monitor and failure domain.

    replica = cluster.replicated["rollout_pool"].replicas[0]
    rollout = replica.handle("rollout", Rollout)      # stays valid over restarts
    ready = wait_any([rollout.run_slice(...), other.run_slice(...)])
    ...                                               # get() raises WorkerFailure: that replica alone has failed
    starting = replica.restart()                      # returns at once; another future for wait_any
    starting.get()

Replicas of an elastic pool (`ElasticPool`) come and go: `leave` ends one and gives its places back, `ask_for_place`
asks for others, and `restart` starts it once `has_place`.

One thread drives all replicas: only it uses them, their handles and their futures. Any thread may call
`ReplicatedPool.end`; then `ClusterEnded` is raised in the driving thread by everything that it waits for or calls.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from megatron_rl.cluster.failures import FailureDomain
from megatron_rl.cluster.handle import HOST, Handle
from megatron_rl.cluster.launcher import ProcessInfo, Ranks
from megatron_rl.cluster.pool import START_TIMEOUT_S, ProcessPool, at_work
from megatron_rl.cluster.ranks import ReplicaRanks
from megatron_rl.cluster.stale_processes import REPLICA, end, processes_with, variable_of
from megatron_rl.cluster.waiting import PoolFuture
from megatron_rl.errors import MegatronRLError, WorkerFailure

LEFTOVERS_S = 5.0
"""Seconds to wait for killed processes that the kernel cannot end at once."""

Kind = TypeVar("Kind")
MakePool = Callable[[str, Ranks, FailureDomain], ProcessPool]
"""(name, ranks, failure domain) -> a pool that is not yet spawned."""


class ClusterEnded(WorkerFailure):
    """A replica ended because its cluster ended. The replica has no fault and cannot be restarted."""


class Replica:
    """Consecutive ranks of a pool. number: its index among the replicas; name: the pool's name and the number.

    pool: the pool of its present start. make: makes the pool of each start. numbered: see `ProcessPool.begin`. is_away:
    it has no processes: it has not been started, or has left.
    """

    def __init__(
        self, name: str, number: int, ranks: ReplicaRanks, make: MakePool, numbered: list[ProcessInfo]
    ) -> None:
        self.name, self.number = name, number
        first = ranks.number * ranks.world_size
        self.ranks = range(first, first + ranks.world_size)
        self.num_restarts = 0
        self.is_away = True
        self._ranks, self._make, self._numbered = ranks, make, numbered
        self._changing = threading.Lock()
        self._over: MegatronRLError | None = None
        self.pool = self._new_pool()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank, each on its own node; [] while they come up."""
        return self.pool.pids

    @property
    def error(self) -> MegatronRLError | None:
        """The error that ended its present processes; None until a call or a wait has noticed it."""
        return self.pool.failure_domain.error

    @property
    def hosts(self) -> set[str]:
        """Addresses of the nodes of its ranks; empty until they are up."""
        return {process.host for process in self.pool.processes.infos}

    @property
    def got_sigterm(self) -> bool:
        """Whether a process of it was given SIGTERM since its start; only where its ranks have DRAINS."""
        monitor = self.pool.monitor
        return monitor is not None and any(sign.got_sigterm for sign in monitor.signs.values())

    @property
    def has_place(self) -> bool:
        """Whether its places are there."""
        return self._ranks.is_given

    def ask_for_place(self) -> None:
        """Ask for places after `leave`; do not wait."""
        self._ranks.ask()

    def spawn(self) -> None:
        """Start the processes for the first time and do not wait."""
        self.is_away = False
        self.pool.spawn()

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        """Like `ProcessPool.handle`; after a restart its methods call the new processes."""
        return cast(Kind, Handle(kind, self.pool.targets(role), lambda *call: self.pool.submit(*call)))

    def host(self, kind: type[Kind]) -> Kind:
        return self.handle(HOST, kind)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> PoolFuture[None]:
        """Kill the processes, start others on the same ranks and construct their hosts; do not wait for the start.

        Waits some 0.1 s until the processes on this node, with all that they have started there, are gone. The start
        proceeds while its future is waited for, alone or with others. It constructs the hosts; later calls of their
        methods build the rest. Futures of earlier calls raise the error that ended the earlier processes. The future
        raises WorkerFailure when the replica is not up after `timeout_s`, as when its node is gone, and the error of a
        host's constructor; then the replica may be restarted again. Raises ClusterEnded.
        """
        self._end(f"the replica {self.name} was restarted")
        with self._changing:
            if self._over is None and self._ranks.is_lost:  # the main thread is about to end the cluster
                self._over = ClusterEnded(f"the replica {self.name} cannot be started again: Ray is gone")
            if self._over is not None:
                raise self._over.with_traceback(None)
            self.pool = pool = self._new_pool()
        self.num_restarts += 1
        self.is_away = False
        pool.spawn()
        return self.begin(timeout_s)

    def raise_if_failed(self) -> None:
        """Raise, and end the processes, if a rank has failed or hangs, also outside of a call that is waited for."""
        self.pool.failure_domain.raise_if_ended()
        self.pool.raise_if_failed()

    def begin(self, timeout_s: float = START_TIMEOUT_S) -> PoolFuture[None]:
        """Begin the rest of a start, once the pool is spawned."""
        return self.pool.begin(self._numbered, timeout_s)

    def stop(self, reason: str) -> None:
        """Kill the processes and wait for their end, to give the replica up; later calls name the reason."""
        self._end(f"the replica {self.name} was stopped: {reason}")

    def leave(self, reason: str) -> None:
        """Kill the processes, wait for their end and give their places back; `restart` may start it again."""
        self._end(f"the replica {self.name} has left: {reason}")
        self._ranks.give_back()
        self.is_away = True

    def kill(self, error: MegatronRLError) -> None:
        """Kill the processes, do not wait, and never start others; from any thread."""
        with self._changing:
            self._over = error
        self.pool.kill(error)

    def _end(self, reason: str) -> None:
        """Kill the processes, and all that they have started on this node; reason: for later calls."""
        self.pool.shutdown(WorkerFailure(reason))
        run_id = self._ranks.run_id
        end(lambda: [left for left in processes_with(run_id) if variable_of(left, REPLICA) == self.name], LEFTOVERS_S)

    def _new_pool(self) -> ProcessPool:
        return self._make(self.name, self._ranks, FailureDomain(named=True))


def parts_of(name: str, whole: Ranks, size: int) -> list[ReplicaRanks]:
    """Cut a reservation into replicas of `size` ranks. Raises ValueError where `size` does not divide it."""
    if size < 1 or whole.world_size % size:
        raise ValueError(f"replicas of {size} ranks do not divide the {whole.world_size} ranks of pool {name}")
    return [ReplicaRanks(f"{name}/{number}", whole, number, size) for number in range(whole.world_size // size)]


class ReplicatedPool:
    """All replicas of one pool. numbered: see `ProcessPool.begin`; all pools share the list."""

    def __init__(self, name: str, parts: Sequence[ReplicaRanks], make: MakePool, numbered: list[ProcessInfo]) -> None:
        self.name = name
        self.replicas = [Replica(f"{name}/{part.number}", part.number, part, make, numbered) for part in parts]

    def spawn(self) -> None:
        """Start the processes of all replicas that have their places, and do not wait."""
        for replica in self.replicas:
            if replica.has_place:
                replica.spawn()

    def wait_for_processes(self) -> list[ProcessInfo]:
        """Wait until all processes are up; return where they run."""
        return [process for replica in self._started for process in replica.pool.wait_for_processes()]

    def begin(self) -> Sequence[PoolFuture[None]]:
        """Begin the rest of every replica's start."""
        return [replica.begin() for replica in self._started]

    @property
    def _started(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.is_away]

    def at_work(self) -> str:
        """Return what the replicas are doing, as `pool.at_work`; replicas that do the same are counted."""
        texts = Counter(text for replica in self._started if (text := at_work(replica.pool)))
        return ", ".join(text if number == 1 else f"{number} x {text}" for text, number in texts.items())

    def end(self, reason: MegatronRLError | None = None) -> None:
        """Kill all processes in whatever state they are, and start no others; from any thread, and repeatedly.

        Returns once the processes are gone, or after some 10 s for each replica where they do not end.
        """
        why = f", because {reason}" if reason is not None else ""
        for replica in self.replicas:
            replica.kill(ClusterEnded(f"the replica {replica.name} ended with its cluster{why}"))
        for replica in self.replicas:
            replica.pool.shutdown()
