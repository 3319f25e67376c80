"""The replicas of the rollout pool as the driver's thread sees each: generating, starting, waiting, or given up."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.cluster.replicas import ClusterEnded, Replica
from megatron_rl.cluster.waiting import PoolFuture
from megatron_rl.config.roles import ROLLOUT
from megatron_rl.errors import MegatronRLError, WorkerFailure
from megatron_rl.roles.host import RankHost
from megatron_rl.roles.rollout import Rollout
from megatron_rl.sampling.drain_notices import DrainNotices


class State(enum.Enum):
    """GENERATING: has weights and runs slices. STARTING: its processes start and build the engine. JOINING: waits for
    weights. AWAY: has no processes, and may come (back). GONE: is given up.
    """

    GENERATING = enum.auto()
    STARTING = enum.auto()
    JOINING = enum.auto()
    AWAY = enum.auto()
    GONE = enum.auto()


@dataclass
class ReplicaSlot:
    """One replica. is_busy: a slice is running. is_paused: it gets no slices, because all ranks are to connect.

    last_version: the version of its last slice since it started; None before the first. leaves: why it is to leave, or
    "". num_failures: those that count. is_asked_for: its places are there or asked for. away_until: when it may come
    back at the earliest, on the monotonic clock.
    """

    number: int
    replica: Replica
    rollout: Rollout
    host: RankHost
    state: State = State.STARTING
    is_busy: bool = False
    is_paused: bool = False
    last_version: int | None = None
    leaves: str = ""
    num_failures: int = 0
    is_asked_for: bool = True
    away_until: float = 0.0

    @property
    def is_present(self) -> bool:
        """Whether it can be called."""
        return self.state in (State.GENERATING, State.JOINING)

    @property
    def num_ranks(self) -> int:
        return len(self.replica.ranks)


@dataclass(frozen=True)
class Elastic:
    """How replicas come and go. notices: say which are to leave. wait_s: seconds that too few may be there.

    drain_s: seconds until a replica may come back whose process was given SIGTERM.
    """

    min_replicas: int
    notices: DrainNotices
    wait_s: float
    drain_s: float


class ReplicaSlots:
    """All replicas. max_restarts: of each replica. say: prints a line, from any thread. elastic: they come and go."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        max_restarts: int,
        say: Callable[[str], None],
        elastic: Elastic | None = None,
    ) -> None:
        self.all = [
            ReplicaSlot(number, replica, replica.handle(ROLLOUT, Rollout), replica.host(RankHost))
            for number, replica in enumerate(replicas)
        ]
        for slot in self.all:
            slot.state = State.AWAY if slot.replica.is_away else State.STARTING
        self.num_lost = self.num_left = 0
        self.elastic = elastic
        self._max_restarts, self._say = max_restarts, say
        self._too_few_since: float | None = None

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
        """Restart a failed replica; None if it is away or given up. Raises ClusterEnded, and WorkerFailure if none is
        left.
        """
        if isinstance(error, ClusterEnded):
            raise error
        self.num_lost += 1
        has_worked = slot.last_version is not None
        slot.num_failures = 1 if self.elastic and has_worked else slot.num_failures + 1
        slot.is_busy = False
        slot.last_version = None
        name, num_restarts = slot.replica.name, slot.num_failures - 1
        if num_restarts < self._max_restarts:
            self._say(f"the rollout replica {name} failed and starts again, others continue: {error}")
            if self.elastic is None:
                slot.state = State.STARTING
                return slot.replica.restart()
            self._send_away(slot, "it failed")
            return None
        slot.state = State.GONE
        slot.replica.stop("it failed too often")
        self._say(f"the rollout replica {name} failed again after {num_restarts} restarts and stays away: {error}")
        if all(slot.state is State.GONE for slot in self.all):
            failure = WorkerFailure(
                f"no rollout replica is left, each was restarted {self._max_restarts} times; the last: {error}",
                is_loss=True,
            )
            failure.device_fault = error.device_fault if isinstance(error, WorkerFailure) else None
            raise failure
        return None

    # Of an elastic pool

    def note_notices(self) -> None:
        """Say of every replica whether it is to leave: `ReplicaSlot.leaves`."""
        assert self.elastic is not None
        notices = self.elastic.notices.read()
        for slot in self.all:
            notice = notices.of(slot.number, slot.replica.hosts)
            if slot.state is State.AWAY:
                slot.leaves = notice
            elif slot.state is not State.GONE:
                signalled = "its process was given SIGTERM" if slot.replica.got_sigterm else ""
                slot.leaves = signalled or notice

    def left(self, slot: ReplicaSlot) -> None:
        """End a replica that is to leave; its requests must have been given to others."""
        assert self.elastic is not None
        self.num_left += 1
        slot.is_busy, slot.last_version = False, None
        if slot.replica.got_sigterm:
            slot.away_until = time.monotonic() + self.elastic.drain_s
        self._say(f"the rollout replica {slot.replica.name} leaves, others continue: {slot.leaves}")
        self._send_away(slot, slot.leaves)

    def come(self, slot: ReplicaSlot) -> PoolFuture[None] | None:
        """Start a replica that is away, if it may come and its places are there; else None."""
        if slot.leaves or time.monotonic() < slot.away_until:
            return None
        if not slot.is_asked_for:
            slot.replica.ask_for_place()
            slot.is_asked_for = True
        if not slot.replica.has_place:
            return None
        slot.state = State.STARTING
        self._say(f"the rollout replica {slot.replica.name} joins")
        return slot.replica.restart()

    def raise_if_too_few(self) -> None:
        """Raise WorkerFailure if fewer replicas than are needed were there, or were starting, for too long."""
        assert self.elastic is not None
        num_there = sum(slot.state not in (State.AWAY, State.GONE) for slot in self.all)
        if num_there >= self.elastic.min_replicas:
            self._too_few_since = None
            return
        now = time.monotonic()
        since = self._too_few_since = now if self._too_few_since is None else self._too_few_since
        if now - since > self.elastic.wait_s:
            raise WorkerFailure(
                f"{num_there} rollout replicas were left for trainer.repair_wait_s={self.elastic.wait_s:g} s, which is "
                f"below actor_rollout_ref.rollout.min_replicas={self.elastic.min_replicas}",
                is_loss=True,
            )

    def _send_away(self, slot: ReplicaSlot, reason: str) -> None:
        slot.state, slot.is_asked_for = State.AWAY, False
        slot.replica.leave(reason)
