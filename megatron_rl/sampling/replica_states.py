"""The replicas of the rollout pool, as the thread that drives them sees each: at work, starting again, or given up."""

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
    """LIVES: it draws. STARTS: its processes come up and build its engine. JOINS: it waits for weights. GONE: it was
    given up.
    """

    LIVES = enum.auto()
    STARTS = enum.auto()
    JOINS = enum.auto()
    GONE = enum.auto()


@dataclass
class ReplicaSlot:
    """One replica. is_busy: a slice is under way. meets: it is to be idle, for all to meet. named: the version that the
    last slice of its present life named, None before any.
    """

    number: int
    replica: Replica
    rollout: Rollout
    host: RankHost
    state: State = State.STARTS
    is_busy: bool = False
    meets: bool = False
    named: int | None = None

    @property
    def lives(self) -> bool:
        return self.state is State.LIVES

    @property
    def is_present(self) -> bool:
        """Whether it can be called."""
        return self.state in (State.LIVES, State.JOINS)

    @property
    def was_lost(self) -> bool:
        return self.replica.num_restarts > 0

    @property
    def num_ranks(self) -> int:
        return len(self.replica.ranks)


class ReplicaSlots:
    """All replicas. max_restarts: of each. say: prints a line; from any thread."""

    def __init__(self, replicas: Sequence[Replica], max_restarts: int, say: Callable[[str], None]) -> None:
        self.all = [
            ReplicaSlot(number, replica, replica.handle(ROLLOUT, Rollout), replica.host(RankHost))
            for number, replica in enumerate(replicas)
        ]
        self.num_lost = 0
        self._max_restarts, self._say = max_restarts, say

    @property
    def living(self) -> list[ReplicaSlot]:
        """Those that draw."""
        return [slot for slot in self.all if slot.lives]

    @property
    def present(self) -> list[ReplicaSlot]:
        """Those that can be called."""
        return [slot for slot in self.all if slot.is_present]

    @property
    def joining(self) -> list[ReplicaSlot]:
        """Those that have started again and wait for weights."""
        return [slot for slot in self.all if slot.state is State.JOINS]

    @property
    def is_hopeful(self) -> bool:
        """Whether any is left."""
        return any(slot.state is not State.GONE for slot in self.all)

    def lost(self, slot: ReplicaSlot, error: MegatronRLError) -> PoolFuture[None] | None:
        """A replica has failed: its new start, or None where it is given up. Raises ClusterEnded."""
        if isinstance(error, ClusterEnded):
            raise error
        self.num_lost += 1
        slot.is_busy = False
        slot.named = None
        name, tried = slot.replica.name, slot.replica.num_restarts
        if tried >= self._max_restarts:
            slot.state = State.GONE
            slot.replica.stop("it failed too often")
            self._say(f"the rollout replica {name} failed again after {tried} restarts and stays away: {error}")
            return None
        slot.state = State.STARTS
        self._say(f"the rollout replica {name} failed and starts again, others go on: {error}")
        return slot.replica.restart()

    def built(self, slot: ReplicaSlot) -> None:
        """A replica has its engine."""
        slot.state = State.JOINS

    def all_lost(self, error: MegatronRLError) -> WorkerFailure:
        """What ends a run none of whose replicas is left."""
        return WorkerFailure(
            f"no rollout replica is left, each was restarted {self._max_restarts} times; the last: {error}"
        )
