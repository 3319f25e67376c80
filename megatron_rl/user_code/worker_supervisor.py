"""The process between the driver and workers that run the user's code: it deals out jobs, kills and replaces workers.

The driver runs Ray's threads and must neither fork nor hang. This process has one thread and runs no code of the
user's, so it can fork a worker within milliseconds. It ends when the driver's end of its channel closes, which the
kernel does however the driver dies; then it kills the workers and everything that they have started.

    driver --[Job], Notice, Cancel--> supervisor --(number, content)--> worker
    driver <--DoneJobs, FailedStart--- supervisor <--(number, reply)--- worker

It never waits for one of them alone, neither to read nor to be read (`cluster.channel`). A worker sends JSON
(`worker`): no object of the user's is rebuilt here or in the driver.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_rl.cluster.channel import Channel, GarbledError, ready
from megatron_rl.cluster.child_processes import ForkedChild, adopting_orphans, how_ended, mark_children
from megatron_rl.cluster.stale_processes import WORKER, children_with, descendants, end, living
from megatron_rl.observe.console import drop_unread_output
from megatron_rl.user_code.worker import (
    CRASHED,
    LONGEST_ANSWER,
    READY,
    TIMED_OUT,
    WORN_OUT,
    Work,
    packed_job,
    read_message,
    work,
)

LARGEST_CHUNK = 16
"""Jobs without a key that are sent to a worker at once."""

LOAD_LIMIT_S = 300.0
"""Seconds in which a worker must have loaded the user's code."""

MOST_FAILED_STARTS = 3
"""Workers in a row that may fail to load it."""

END_S = 1.0
"""Longest wait for the end of what a worker has started."""


@dataclass(frozen=True)
class WorkerSettings:
    """timeout_s: seconds a job may take."""

    work: Work
    num_workers: int
    timeout_s: float


@dataclass(frozen=True)
class Job:
    """number: of the reply. content: pickled. key: jobs with the same key go to the same worker; None: any worker may
    do it.
    """

    number: int
    content: bytes
    key: int | None = None


@dataclass(frozen=True)
class Notice:
    """Something, pickled, for the worker of a key, without a reply. It is lost with the worker."""

    content: bytes
    key: int


class Cancel:
    """The driver wants no further reply to the jobs so far."""


@dataclass(frozen=True)
class DoneJobs:
    """(number, reply) of jobs that are done."""

    content: list[tuple[int, Any]]


@dataclass(frozen=True)
class FailedStart:
    """No worker can load the user's code. numbers: of jobs that are given up."""

    reason: str
    numbers: list[int]


@dataclass
class Worker:
    """since: monotonic time of its start, its last message or its last jobs. begun: when it began an open job.

    mark: of all that it starts. is_worn_out: it gets no further jobs, and is replaced once it is at none.
    """

    child: ForkedChild
    mark: str
    since: float
    ready: bool = False
    is_worn_out: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    begun: dict[int, float] = field(default_factory=dict)

    def deadline(self, timeout_s: float) -> float | None:
        """When its present job, or its loading, has taken too long; None: it is idle."""
        if not self.ready:
            return self.since + LOAD_LIMIT_S
        return min(self.begun.values(), default=self.since) + timeout_s if self.jobs else None


class WorkerSupervisor:
    """Holds the workers. The worker of a key has the place `key % num_workers`."""

    def __init__(self, driver: Channel, settings: WorkerSettings):
        """Start the workers and do not wait until they have loaded the user's code."""
        self.driver, self.settings = driver, settings
        self.workers: list[Worker | None] = [None] * settings.num_workers
        self.waiting: deque[Job] = deque()
        self.keyed: list[deque[Job | Notice]] = [deque() for _ in self.workers]
        self.answers: list[tuple[int, Any]] = []
        self.retried: set[int] = set()
        self.failed_starts = 0
        self._refill()

    def serve(self) -> None:
        """Do jobs until the driver is gone."""
        while not self.driver.has_ended:
            self._refill()
            self._deal()
            self._answer()
            self._await_event()
            self._hear_driver()
            self._hear_workers()

    def close(self) -> None:
        """Kill every worker and everything that any of them has left running."""
        for place in range(len(self.workers)):
            self._end(place)
        end(descendants, END_S)

    @property
    def _living(self) -> list[tuple[int, Worker]]:
        return [(place, worker) for place, worker in enumerate(self.workers) if worker is not None]

    def _refill(self) -> None:
        for place, worker in enumerate(self.workers):
            if worker is None:
                mark = uuid.uuid4().hex
                child = ForkedChild.start(partial(self._become_worker, mark), LONGEST_ANSWER)
                self.workers[place] = Worker(child, mark, time.monotonic())

    def _become_worker(self, mark: str, own: Channel) -> None:
        for channel in (self.driver, *(worker.child.channel for _, worker in self._living)):
            channel.close()
        for _, worker in self._living:
            os.close(worker.child.pidfd)
        mark_children(WORKER, mark)
        work(own, self.settings.work)

    def _deal(self) -> None:
        for place, worker in self._living:
            if not worker.ready or worker.is_worn_out:
                continue
            dealt: list[Job | Notice] = [*self.keyed[place]]
            self.keyed[place].clear()
            if not worker.jobs and not dealt and self.waiting:
                # The fewer jobs are left, the smaller the chunks, so that all workers end at about the same time.
                fair = len(self.waiting) // (2 * self.settings.num_workers)
                dealt = [self.waiting.popleft() for _ in range(max(1, min(LARGEST_CHUNK, fair)))]
            for job in dealt:
                number = job.number if isinstance(job, Job) else None
                if isinstance(job, Job):
                    worker.jobs[job.number] = job
                    worker.since = time.monotonic()
                worker.child.channel.send(packed_job(number, job.content))

    def _answer(self) -> None:
        if self.answers:
            self.driver.send(pickle.dumps(DoneJobs(self.answers)))
            self.answers = []

    def _await_event(self) -> None:
        """Wait for a message, room for one, the end of a worker, or the next time limit."""
        workers = [worker for _, worker in self._living]
        children = [worker.child for worker in workers]
        ends = [limit for worker in workers if (limit := worker.deadline(self.settings.timeout_s)) is not None]
        timeout_s = max(0.0, min(ends) - time.monotonic()) if ends else None
        self._reap_adopted()
        ready([self.driver, *(child.channel for child in children)], [child.pidfd for child in children], timeout_s)

    def _hear_driver(self) -> None:
        for message in self.driver.take():
            match pickle.loads(message):
                case Notice() as notice:
                    self.keyed[notice.key % len(self.workers)].append(notice)
                case Cancel():
                    for place, worker in self._living:
                        if worker.jobs:
                            self._end(place)
                    self._forget_jobs()
                case jobs:
                    for job in jobs:
                        self._queue(job).append(job)

    def _queue(self, job: Job) -> deque[Any]:
        return self.waiting if job.key is None else self.keyed[job.key % len(self.workers)]

    def _forget_jobs(self) -> list[int]:
        """Drop the jobs that no worker has; returns their numbers."""
        queues: list[deque[Any]] = [self.waiting, *self.keyed]
        numbers = [job.number for queue in queues for job in queue if isinstance(job, Job)]
        for queue in queues:
            queue.clear()
        self.retried = set()
        return numbers

    def _hear_workers(self) -> None:
        """Read every worker's messages; remove workers that have ended and kill those over their limit."""
        now, noun = time.monotonic(), self.settings.work.noun
        for place, worker in self._living:
            # Look for its end before reading: then no message can follow the ones read here.
            ended = bool(ready([], [worker.child.pidfd], 0.0))
            try:
                self._listen(worker)
            except GarbledError as error:
                # Another writer has used the channel, such as a forked copy of the worker.
                self._end(place)
                reason = f"the process of {noun} sent an invalid reply: {error}"
                self._blame(worker, CRASHED, reason, reason)
                continue
            deadline = worker.deadline(self.settings.timeout_s)
            if ended:
                self._bury(place, worker)
            elif worker.is_worn_out and not worker.begun:
                self._end(place)
                self._try_again(worker)
            elif deadline is not None and now > deadline:
                self._end(place)
                limit = f"{self.settings.work.timeout_key}={self.settings.timeout_s:g}"
                loading = f"{noun} was not loaded within {LOAD_LIMIT_S:g} s"
                self._blame(worker, TIMED_OUT, f"{noun} did not return in {limit}", loading)

    def _listen(self, worker: Worker) -> None:
        """Process the messages that the worker has sent. Raises GarbledError for a message that no worker sends."""
        for line in worker.child.channel.take():
            message = read_message(line)
            worker.since = time.monotonic()
            if message == READY:
                worker.ready, self.failed_starts = True, 0
            elif message == WORN_OUT and worker.ready:
                worker.is_worn_out = True
            elif isinstance(message, str):
                self._note_failed_start(message)
            elif isinstance(message, int):
                if message not in worker.jobs or message in worker.begun:
                    raise GarbledError(f"it began {message}, which it does not have or has begun")
                worker.begun[message] = worker.since
            else:
                number, content = message
                if number not in worker.begun:
                    raise GarbledError(f"a reply for {number}, which it was not working on")
                try:
                    answer = self.settings.work.read(content)
                except ValueError as error:
                    raise GarbledError(str(error)) from None
                del worker.jobs[number], worker.begun[number]
                self.answers.append((number, answer))

    def _bury(self, place: int, worker: Worker) -> None:
        """Remove a worker that has died."""
        status, noun = self._end(place), self.settings.work.noun
        present = set(worker.begun)
        if present and -status in (signal.SIGTERM, signal.SIGINT) and not present & self.retried:
            # A scheduler signals all processes of a job, and the driver may still finish its step.
            self.retried |= present
            self._try_again(worker)
        elif worker.ready or status != 0:
            cause = how_ended(status)
            loading = f"a worker {cause} while it loaded {noun}"
            self._blame(worker, CRASHED, f"{noun} ended its process, which {cause}", loading)

    def _blame(self, worker: Worker, kind: str, reason: str, loading: str) -> None:
        """Fail the present job of a worker that was ended, or count its failed start; its other jobs wait again.

        Of several jobs that it was at nobody knows which one did it: they are tried again, once.
        loading: the reason of a failed start.
        """
        if not worker.ready:
            self._note_failed_start(loading)
            return
        present = set(worker.begun)
        blamed = present & self.retried if len(present) > 1 else present
        if kind == TIMED_OUT:
            oldest = min(worker.begun.values(), default=0.0)
            blamed = {number for number, begun in worker.begun.items() if begun == oldest}
        for number in blamed:
            del worker.jobs[number], worker.begun[number]
            self.answers.append((number, self.settings.work.failed(kind, reason)))
        self.retried |= set(worker.begun)
        self._try_again(worker)

    def _try_again(self, worker: Worker) -> None:
        """Let the jobs of an ended worker wait, in front of all others."""
        for job in reversed(worker.jobs.values()):
            self._queue(job).appendleft(job)

    def _note_failed_start(self, reason: str) -> None:
        self.failed_starts += 1
        if self.failed_starts >= MOST_FAILED_STARTS:
            self.failed_starts = 0
            self.driver.send(pickle.dumps(FailedStart(reason, self._forget_jobs())))

    def _end(self, place: int) -> int:
        """Kill the worker of a place and all that it has started; return its exit code, negative for a signal."""
        worker = self.workers[place]
        if worker is None:
            return 0
        self.workers[place] = None
        started, own = descendants(worker.child.pid), os.getpid()
        code = worker.child.end()
        end(lambda: [*living(started), *children_with(own, worker.mark, WORKER)], END_S)
        return code

    def _reap_adopted(self) -> None:
        """Reap ended processes that the user's code has orphaned, up to the first that is a worker."""
        workers = {worker.child.pid for _, worker in self._living}
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid not in workers:
            os.waitpid(ended.si_pid, 0)


def keep(driver: Channel) -> None:
    """Run the supervisor: receive WorkerSettings, then jobs, until the driver ends; send DoneJobs and FailedStart."""
    drop_unread_output()  # the user's code may print
    # The driver handles these signals; the supervisor ends with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with adopting_orphans():  # so that `close` finds them
        try:
            settings = pickle.loads(driver.receive())
        except EOFError:
            return
        supervisor = WorkerSupervisor(driver, settings)
        try:
            supervisor.serve()
        finally:
            supervisor.close()
