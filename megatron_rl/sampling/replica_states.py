"""The replicas of the rollout pool as the driver's thread sees each: generating, starting, waiting, or given up."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.cluster.replicas import ClusterEnded, Replica
from megatron_rl.cluster.waiting import PoolFuture
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.errors import MegatronRLError, WorkerFailure
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.rollout import Rollout


class State(enum.Enum):
    """GENERATING: has weights and runs slices. STARTING: its processes start and build the engine. JOINING: waits for
    weights. GONE: is given up.
    """

    GENERATING = enum.auto()
    STARTING = enum.auto()
    JOINING = enum.auto()
    GONE = enum.auto()


@dataclass
class ReplicaSlot:
    """One replica. is_busy: a slice is running. is_paused: it gets no slices, because all ranks are to connect.

    last_version: the version of its last slice since it started; None before the first.
    """

    number: int
    replica: Replica
    rollout: Rollout
    host: RankHost
    state: State = State.STARTING
    is_busy: bool = False
    is_paused: bool = False
    last_version: int | None = None

    @property
    def is_present(self) -> bool:
        """Whether it can be called."""
        return self.state in (State.GENERATING, State.JOINING)

    @property
    def num_ranks(self) -> int:
        return len(self.replica.ranks)


class ReplicaSlots:
    """All replicas. max_restarts: of each replica. say: prints a line, from any thread."""

    def __init__(self, replicas: Sequence[Replica], max_restarts: int, say: Callable[[str], None]) -> None:
        self.all = [
            ReplicaSlot(number, replica, replica.handle(ROLLOUT, Rollout), replica.host(RankHost))
            for number, replica in enumerate(replicas)
        ]
        self.num_lost = 0
        self._max_restarts, self._say = max_restarts, say

    @property
    def generating(self) -> list[ReplicaSlot]:
        """Replicas that run slices."""
        return [slot for slot in self.all if slot.state is State.GENERATING]

    @property
    def joining(self) -> list[ReplicaSlot]:
        """Started replicas that wait for weights."""
        return [slot for slot in self.all if slot.state is State.JOINING]

    @property
    def present(self) -> list[ReplicaSlot]:
        """Replicas that can be called."""
        return [slot for slot in self.all if slot.is_present]

    def lost(self, slot: ReplicaSlot, error: MegatronRLError) -> PoolFuture[None] | None:
        """Restart a failed replica; None if it is given up. Raises ClusterEnded, and WorkerFailure if none is left."""
        if isinstance(error, ClusterEnded):
            raise error
        self.num_lost += 1
        slot.is_busy = False
        slot.last_version = None
        name, num_restarts = slot.replica.name, slot.replica.num_restarts
        if num_restarts < self._max_restarts:
            slot.state = State.STARTING
            self._say(f"the rollout replica {name} failed and starts again, others go on: {error}")
            return slot.replica.restart()
        slot.state = State.GONE
        slot.replica.stop("it failed too often")
        self._say(f"the rollout replica {name} failed again after {num_restarts} restarts and stays away: {error}")
        if all(slot.state is State.GONE for slot in self.all):
            raise WorkerFailure(
                f"no rollout replica is left, each was restarted {self._max_restarts} times; the last: {error}",
                is_loss=True,
            )
        return None
