"""Wait for futures of several pools: for the first that is ready or has failed.

One thread can so drive many pools that fail separately. A reply that arrives wakes it; between replies it looks at
the heartbeat of each pool once every LOOK_S.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import Future as RankAnswer
from concurrent.futures import wait as wait_for_answers
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megatron_rl.cluster.calls import LOOK_S
from megatron_rl.cluster.failures import FailureDomain, PoolInDomain
from megatron_rl.dispatch import Future
from megatron_rl.errors import MegatronRLError, WorkerFailure

Answer = TypeVar("Answer")


class PoolOfFuture(PoolInDomain, Protocol):
    """The pool of a future."""

    failure_domain: FailureDomain

    def look_if_due(self) -> None:
        """Call `raise_if_failed` unless the last call was less than LOOK_S ago."""


class PoolFuture(Future[Answer]):
    """A future that `wait_any` can wait for."""

    def __init__(self, fetch: Callable[[float | None], Answer], pool: PoolOfFuture) -> None:
        super().__init__(fetch)
        self.pool = pool

    @abstractmethod
    def missing(self) -> list[RankAnswer[Any]]:
        """Look at the pool; return the replies that are still missing. Once it is empty, `get` does not wait."""

    @abstractmethod
    def arrived(self, answer: RankAnswer[Any]) -> None:
        """Note that one of `missing` is ready or has failed."""


class CallFuture(PoolFuture[Answer]):
    """The future of a call. answers: one of each rank that the driver called."""

    def __init__(
        self, fetch: Callable[[float | None], Answer], pool: PoolOfFuture, answers: Sequence[RankAnswer[Any]]
    ) -> None:
        super().__init__(fetch, pool)
        self._missing = list(answers)

    def missing(self) -> list[RankAnswer[Any]]:
        try:
            self.pool.look_if_due()
            self.pool.failure_domain.raise_if_ended()
        except MegatronRLError:
            return []
        return self._missing

    def arrived(self, answer: RankAnswer[Any]) -> None:
        self._missing = [other for other in self._missing if other != answer]
        if self._missing and answer.exception() is not None:  # the other replies may never arrive
            try:
                self.pool.raise_if_failed()
            except MegatronRLError:
                self._missing = []


@dataclass(frozen=True)
class WaitStep:
    """One step of a start, with the words of its message: that many `things` of the pool were `done`."""

    things: str
    done: str
    answers: list[RankAnswer[Any]]


class StartFuture(PoolFuture[None]):
    """The future of a pool that starts step by step; `missing` takes the next step once a step's replies are ready.

    steps: runs the start and may raise its failure. After a failure, and after `timeout_s`, the pool is shut down.
    """

    def __init__(self, pool: PoolOfFuture, steps: Iterator[WaitStep], timeout_s: float) -> None:
        super().__init__(self._wait, pool)
        self._steps, self._timeout_s = steps, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._step, self._missing = WaitStep("", "", []), list[RankAnswer[Any]]()
        self._error: BaseException | None = None
        self._is_over = False

    def missing(self) -> list[RankAnswer[Any]]:
        if self._is_over:
            return []
        try:
            self.pool.failure_domain.raise_if_ended()
            self.pool.look_if_due()
            while not self._missing:
                self._step = next(self._steps)
                self._missing = list(self._step.answers)
            if time.monotonic() > self._deadline:
                raise self._late()
        except StopIteration:
            self._is_over = True
        except BaseException as error:
            ended_before = self.pool.failure_domain.error
            self.pool.shutdown(error if isinstance(error, MegatronRLError) else None)
            self._is_over, self._error, self._missing = True, ended_before or error, []
            if not isinstance(error, Exception):
                raise
        return list(self._missing)

    def arrived(self, answer: RankAnswer[Any]) -> None:
        self._missing = [other for other in self._missing if other != answer]
        if self._missing and answer.exception() is not None:
            self._missing = []  # the next step reads the failure and those of its peers

    def _wait(self, timeout: float | None) -> None:
        if not wait_any([self], timeout):
            raise TimeoutError(f"the pool {self.pool.name} has not started in {timeout:g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _late(self) -> WorkerFailure:
        step, num = self._step, len(self._step.answers)
        return WorkerFailure(
            f"{num - len(self._missing)} of {num} {step.things} of pool {self.pool.name} {step.done} in "
            f"{self._timeout_s:g} s; "
            "does another pool still occupy its ranks, or is their node gone?",
            is_loss=True,
        )


def wait_any(futures: Sequence[Future[Any]], timeout: float | None = None) -> list[Future[Any]]:
    """Wait until one of `futures` is ready; return all whose `get` does not wait, [] after `timeout` seconds.

    futures: at least one start or reply of a `ProcessPool` or `Replica`. Raises TypeError for others. A pool whose
    ranks fail or hang meanwhile is ended, and its futures are among those returned.
    """
    ours = [future for future in futures if isinstance(future, PoolFuture)]
    if len(ours) != len(futures) or not ours:
        raise TypeError(f"wait_any waits for futures of pools, at least one, not for {list(futures)}")
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        missing = [(future, future.missing()) for future in ours]
        ready: list[Future[Any]] = [future for future, answers in missing if not answers]
        if ready:
            return ready
        left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
        owners = {answer: future for future, answers in missing for answer in answers}
        arrived, _ = wait_for_answers(owners, left, FIRST_COMPLETED)
        for answer in arrived:
            owners[answer].arrived(answer)
        if not arrived and deadline is not None and time.monotonic() >= deadline:
            return []


def get_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all futures; raise as soon as one of them fails."""
    waiting = list(futures)
    while waiting:
        for future in wait_any(waiting):
            future.get()
            waiting.remove(future)
