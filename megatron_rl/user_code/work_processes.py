"""The driver's side of a supervisor: start it, send jobs, take replies, replace it if it is lost."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from megatron_rl.cluster.channel import Channel, ServedChannel
from megatron_rl.cluster.child_processes import how_ended, variables_with
from megatron_rl.cluster.stale_processes import KEEPER, end, processes_with
from megatron_rl.errors import RewardError
from megatron_rl.observe.terminal import warn
from megatron_rl.user_code.worker_supervisor import Cancel, DoneJobs, FailedStart, Job, Notice, WorkerSettings

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from megatron_rl.cluster.channel import Channel
from megatron_rl.user_code.worker_supervisor import keep
keep(Channel.of_descriptor(int(sys.argv[1])))
"""
"""The supervisor's program. It needs a fresh interpreter, because a driver with threads cannot fork safely."""

EXIT_TIMEOUT_S = 10.0

MOST_LOST = 3
"""Keepers in a row that may be lost without a reply between; then it is no accident."""


class WorkProcesses:
    """A context manager: inside it a supervisor and its workers wait for jobs. The constructor starts nothing.

    A supervisor that has died, as by the kernel where memory is short, is replaced, and what its workers have started
    is killed. The jobs that have no reply are done again.
    """

    def __init__(self, settings: WorkerSettings):
        self.settings = settings
        self._open: dict[int, Job] = {}  # jobs without a reply, by their numbers
        self._changing = threading.Lock()
        self._num_lost, self._failure = 0, ""

    def __enter__(self) -> Self:
        """Start the processes and do not wait for them; they load the user's code meanwhile."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes, also those that are busy."""
        self._end()

    @property
    def num_open(self) -> int:
        """The number of jobs without a reply; any thread may ask."""
        return len(self._open)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have jobs done; the replies come with `take`. Any thread may call this, and it never waits."""
        with self._changing:
            self._open |= {job.number: job for job in jobs}
            self._send(list(jobs))

    def notify(self, notice: Notice) -> None:
        """Send something to the worker of a key, without a reply."""
        with self._changing:
            self._send(notice)

    def cancel(self) -> None:
        """Give up all jobs so far; no reply to them comes."""
        with self._changing:
            self._open.clear()
            self._send(Cancel())

    def take(self, waits: bool) -> list[tuple[int, Any]]:
        """Return (number, reply) of the jobs that are done. waits: until one is, if any is open.

        Raises RewardError when no worker can load the user's code, and when supervisors are lost again and again.
        """
        answers: list[tuple[int, Any]] = []
        while not self._failure:
            try:
                message = self._arrived.get(block=waits and not answers and bool(self._open))
            except Empty:
                return answers
            answers += self._hear(message)
        if not answers:
            failure, self._failure = self._failure, ""
            raise RewardError(failure)
        return answers

    def _hear(self, message: bytes | None) -> list[tuple[int, Any]]:
        """Process a message of the supervisor's, or its end; returns the replies in it to open jobs."""
        with self._changing:
            if message is None:
                self._replace()
                return []
            match pickle.loads(message):
                case DoneJobs(content):
                    self._num_lost = 0
                    return [(number, answer) for number, answer in content if self._open.pop(number, None) is not None]
                case FailedStart(reason, numbers):
                    self._failure = reason
                    for number in numbers:
                        self._open.pop(number, None)
        return []

    def _start(self) -> None:
        ours, theirs = Channel.pair()
        self._mark, paths = uuid.uuid4().hex, [path for path in sys.path if isinstance(path, str)]
        # Ctrl-C must not reach the supervisor: the driver handles it, and then ends the supervisor.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno()), json.dumps(paths)],
            env=variables_with(**{KEEPER: self._mark}),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._arrived: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = ServedChannel(ours, self._arrived.put)
        self._send(self.settings)

    def _end(self) -> int:
        """End the supervisor and all that comes from it; returns its exit code."""
        self._channel.close()
        try:
            code = self._supervisor.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            code = self._supervisor.wait()
        if code != 0:
            end(lambda: processes_with(self._mark, KEEPER), EXIT_TIMEOUT_S)
        return code

    def _replace(self) -> None:
        how, noun = how_ended(self._end()), self.settings.work.noun
        self._num_lost += 1
        what = f"the process that keeps the workers of {noun} {how}"
        if self._num_lost >= MOST_LOST:
            self._failure = f"{what}; {self._num_lost} of them were lost one after the other without a reply in between"
            self._open.clear()
        else:
            warn(f"{what}; another one does its {len(self._open)} open jobs")
        self._start()
        self._send(list(self._open.values()))

    def _send(self, message: list[Job] | Notice | Cancel | WorkerSettings) -> None:
        self._channel.send(pickle.dumps(message))


def job_of(number: int, content: Any, key: int | None = None) -> Job:
    """Return a job with this content. key: as `Job.key`."""
    return Job(number, pickle.dumps(content), key)
