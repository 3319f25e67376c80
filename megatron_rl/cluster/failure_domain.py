"""Pools that fail together, and the threads that wait for any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from megatron_rl.cluster.failures import RankFailure, to_error
from megatron_rl.errors import MegatronRLError


class PoolInDomain(Protocol):
    """The methods of a pool that `FailureDomain` calls."""

    name: str

    def raise_if_failed(self) -> None:
        """Raise, and end the domain, if a rank has failed in a call that has not been waited for."""

    def failures_now(self) -> list[RankFailure]:
        """Return the failures of its ranks so far."""

    def shutdown(self, reason: MegatronRLError | None = None) -> None:
        """End its processes; reason: what later calls raise."""


class FailureDomain:
    """Pools that fail together: the failure of any rank ends all of them, with one message.

    All pools of a cluster share a domain, except that every start of a replica has its own. on_end: functions to call
    with the error once a failure has ended the pools. named: messages name the pool of a rank, as they also do where
    several pools share the domain.

    Any thread may call `decide`; the rest is for the thread that calls the pools.
    """

    def __init__(self, named: bool = False) -> None:
        self.error: MegatronRLError | None = None
        self.on_end: list[Callable[[MegatronRLError], None]] = []
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

    def decide(self, error: MegatronRLError) -> bool:
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
