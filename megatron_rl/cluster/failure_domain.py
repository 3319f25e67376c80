"""What the failure of one pool does to others, and to threads that wait for any of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

from megatron_rl.cluster.failures import RankFailure, to_error
from megatron_rl.errors import MegatronRLError


class PoolInDomain(Protocol):
    """What `FailureDomain` asks of a pool."""

    name: str

    def raise_if_failed(self) -> None:
        """Raise where a rank of this pool has failed in a call that nobody has waited for yet."""

    def failures_now(self) -> list[RankFailure]:
        """What its ranks have failed with until now."""

    def shutdown(self) -> None:
        """End its processes."""


class FailureDomain:
    """What ended the pools that share it: the failure of any rank ends all of them, with one message.

    All pools of a cluster share one, except that every start of a replica has its own. on_end: called with the error
    once a failure has ended the pools, to end what depends on them. named: messages say which pool a rank belongs to,
    as they also do where several pools share this.

    `decide`, `inside`, its two ends and `wait_until_left` may be called from any thread, all else from the thread that
    calls the pools.
    """

    def __init__(self, named: bool = False) -> None:
        self.error: MegatronRLError | None = None
        self.on_end: list[Callable[[MegatronRLError], None]] = []
        self._named = named
        self._pools: list[PoolInDomain] = []
        self._num_inside = 0
        self._changed = threading.Condition()

    def share(self, pool: PoolInDomain) -> None:
        """Make a pool end with the others."""
        self._pools.append(pool)

    def look(self) -> None:
        """Raise where the pools have ended or a rank of any of them has failed."""
        self.raise_if_ended()
        for pool in self._pools:
            pool.raise_if_failed()

    def end(self, pool: PoolInDomain, failures: Sequence[RankFailure]) -> NoReturn:
        """End all pools for what the ranks of one failed with, and raise it; the others may have seen its cause."""
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
        """Make this what ended the pools, unless something has before; whether it is."""
        with self._changed:
            is_first = self.error is None
            if is_first:
                self.error = error
        return is_first

    def raise_if_ended(self) -> None:
        """Raise what ended the pools, if they have ended."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Round every call of Ray for one of the pools. Raises like `raise_if_ended`."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """The beginning of `inside`."""
        with self._changed:
            self.raise_if_ended()
            self._num_inside += 1

    def leave(self) -> None:
        """The end of `inside`."""
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def wait_until_left(self, timeout_s: float) -> bool:
        """Once it is decided: whether every thread has left `inside` after `timeout_s` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)
