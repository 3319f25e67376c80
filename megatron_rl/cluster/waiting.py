"""Futures of several pools, waited for together: whichever is there first, or has failed.

One thread may so drive many pools that have fates of their own. Ray wakes it when an answer arrives; between answers
it looks at the heartbeat of each pool once every LOOK_S.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from megatron_rl.cluster.calls import LOOK_S
from megatron_rl.cluster.failure_domain import FailureDomain
from megatron_rl.dispatch import Future
from megatron_rl.errors import MegatronRLError, WorkerFailure

Answer = TypeVar("Answer")


class LookedAt(Protocol):
    """What a future asks of its pool."""

    name: str
    failure_domain: FailureDomain

    def raise_if_failed(self) -> None:
        """Raise, and end the pool, where a rank of it has failed."""

    def look_if_due(self) -> None:
        """`raise_if_failed`, unless that was less than LOOK_S ago."""

    def shutdown(self, reason: MegatronRLError | None = None) -> None:
        """End its processes; reason: what later calls raise."""


class PoolFuture(Future[Answer]):
    """A future that `wait_any` can wait for."""

    def __init__(self, fetch: Callable[[float | None], Answer], pool: LookedAt) -> None:
        super().__init__(fetch)
        self.pool = pool

    @abstractmethod
    def missing(self) -> list[ObjectRef]:
        """What it still waits for, after a look at its pool; empty once `get` returns or raises at once."""

    @abstractmethod
    def arrived(self, answer: ObjectRef) -> None:
        """One of `missing` is there, or has failed."""


class CallFuture(PoolFuture[Answer]):
    """Of a method that was sent. answers: one of each called rank, or of each rank that calls others."""

    def __init__(self, fetch: Callable[[float | None], Answer], pool: LookedAt, answers: Sequence[ObjectRef]) -> None:
        super().__init__(fetch, pool)
        self._missing = list(answers)

    def missing(self) -> list[ObjectRef]:
        """As of `PoolFuture`."""
        try:
            self.pool.look_if_due()
            self.pool.failure_domain.raise_if_ended()
        except MegatronRLError:
            return []
        return self._missing

    def arrived(self, answer: ObjectRef) -> None:
        """As of `PoolFuture`; the first of several may be a failure that the others wait behind."""
        self._missing = [one for one in self._missing if one != answer]
        if self._missing and is_failure(answer, self.pool.failure_domain):
            try:
                self.pool.raise_if_failed()
            except MegatronRLError:
                self._missing = []


@dataclass(frozen=True)
class WaitStep:
    """What a start waits for next, in words: so many `things` of the pool were `done`."""

    things: str
    done: str
    answers: list[ObjectRef]


class StartFuture(PoolFuture[None]):
    """Of a pool that starts, step by step; `missing` takes the next step once all answers of one are there.

    steps: runs the start; may raise whatever the start fails with, after which the pool is shut down, as it is when
    `timeout_s` have passed.
    """

    def __init__(self, pool: LookedAt, steps: Iterator[WaitStep], timeout_s: float) -> None:
        super().__init__(self._wait, pool)
        self._steps, self._timeout_s = steps, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._step, self._missing = WaitStep("", "", []), list[ObjectRef]()
        self._error: BaseException | None = None
        self._is_over = False

    def missing(self) -> list[ObjectRef]:
        """As of `PoolFuture`."""
        if self._is_over:
            return []
        try:
            with self.pool.failure_domain.inside():
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

    def arrived(self, answer: ObjectRef) -> None:
        """As of `PoolFuture`. A failure is read, with what its peers say, by the step that waits for it."""
        self._missing = [one for one in self._missing if one != answer]
        if self._missing and is_failure(answer, self.pool.failure_domain):
            self._missing = []

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
            "does another pool still occupy its ranks, or is their node gone?"
        )


def wait_any(futures: Sequence[Future[Any]], timeout: float | None = None) -> list[Future[Any]]:
    """Those of `futures` whose `get` returns or raises at once, as soon as there is one; [] after `timeout` seconds.

    futures: what methods of `RayPool` and `Replica` handles return, and starts; at least one. Raises TypeError for
    others. A pool whose ranks fail or hang meanwhile is ended, and its futures are among those returned.
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
        there = first_there(list(owners), {future.pool.failure_domain for future in ours}, left)
        for answer in there:
            owners[answer].arrived(answer)
        if not there and deadline is not None and time.monotonic() >= deadline:
            return []


def get_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all; raises for the first that fails, whichever it is."""
    waiting = list(futures)
    while waiting:
        for future in wait_any(waiting):
            future.get()
            waiting.remove(future)


def first_there(answers: list[ObjectRef], fates: set[FailureDomain], timeout_s: float) -> list[ObjectRef]:
    """Those of `answers` that are there as soon as one is; [] after `timeout_s`, or where one of `fates` has ended."""
    entered = []
    try:
        for failure_domain in fates:
            failure_domain.enter()
            entered.append(failure_domain)
        there, _ = ray.wait(answers, num_returns=1, timeout=timeout_s, fetch_local=False)
        if there and len(answers) > 1:
            there, _ = ray.wait(answers, num_returns=len(answers), timeout=0, fetch_local=False)
        return list(there)
    except MegatronRLError:
        return []
    finally:
        for failure_domain in entered:
            failure_domain.leave()


def is_failure(answer: ObjectRef, failure_domain: FailureDomain) -> bool:
    """Whether an answer that is there is none, or its pool has ended."""
    try:
        with failure_domain.inside():
            ray.get(answer)
    except (RayError, MegatronRLError):
        return True
    return False
