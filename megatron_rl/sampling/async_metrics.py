"""Metrics of each step of an asynchronous run: idle shares, lost replicas, and one warning when it is slow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.observe.phase_clock import DRIVER
from megatron_rl.rollout.slices import largest_cache_usage
from megatron_rl.sampling.replica_states import ReplicaSlots
from megatron_rl.sampling.request_queue import RequestQueue

Note = Callable[[str, str, float, float, float], None]
"""(name, phase, start, stop, seconds that count): adds an interval to the run's timeline."""

WINDOW = 10
"""Number of steps over which `SpeedWarning` takes the mean."""
TRAINER_LIMIT, ROLLOUT_LIMIT = 0.3, 0.5
"""Shares of time that one side may be idle without a warning."""


class AsyncMetrics:
    """Counts from one `take` to the next."""

    def __init__(self, slots: ReplicaSlots, note: Note, counts: Mapping[str, int]) -> None:
        """counts: `RequestScheduler.counts` at the start of this process."""
        self._slots, self._note = slots, note
        self._since = time.time()
        self._waited_s = 0.0
        self._counts = dict(counts)

    def waited(self, start: float, stop: float) -> None:
        """The trainer has waited for responses."""
        self._waited_s += stop - start
        self._note(DRIVER, "gen", start, stop, stop - start)

    def take(self, queue: RequestQueue) -> dict[str, float]:
        """The metrics of a step."""
        now = time.time()
        elapsed, reports = max(now - self._since, 1e-9), queue.reports
        queue.reports = []
        busy = sum(report.stop - max(report.start, self._since) for report in reports)
        for report in reports:
            self._note(self._slots.all[report.replica].replica.name, "slice", report.start, report.stop, 0.0)
        counts = dict(queue.scheduler.counts)
        new = {f"rollout/{name}": float(count - self._counts.get(name, 0)) for name, count in counts.items()}
        num_replicas = len(self._slots.generating)
        metrics = {
            "rollout/idle_share": max(0.0, 1 - busy / (elapsed * max(1, num_replicas))),
            "rollout/pause_s": max((report.swap_seconds for report in reports), default=0.0),
            "rollout/replicas": float(num_replicas),
            "rollout/replicas_lost": float(self._slots.num_lost),
            "rollout/replicas_left": float(self._slots.num_left),
            "trainer/idle_share": min(1.0, self._waited_s / elapsed),
            "perf/requests_in_engines": float(sum(map(len, queue.engines))),
            "perf/requests_away": float(len(queue.answers.away)),
            "perf/rollout_version": float(max((slot.last_version or 0 for slot in self._slots.generating), default=0)),
        }
        self._since, self._waited_s, self._counts = now, 0.0, counts
        return metrics | new | largest_cache_usage(reports)


def what_to_change(trainer_idle: Sequence[float], rollout_idle: Sequence[float], ahead: int) -> str | None:
    """Say which side waits and what to change; None if neither waits too long.

    trainer_idle, rollout_idle: idle share of each step. ahead: trainer.rollout_ahead.
    """
    trainer, rollout = (sum(shares) / len(shares) for shares in (trainer_idle, rollout_idle))
    if trainer <= TRAINER_LIMIT and rollout <= ROLLOUT_LIMIT:
        return None
    measured = (
        f"in the last {len(trainer_idle)} steps training waited for responses {trainer:.0%} of the time, and rollout "
        f"replicas idled {rollout:.0%}: "
    )
    if trainer > TRAINER_LIMIT and rollout > TRAINER_LIMIT:
        advice = f"both wait for the longest responses; raise trainer.rollout_ahead={ahead}, or use fewer ranks of each"
    elif trainer > TRAINER_LIMIT:
        advice = (
            "give the rollout more of the ranks, or let it generate more together (rollout.max_num_seqs); where it "
            f"waited for single long responses, raise trainer.rollout_ahead={ahead}"
        )
    else:
        advice = "give training more of the ranks, and the rollout fewer"
    return measured + advice


class SpeedWarning:
    """Warn once if the last steps were mostly waiting. The first step is left out: nothing was generated ahead of it.

    ahead: trainer.rollout_ahead.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._trainer: deque[float] = deque(maxlen=WINDOW)
        self._rollout: deque[float] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._has_warned = False

    def note(self, trainer_idle: float, rollout_idle: float) -> str | None:
        """Take the idle shares of one more step; return the warning, at most once in a run."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._trainer.append(trainer_idle)
            self._rollout.append(rollout_idle)
        if self._has_warned or len(self._trainer) < WINDOW:
            return None
        warning = what_to_change(self._trainer, self._rollout, self._ahead)
        self._has_warned = warning is not None
        return warning
