"""A pool cut into replicas, each with processes, a world, a watch and a fate of its own.

    replica = cluster.replicated["rollout_pool"].replicas[0]
    rollout = replica.handle("rollout", Rollout)      # stays valid over restarts
    ready = wait_any([rollout.run_slice(...), other.run_slice(...)])
    ...                                               # get() raises WorkerFailure: that replica, and it alone, is gone
    starting = replica.restart()                      # returns at once; one more future for wait_any
    starting.get()

One thread drives all replicas: it alone uses them, their handles and futures. `ReplicatedPool.end` may be called from
any thread; the driving thread then gets `ClusterEnded` from whatever it waits for or calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from megatron_rl.cluster.failure_domain import FailureDomain
from megatron_rl.cluster.handle import HOST, Handle
from megatron_rl.cluster.leftovers import FATE, MARK, end, marked, variable_of
from megatron_rl.cluster.ranks import Ranks, ReplicaRanks
from megatron_rl.cluster.ray_pool import START_TIMEOUT_S, RayPool
from megatron_rl.cluster.waiting import PoolFuture
from megatron_rl.cluster.worker_process import ProcessInfo
from megatron_rl.errors import MegatronRLError, WorkerFailure

LEAVE_TIMEOUT_S = 5.0
"""A thread that waits for a killed replica leaves Ray at once, and one that waits for a lost Ray perhaps never."""

LEFTOVERS_S = 5.0
"""What the kernel cannot end in this time does not keep others waiting."""

Kind = TypeVar("Kind")
MakePool = Callable[[str, Ranks, FailureDomain], RayPool]
"""(name, ranks, fate) -> a pool that is not yet spawned."""


class ClusterEnded(WorkerFailure):
    """A replica was ended because the cluster was: nothing is wrong with the replica, and it cannot be restarted."""


class Replica:
    """Some consecutive ranks of a pool. number: among the replicas; name: the pool's and the number.

    make: of the pool that each start runs. numbered: as of `RayPool.begin`.
    """

    def __init__(
        self, name: str, number: int, ranks: ReplicaRanks, make: MakePool, numbered: list[ProcessInfo]
    ) -> None:
        self.name, self.number = name, number
        self.ranks = range(ranks.first, ranks.first + ranks.world_size)
        self.num_restarts = 0
        self._ranks, self._make, self._numbered = ranks, make, numbered
        self._changing = threading.Lock()
        self._over: MegatronRLError | None = None
        self._pool = self._new_pool()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank, each on its own node; [] while they come up."""
        return self._pool.pids

    @property
    def error(self) -> MegatronRLError | None:
        """What ended its present processes, as far as a call or a wait has noticed."""
        return self._pool.failure_domain.error

    def handle(self, role: str, kind: type[Kind]) -> Kind:
        """As `RayPool.handle`; after a restart its methods call the new processes."""
        return cast(Kind, Handle(kind, self._pool.targets(role), lambda *call: self._pool.submit(*call)))

    def host(self, kind: type[Kind]) -> Kind:
        """As `RayPool.host`, in the same way."""
        return self.handle(HOST, kind)

    def restart(self, timeout_s: float = START_TIMEOUT_S) -> PoolFuture[None]:
        """Kill what is left of the processes, begin to start others on the same ranks and construct their hosts.

        What is killed on this node, with all that the ranks had started there, is waited for: some 0.1 s. The start
        gets on while its future is waited for, alone or with others; what the hosts build comes after it, by their
        methods. Futures of earlier calls raise what ended the earlier processes. The future raises WorkerFailure when
        the replica is not there after `timeout_s`, as when the node is gone, and whatever a host's constructor raises;
        the replica may then be restarted again. Raises ClusterEnded.
        """
        self._end(f"the replica {self.name} was restarted")
        with self._changing:
            if self._over is None and self._ranks.is_lost:  # the main thread is about to end everything
                self._over = ClusterEnded(f"the replica {self.name} cannot be started again: Ray is gone")
            if self._over is not None:
                raise self._over.with_traceback(None)
            self._pool = pool = self._new_pool()
        self.num_restarts += 1
        pool.spawn()
        return self.begin(timeout_s)

    def raise_if_failed(self) -> None:
        """Raise, and end the processes, where a rank has failed or hangs that nobody waits for."""
        self._pool.failure_domain.raise_if_ended()
        self._pool.raise_if_failed()

    def spawn(self) -> None:
        """Begin to start the first processes."""
        self._pool.spawn()

    def wait_for_processes(self) -> list[ProcessInfo]:
        """As `RayPool.wait_for_processes`."""
        return self._pool.wait_for_processes()

    def begin(self, timeout_s: float = START_TIMEOUT_S) -> PoolFuture[None]:
        """The rest of a start after `spawn`."""
        return self._pool.begin(self._numbered, timeout_s)

    def stop(self, reason: str) -> None:
        """Kill the processes and wait for their end, as to give the replica up; later calls name the reason."""
        self._end(f"the replica {self.name} was stopped: {reason}")

    def kill(self, error: MegatronRLError) -> None:
        """Kill the processes, do not wait, and never start others; from any thread."""
        with self._changing:
            self._over = error
        self._pool.kill(error)

    def wait_until_gone(self) -> None:
        """After `kill`, from any thread: until the processes on this node are."""
        self._pool.shutdown()

    def wait_until_left(self, deadline: float) -> None:
        """After `kill`, from any thread: until no thread is in a call of Ray for it; deadline: a monotonic time."""
        self._pool.failure_domain.wait_until_left(max(0.0, deadline - time.monotonic()))

    def _end(self, reason: str) -> None:
        """Kill the processes, and on this node what they have started; reason: for later calls."""
        self._pool.shutdown(WorkerFailure(reason))
        mark = self._ranks.variables.get(MARK)
        if mark is not None:
            end(lambda: [one for one in marked(mark) if variable_of(one, FATE) == self.name], LEFTOVERS_S)

    def _new_pool(self) -> RayPool:
        return self._make(self.name, self._ranks, FailureDomain(named=True))


class ReplicatedPool:
    """All replicas of one pool. size: ranks of each. numbered: as of `RayPool.begin`, one for all pools.

    Raises ValueError where `size` does not divide the ranks.
    """

    def __init__(self, name: str, ranks: Ranks, size: int, make: MakePool, numbered: list[ProcessInfo]) -> None:
        if size < 1 or ranks.world_size % size:
            raise ValueError(f"replicas of {size} ranks do not divide the {ranks.world_size} ranks of pool {name}")
        self.name = name
        self.replicas = [
            Replica(f"{name}/{number}", number, ReplicaRanks(f"{name}/{number}", ranks, number, size), make, numbered)
            for number in range(ranks.world_size // size)
        ]

    def spawn(self) -> None:
        """Begin to start all processes."""
        for replica in self.replicas:
            replica.spawn()

    def wait_for_processes(self) -> list[ProcessInfo]:
        """Where all processes run, once they are up."""
        return [process for replica in self.replicas for process in replica.wait_for_processes()]

    def begin(self) -> Sequence[PoolFuture[None]]:
        """The rest of every replica's start."""
        return [replica.begin() for replica in self.replicas]

    def end(self, reason: MegatronRLError | None = None) -> None:
        """Kill all processes, whatever state they are in, and let no others start; from any thread, and repeatedly.

        Returns once the processes on this node are gone and no thread is in a call of Ray for a replica; threads have
        LEAVE_TIMEOUT_S to leave.
        """
        why = f", because {reason}" if reason is not None else ""
        for replica in self.replicas:
            replica.kill(ClusterEnded(f"the replica {replica.name} ended with its cluster{why}"))
        for replica in self.replicas:
            replica.wait_until_gone()
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for replica in self.replicas:
            replica.wait_until_left(deadline)
