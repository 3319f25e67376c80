"""The process between the driver and the reward workers: it deals out samples, and kills and replaces slow workers.

The driver runs Ray's threads and must neither fork nor hang. This process has one thread and runs no code of the
user's, so it can fork a worker within milliseconds. It ends when the driver's connection closes, which the kernel does
however the driver dies; then it kills the workers and everything that they have started.

    driver --[Sample]--> keeper --(row, Sample), ...--> worker --(row, Outcome)--> keeper --[Outcome]--> driver

A worker sends lines of JSON (`worker`): no object of a reward function is rebuilt here or in the driver.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

import psutil

from megatron_rl.cluster.child_processes import adopting_orphans, fork_child
from megatron_rl.observe.console import drop_unread_output
from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.outcome import Outcome, Sample, failed
from megatron_rl.scoring.worker import READY, GarbledError, Inbox, work

LARGEST_CHUNK = 16
"""Samples sent to a worker at once; the time limit holds for each of them."""

LOAD_LIMIT_S = 300.0
"""Seconds in which a worker must have loaded the reward function."""

MOST_FAILED_STARTS = 3
"""Workers in a row that may fail to load it."""

MOST_FRUITLESS_TIMEOUTS = 16
"""Time-outs in one batch without a single score, after which a run that would stop anyway gives the batch up."""


@dataclass(frozen=True)
class KeeperSettings:
    """timeout_s: seconds a sample may take. give_up: end a batch whose samples all time out."""

    source: RewardSource
    num_workers: int
    timeout_s: float
    give_up: bool


class StartFailure(Exception):
    """No worker can load the reward function."""


@dataclass
class Worker:
    """since: monotonic time of its start, its last message or its last chunk. rows: its open rows, in order."""

    pid: int
    pidfd: int
    connection: Connection
    since: float
    ready: bool = False
    rows: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.connection)

    def limit_s(self, timeout_s: float) -> float | None:
        """Seconds it may take for its present row or for loading; None: it is idle."""
        if not self.ready:
            return LOAD_LIMIT_S
        return timeout_s if self.rows else None


class Keeper:
    """Holds the workers and, while `score` runs, one batch."""

    def __init__(self, driver: Connection, settings: KeeperSettings):
        """Start the workers and do not wait until they have loaded the function."""
        self.driver, self.settings = driver, settings
        self.workers: list[Worker] = []
        self.failed_starts = 0
        self._refill()

    def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in order. Raises EOFError when the driver is gone, StartFailure."""
        self.samples, self.outcomes = samples, dict[int, Outcome]()
        self.waiting = deque(range(len(samples)))
        self.retried: set[int] = set()
        self.timeouts, self.any_score = 0, False
        self._hear_all()
        while len(self.outcomes) < len(samples):
            self._refill()
            self._deal()
            self._await_event()
            self._hear_all()
            if self.settings.give_up and self.timeouts >= MOST_FRUITLESS_TIMEOUTS and not self.any_score:
                self._give_up()
        self._refill()  # replacements load the function before the next batch
        self._reap_adopted()
        return [self.outcomes[row] for row in range(len(samples))]

    def close(self) -> None:
        """Kill every worker and everything that any of them has left running."""
        for worker in list(self.workers):
            self._end(worker)
        for orphan in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                orphan.kill()

    def _refill(self) -> None:
        while len(self.workers) < self.settings.num_workers:
            pid, connection = fork_child(self._become_worker)
            self.workers.append(Worker(pid, os.pidfd_open(pid), connection, time.monotonic()))

    def _become_worker(self, own: Connection) -> None:
        for connection in (self.driver, *(worker.connection for worker in self.workers)):
            connection.close()
        for worker in self.workers:
            os.close(worker.pidfd)
        work(own, self.settings.source)

    def _deal(self) -> None:
        for worker in self.workers:
            if worker.ready and not worker.rows and self.waiting:
                # The fewer rows are left, the smaller the chunks, so that all workers end at about the same time.
                fair = len(self.waiting) // (2 * self.settings.num_workers)
                rows = [self.waiting.popleft() for _ in range(max(1, min(LARGEST_CHUNK, fair)))]
                worker.rows.extend(rows)
                worker.since = time.monotonic()
                with suppress(BrokenPipeError, ConnectionResetError):  # it has died, which _hear_all notices
                    worker.connection.send([(row, self.samples[row]) for row in rows])

    def _await_event(self) -> None:
        """Wait for a message, the end of a worker, or the next time limit."""
        limits = [(worker, worker.limit_s(self.settings.timeout_s)) for worker in self.workers]
        ends = [worker.since + limit_s for worker, limit_s in limits if limit_s is not None]
        timeout = max(0.0, min(ends) - time.monotonic()) if ends else None
        events = wait([self.driver, *self._event_sources()], timeout)
        if self.driver in events:  # it sends nothing while it waits for a batch
            raise EOFError

    def _hear_all(self) -> None:
        """Read every worker's messages; remove workers that have ended and kill those over their limit."""
        now = time.monotonic()
        for worker in list(self.workers):
            # Look for its end before reading: then no message can follow the ones read here.
            ended = bool(wait([worker.pidfd], timeout=0))
            try:
                self._listen(worker)
            except GarbledError as error:
                # Another writer has used the connection, such as a forked copy of the worker.
                self._end(worker)
                reason = f"the reward function's process sent what is no answer: {error}"
                self._blame(worker, "crashed", reason, reason)
                continue
            limit_s = worker.limit_s(self.settings.timeout_s)
            if ended:
                self._bury(worker)
            elif limit_s is not None and now - worker.since > limit_s:
                self._end(worker)
                reason = f"the reward function did not return in reward_model.timeout_s={limit_s:g}"
                self._blame(worker, "timed_out", reason, f"the reward function was not loaded within {limit_s:g} s")

    def _event_sources(self) -> list[Connection | int]:
        return [source for worker in self.workers for source in (worker.connection, worker.pidfd)]

    def _listen(self, worker: Worker) -> None:
        """Process the messages that the worker has sent. Raises GarbledError for a message that no worker sends."""
        for message in worker.inbox.take():
            worker.since = time.monotonic()
            if message == READY:
                worker.ready, self.failed_starts = True, 0
            elif isinstance(message, str):
                self._note_failed_start(message)
            else:
                row, outcome = message
                if not worker.rows or row != worker.rows[0]:  # they are answered in order, each once
                    raise GarbledError(f"an answer for row {row}, which it was not at")
                worker.rows.popleft()
                self._settle(row, outcome)

    def _settle(self, row: int, outcome: Outcome) -> None:
        self.outcomes[row] = outcome
        self.timeouts += outcome.failure == "timed_out"
        self.any_score |= not outcome.failure

    def _bury(self, worker: Worker) -> None:
        """Remove a worker that has died."""
        status = self._end(worker)
        if worker.rows and -status in (signal.SIGTERM, signal.SIGINT) and worker.rows[0] not in self.retried:
            # A scheduler signals all processes of a job, and the driver may still finish its step.
            self.retried.add(worker.rows[0])
            self.waiting.extendleft(reversed(worker.rows))
        elif worker.ready or status != 0:
            cause = _cause(status)
            loading = f"a reward worker {cause} while it loaded the reward function"
            self._blame(worker, "crashed", f"the reward function ended its process, which {cause}", loading)

    def _blame(self, worker: Worker, failure: str, reason: str, loading: str) -> None:
        """Fail the present row of a worker that was ended, or count its failed start; its other rows wait again.

        loading: the reason of a failed start.
        """
        if not worker.ready:
            self._note_failed_start(loading)
        elif worker.rows:
            self._settle(worker.rows.popleft(), failed(failure, reason))
        self.waiting.extendleft(reversed(worker.rows))

    def _give_up(self) -> None:
        for worker in [worker for worker in self.workers if worker.rows]:
            self._end(worker)
        reason = f"not tried, as {MOST_FRUITLESS_TIMEOUTS} samples timed out and none was scored"
        for row in set(range(len(self.samples))) - self.outcomes.keys():
            self.outcomes[row] = failed("timed_out", reason)

    def _note_failed_start(self, reason: str) -> None:
        self.failed_starts += 1
        if self.failed_starts >= MOST_FAILED_STARTS:
            raise StartFailure(reason)

    def _end(self, worker: Worker) -> int:
        """Kill the worker and all that it has started; return its exit code, negative for a signal."""
        self.workers.remove(worker)
        started = psutil.Process(worker.pid).children(recursive=True)
        for kill in (os.kill, os.killpg):
            with suppress(ProcessLookupError):
                kill(worker.pid, signal.SIGKILL)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, status = os.waitpid(worker.pid, 0)
        worker.connection.close()
        os.close(worker.pidfd)
        return os.waitstatus_to_exitcode(status)

    def _reap_adopted(self) -> None:
        """Reap ended processes that the function has orphaned, up to the first that is a worker."""
        workers = {worker.pid for worker in self.workers}
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid not in workers:
            os.waitpid(ended.si_pid, 0)


def keep(driver: Connection) -> None:
    """Run the keeper: receive KeeperSettings, then answer lists of Sample with lists of Outcome, until the driver ends.

    The answer is a str, the reason, when no sample can be scored.
    """
    drop_unread_output()  # a reward function may print
    # The driver handles these signals; the keeper ends with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with adopting_orphans():  # so that `close` finds them
        keeper = Keeper(driver, driver.recv())
        try:
            while True:
                try:
                    driver.send(keeper.score(driver.recv()))
                except StartFailure as failure:
                    driver.send(str(failure))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        finally:
            keeper.close()


def _cause(status: int) -> str:
    """Describe an exit code, after "which"."""
    return f"exited with code {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
