"""Call the reward function in processes of its own (`RewardProcesses`) or in this process (`RewardHere`).

A call scores a response, or with `GroupRewardSource` a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.group_function import Group, GroupRewardSource
from megatron_rl.scoring.outcome import Outcome, Sample, failed
from megatron_rl.user_code.user_calls import USERS
from megatron_rl.user_code.work_processes import WorkProcesses, job_of
from megatron_rl.user_code.worker import CRASHED, TIMED_OUT
from megatron_rl.user_code.worker_supervisor import WorkerSettings

MOST_FRUITLESS_TIMEOUTS = 16
"""Time-outs in one batch without a single score, after which a run that would stop anyway gives the batch up."""


class RewardProcesses(WorkProcesses):
    """A context manager: inside it processes wait for samples. The constructor starts nothing."""

    def __init__(self, source: RewardSource | GroupRewardSource, num_workers: int, timeout_s: float, give_up: bool):
        """timeout_s: seconds a call may take. give_up: end a batch whose calls all time out."""
        super().__init__(WorkerSettings(source, num_workers, timeout_s))
        self._give_up = give_up
        self._begun: dict[int, tuple[int, str | tuple[str, ...]]] = {}
        self._replies: dict[int, Any] = {}
        self._jobs = itertools.count()
        self._taking = threading.RLock()

    def begin(self, number: int, asked: Sample | Group) -> None:
        """Score a response, or a group, whose batch is not complete; `score` and `score_groups` take the outcome. Any
        thread may call this. number: the request of the response, or of the first of the group.
        """
        job = next(self._jobs)
        self._begun[number] = job, asked.solution
        self.submit([job_of(job, asked)])

    def score(self, samples: Sequence[Sample], numbers: Sequence[int] = ()) -> list[Outcome]:
        """Return one outcome per sample, in order; takes as long as the slowest sample. Raises RewardError as `take`.

        numbers: request numbers, if they may have begun.
        """
        return self._scored(samples, numbers)

    def score_groups(self, groups: Sequence[Group], numbers: Sequence[int] = ()) -> list[list[Outcome]]:
        """Return the outcomes of each group's rows, in order. numbers: with which `begin` may have been called. Raises
        RewardError as `take`.
        """
        return [for_rows(reply, group) for reply, group in zip(self._scored(groups, numbers), groups, strict=True)]

    def _scored(self, asked: Sequence[Sample | Group], numbers: Sequence[int]) -> list[Any]:
        """The replies to samples or groups, in order."""
        with self._taking:
            return self._taken(self._open_jobs(asked, numbers))

    def is_scored(self, numbers: Sequence[int]) -> bool:
        """Whether all of these that have begun have their outcome; does not wait. Any thread may call this."""
        if not self._taking.acquire(blocking=False):
            return False
        try:
            self._replies.update(self.take(waits=False))
            jobs = [self._begun[number][0] for number in numbers if number in self._begun]
            return all(job in self._replies for job in jobs)
        finally:
            self._taking.release()

    def _taken(self, jobs: Sequence[int]) -> list[Any]:
        replies = self._replies
        while missing := [job for job in jobs if job not in replies]:
            replies.update(self.take(waits=True))
            own = [replies[job] for job in jobs if job in replies]
            if self._give_up and len(own) < len(jobs) and _is_fruitless(own):
                self.cancel()
                self._begun.clear()
                reason = f"not tried, as {MOST_FRUITLESS_TIMEOUTS} samples timed out and none was scored"
                given_up = self.settings.work.failed(TIMED_OUT, reason)
                replies.update({job: given_up for job in missing if job not in replies})
        return [replies.pop(job) for job in jobs]

    def _open_jobs(self, asked: Sequence[Sample | Group], numbers: Sequence[int]) -> list[int]:
        """The jobs of samples or groups, of which those that have not begun are submitted."""
        jobs, new = [], []
        for row, one in enumerate(asked):
            job, solution = self._begun.pop(numbers[row], (None, "")) if numbers else (None, "")
            if job is None or solution != one.solution:
                job = next(self._jobs)
                new.append(job_of(job, one))
            jobs.append(job)
        if new:
            self.submit(new)
        return jobs


def _is_fruitless(replies: Sequence[Any]) -> bool:
    calls: list[list[Outcome]] = [reply if isinstance(reply, list) else [reply] for reply in replies]
    timeouts = sum(call[0].failure == TIMED_OUT for call in calls)
    return timeouts >= MOST_FRUITLESS_TIMEOUTS and all(outcome.failure for call in calls for outcome in call)


def for_rows(reply: list[Outcome], group: Group) -> list[Outcome]:
    """Return an outcome for each row of a group. A reply of one failure is that of all rows."""
    if len(reply) == len(group.rows):
        return reply
    only = reply[0] if len(reply) == 1 and reply[0].failure else failed(CRASHED, f"a reply of {len(reply)} scores")
    return [only] * len(group.rows)


class RewardHere(contextlib.nullcontext[Any]):
    """Replaces `RewardProcesses` in a run that is one process, for a debugger. Nothing ends a call that takes too long.

    Raises ConfigError when the function cannot be loaded.
    """

    def __init__(self, source: RewardSource | GroupRewardSource) -> None:
        super().__init__(self)
        self._call: Callable[[Any], Any] = source.load(passing=USERS)

    def begin(self, number: int, asked: Sample | Group) -> None:
        """Do nothing: a call would hold the run up now as well as later."""

    def is_scored(self, numbers: Sequence[int]) -> bool:
        """True: `score` takes no longer later."""
        return True

    def score(self, samples: Sequence[Sample], numbers: Sequence[int] = ()) -> list[Outcome]:
        """Return one outcome per sample, in order."""
        return self._scored(samples)

    def score_groups(self, groups: Sequence[Group], numbers: Sequence[int] = ()) -> list[list[Outcome]]:
        """Return the outcomes of each group's rows, in order."""
        return [for_rows(reply, group) for reply, group in zip(self._scored(groups), groups, strict=True)]

    def _scored(self, asked: Sequence[Sample | Group]) -> list[Any]:
        replies = [self._call(one) for one in asked]
        return asyncio.run(_all_of(replies)) if replies and inspect.isawaitable(replies[0]) else replies


async def _all_of(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*calls)
