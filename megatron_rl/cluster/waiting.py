"""Wait for futures of several pools: for the first that is ready or has failed.

One thread can so drive many pools that fail separately. A reply that arrives wakes it; between replies it looks at
the heartbeat of each pool once every LOOK_S.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import Future as RankAnswer
from concurrent.futures import wait as wait_for_answers
from contextlib import suppress
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
    def next_event(self) -> RankAnswer[bool] | None:
        """Look at the pool; return what is ready once another look is due. None: `get` does not wait."""

    def arrived(self) -> None:
        """Note that the last `next_event` is ready."""


def settled(answers: Sequence[RankAnswer[Any]]) -> RankAnswer[bool]:
    """Return a future that is ready once all replies are, or one has failed, as the others may then never arrive.

    Its result: whether one has failed. A wait for it costs the same however many ranks reply one after the other.
    """
    over: RankAnswer[bool] = RankAnswer()
    counting, num_missing = threading.Lock(), len(answers)

    def note(answer: RankAnswer[Any]) -> None:
        nonlocal num_missing
        with counting:
            num_missing -= 1
            has_failed = answer.exception() is not None
            if (has_failed or not num_missing) and not over.done():
                over.set_result(has_failed)

    if not answers:
        over.set_result(False)
    for answer in answers:
        answer.add_done_callback(note)
    return over


class CallFuture(PoolFuture[Answer]):
    """The future of a call. answers: one of each rank that the driver called."""

    def __init__(
        self, fetch: Callable[[float | None], Answer], pool: PoolOfFuture, answers: Sequence[RankAnswer[Any]]
    ) -> None:
        super().__init__(fetch, pool)
        self._answers: Sequence[RankAnswer[Any]] = answers
        self._settled: RankAnswer[bool] | None = None

    def next_event(self) -> RankAnswer[bool] | None:
        if self._settled is None:
            self._settled = settled(self._answers)
        try:
            self.pool.look_if_due()
            self.pool.failure_domain.raise_if_ended()
        except MegatronRLError:
            return None
        return None if self._settled.done() else self._settled

    def arrived(self) -> None:
        if self._settled is not None and self._settled.result():
            with suppress(MegatronRLError):
                self.pool.raise_if_failed()  # ends the pool, and so its other futures


@dataclass(frozen=True)
class WaitStep:
    """One step of a start, with the words of its message: that many `things` of the pool were `done`."""

    things: str
    done: str
    answers: list[RankAnswer[Any]]


class StartFuture(PoolFuture[None]):
    """The future of a pool that starts step by step; `next_event` takes the next step once a step's replies are ready.

    steps: runs the start and may raise its failure. After a failure, and after `timeout_s`, the pool is shut down.
    """

    def __init__(self, pool: PoolOfFuture, steps: Iterator[WaitStep], timeout_s: float) -> None:
        super().__init__(self._wait, pool)
        self._steps, self._timeout_s = steps, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._step, self._settled = WaitStep("", "", []), settled([])
        self._error: BaseException | None = None
        self._is_over = False

    def next_event(self) -> RankAnswer[bool] | None:
        if self._is_over:
            return None
        try:
            self.pool.failure_domain.raise_if_ended()
            self.pool.look_if_due()
            while self._settled.done():
                self._step = next(self._steps)  # reads a failure, and those of its peers
                self._settled = settled(self._step.answers)
            if time.monotonic() > self._deadline:
                raise self._late()
        except StopIteration:
            self._is_over = True
        except BaseException as error:
            ended_before = self.pool.failure_domain.error
            self.pool.shutdown(error if isinstance(error, MegatronRLError) else None)
            self._is_over, self._error = True, ended_before or error
            if not isinstance(error, Exception):
                raise
        return None if self._is_over else self._settled

    def _wait(self, timeout: float | None) -> None:
        if not wait_any([self], timeout):
            raise TimeoutError(f"the pool {self.pool.name} has not started in {timeout:g} s")
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _late(self) -> WorkerFailure:
        step, num = self._step, len(self._step.answers)
        num_ready = sum(answer.done() for answer in step.answers)
        return WorkerFailure(
            f"{num_ready} of {num} {step.things} of pool {self.pool.name} {step.done} in "
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
        events = [(future, future.next_event()) for future in ours]
        ready: list[Future[Any]] = [future for future, event in events if event is None]
        if ready:
            return ready
        left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
        owners = {event: future for future, event in events if event is not None}
        arrived, _ = wait_for_answers(owners, left, FIRST_COMPLETED)
        for event in arrived:
            owners[event].arrived()
        if not arrived and deadline is not None and time.monotonic() >= deadline:
            return []


def get_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all futures; raise as soon as one of them fails."""
    waiting = list(futures)
    while waiting:
        for future in wait_any(waiting):
            future.get()
            waiting.remove(future)
