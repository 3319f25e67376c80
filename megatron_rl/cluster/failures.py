"""The failures of ranks as plain values, the choice of the failure to report, and the pools that it ends.

When one rank fails, its peers fail soon after, with "connection closed by peer" from the collective they were in. Only
the first failure helps the user; the pure function `root_cause` finds it.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from megatron_rl import errors
from megatron_rl.cluster.device_faults import fault_of

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (is )?(closed|timeout)|closed by peer"
    r"|timed out|connectfullmesh|nccl|gloo|Dist(Backend|Network|Store)Error",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure in one method, or in none (""), in plain values: an arbitrary exception may not pickle.

    wall_time: seconds since the epoch when it happened, by the clock of the node that noticed it. died: the process is
    gone; otherwise it raised `error_type` and is alive. error_class: the class that the driver raises; the rank's own
    class when that is one of `megatron_rl.errors`. pool: of the rank. node, host, gpu: as in `ProcessInfo`. The driver
    adds these four.
    """

    rank: int
    role: str
    method: str
    error_type: str
    message: str
    traceback: str
    wall_time: float
    died: bool = False
    error_class: type[errors.MegatronRLError] = errors.WorkerFailure
    pool: str = ""
    node: str = ""
    host: str = ""
    gpu: str = ""

    @property
    def device_fault(self) -> errors.DeviceFault | None:
        """The fault that the rank's GPU reported; None if something else failed."""
        fault = None if self.died else fault_of(self.error_type, self.message)
        return None if fault is None else replace(fault, node=self.node, host=self.host, gpu=self.gpu)

    @property
    def looks_secondary(self) -> bool:
        """Whether the message reads like the loss of a peer rather than this rank's own fault."""
        return not self.died and _LOST_PEER.search(f"{self.error_type}: {self.message}") is not None


def describe(error: BaseException, *, rank: int, role: str, method: str) -> RankFailure:
    """Describe an exception that was just caught on a rank, without the frame of the catching function."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    ours = [base for base in type(error).__mro__ if base.__module__ == errors.__name__]
    return RankFailure(
        rank=rank,
        role=role,
        method=method,
        error_type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(type(error), error, frames)),
        wall_time=time.time(),
        error_class=ours[0] if ours else errors.WorkerFailure,
    )


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that caused the others: a broken GPU, a dead process, or the earliest that is no lost peer."""

    def order(failure: RankFailure) -> tuple[bool, bool, bool, float]:
        has_fault = failure.device_fault is not None  # torch's watchdog may end its peers
        return not has_fault, not failure.died, failure.looks_secondary, failure.wall_time

    return min(failures, key=order)


def to_error(failures: Sequence[RankFailure], name_pools: bool = False) -> errors.MegatronRLError:
    """Return the exception that the driver raises for failures of one moment; its message names the root cause.

    It is a `WorkerFailure`, or the rank's own class when the cause is one of `megatron_rl.errors`, which keeps the exit
    code. Messages of those errors are written for the user, so the rank's traceback is a note instead of a part of the
    message. name_pools: name the pool of each rank.
    """
    cause = root_cause(failures)
    written_for_user = cause.error_class is not errors.WorkerFailure
    where = f"{f'pool {cause.pool}, ' if name_pools else ''}rank {cause.rank} ({cause.role})"
    if cause.died:
        moment = f"during {cause.method}" if cause.method else "between two calls"
        message = f"{where}: the process died {moment}. {cause.message}"
    elif written_for_user:
        message = f"{where}, in {cause.method}: {cause.message}"
    else:
        message = f"{where} raised {cause.error_type} in {cause.method}: {cause.message}\n\n{cause.traceback.rstrip()}"
    others = sorted({(failure.pool, failure.rank) for failure in failures} - {(cause.pool, cause.rank)})
    if others:
        names = [f"{pool} {rank}" if name_pools else str(rank) for pool, rank in others]
        message += f"\n{len(others)} other rank(s) failed after it: {', '.join(names)}"
    error = cause.error_class(message)
    if isinstance(error, errors.WorkerFailure):
        error.device_fault = cause.device_fault
        error.is_loss |= cause.died or cause.looks_secondary or error.device_fault is not None
    if written_for_user:
        error.add_note(f"on the worker:\n{cause.traceback}")
    return error


class PoolInDomain(Protocol):
    """The methods of a pool that `FailureDomain` calls."""

    name: str

    def raise_if_failed(self) -> None:
        """Raise, and end the domain, if a rank has failed in a call that has not been waited for."""

    def failures_now(self) -> list[RankFailure]:
        """Return the failures of its ranks so far."""

    def shutdown(self, reason: errors.MegatronRLError | None = None) -> None:
        """End its processes; reason: what later calls raise."""


class FailureDomain:
    """Pools that fail together: the failure of any rank ends all of them, with one message.

    All pools of a cluster share a domain, except that every start of a replica has its own. on_end: functions to call
    with the error once a failure has ended the pools. named: messages name the pool of a rank, as they also do where
    several pools share the domain.

    Any thread may call `decide`; the rest is for the thread that calls the pools.
    """

    def __init__(self, named: bool = False) -> None:
        self.error: errors.MegatronRLError | None = None
        self.on_end: list[Callable[[errors.MegatronRLError], None]] = []
        self._named = named
        self._pools: list[PoolInDomain] = []
        self._deciding = threading.Lock()

    def share(self, pool: PoolInDomain) -> None:
        """Add a pool."""
        self._pools.append(pool)

    def look(self) -> None:
        """Raise where the pools have ended or a rank of any of them has failed."""
        self.raise_if_ended()
        for pool in self._pools:
            pool.raise_if_failed()

    def end(self, pool: PoolInDomain, failures: Sequence[RankFailure]) -> NoReturn:
        """End all pools and raise the failure of this pool's ranks; ranks of other pools may report its cause."""
        if self.error is None:
            seen = [failure for other in self._pools if other is not pool for failure in other.failures_now()]
            error = to_error([*failures, *seen], name_pools=self._named or len(self._pools) > 1)
            if self.decide(error):
                for other in self._pools:
                    other.shutdown()
                for call in self.on_end:
                    call(error)
        self.raise_if_ended()
        raise AssertionError("unreachable: an error was just set")

    def decide(self, error: errors.MegatronRLError) -> bool:
        """Set the error that ended the pools, unless another is set; return whether this error is it."""
        with self._deciding:
            is_first = self.error is None
            if is_first:
                self.error = error
        return is_first

    def raise_if_ended(self) -> None:
        """Raise the error that ended the pools, if they have ended."""
        if self.error is not None:
            raise self.error.with_traceback(None)
