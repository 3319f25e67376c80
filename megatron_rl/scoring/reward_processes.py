"""Call the reward function in processes of its own (`RewardProcesses`) or in this process (`RewardHere`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from megatron_rl.scoring.function import RewardSource, is_async, load_reward_function
from megatron_rl.scoring.outcome import Outcome, Sample, failed, score_sample, score_sample_later
from megatron_rl.user_code.user_calls import USERS
from megatron_rl.user_code.work import TIMED_OUT
from megatron_rl.user_code.work_processes import WorkProcesses, job_of
from megatron_rl.user_code.worker_supervisor import WorkerSettings

MOST_FRUITLESS_TIMEOUTS = 16
"""Time-outs in one batch without a single score, after which a run that would stop anyway gives the batch up."""


class RewardProcesses(WorkProcesses):
    """A context manager: inside it processes wait for samples. The constructor starts nothing."""

    def __init__(self, source: RewardSource, num_workers: int, timeout_s: float, give_up: bool):
        """timeout_s: seconds a sample may take. give_up: end a batch whose samples all time out."""
        super().__init__(WorkerSettings(source, num_workers, timeout_s))
        self._give_up = give_up
        self._begun: dict[int, tuple[int, str]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._jobs = itertools.count()

    def begin(self, answer: int, sample: Sample) -> None:
        """Score a response whose batch is not complete; `score` takes its outcome. Any thread may call this."""
        job = next(self._jobs)
        self._begun[answer] = job, sample.solution
        self.submit([job_of(job, sample)])

    def score(self, samples: Sequence[Sample], numbers: Sequence[int] = ()) -> list[Outcome]:
        """Return one outcome per sample, in order; takes as long as the slowest sample. Raises RewardError as `take`.

        numbers: request numbers, if they may have begun.
        """
        jobs, outcomes = self._open_jobs(samples, numbers), self._outcomes
        while missing := [job for job in jobs if job not in outcomes]:
            outcomes.update(self.take(waits=True))
            own = [outcomes[job] for job in jobs if job in outcomes]
            if self._give_up and len(own) < len(jobs) and _is_fruitless(own):
                self.cancel()
                self._begun.clear()
                reason = f"not tried, as {MOST_FRUITLESS_TIMEOUTS} samples timed out and none was scored"
                outcomes.update({job: failed(TIMED_OUT, reason) for job in missing if job not in outcomes})
        return [outcomes.pop(job) for job in jobs]

    def _open_jobs(self, samples: Sequence[Sample], numbers: Sequence[int]) -> list[int]:
        """The jobs of samples, of which those that have not begun are submitted."""
        jobs, new = [], []
        for row, sample in enumerate(samples):
            job, solution = self._begun.pop(numbers[row], (None, "")) if numbers else (None, "")
            if job is None or solution != sample.solution:
                job = next(self._jobs)
                new.append(job_of(job, sample))
            jobs.append(job)
        if new:
            self.submit(new)
        return jobs


def _is_fruitless(outcomes: Any) -> bool:
    timeouts = sum(outcome.failure == TIMED_OUT for outcome in outcomes)
    return timeouts >= MOST_FRUITLESS_TIMEOUTS and all(outcome.failure for outcome in outcomes)


class RewardHere(contextlib.nullcontext[Any]):
    """Replaces `RewardProcesses` in a run that is one process, for a debugger. Nothing ends a call that takes too long.

    Raises ConfigError when the function cannot be loaded.
    """

    def __init__(self, source: RewardSource) -> None:
        super().__init__(self)
        self._function = load_reward_function(source)

    def begin(self, answer: int, sample: Sample) -> None:
        """Do nothing: a call would hold the run up now as well as later."""

    def score(self, samples: Sequence[Sample], numbers: Sequence[int] = ()) -> list[Outcome]:
        """Return one outcome per sample, in order."""
        if is_async(self._function):
            return asyncio.run(self._score_side_by_side(samples))
        return [score_sample(self._function, sample, passing=USERS) for sample in samples]

    async def _score_side_by_side(self, samples: Sequence[Sample]) -> list[Outcome]:
        return await asyncio.gather(*(score_sample_later(self._function, sample, passing=USERS) for sample in samples))
