"""The numbers of a report, from the records of finished runs. Pure.

Times are medians over the steps that count: those of every round but the first `warmup_steps`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron_rl.errors import ConfigError
from megatron_rl.trials.points import PlannedPoint
from megatron_rl.trials.record import REWARD, Record, is_current
from megatron_rl.trials.trial_outcome import TrialOutcome

PHASES = {
    "gen": ("gen",),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("update_critic", "update_actor"),
    "reshard": ("reshard",),
}
"""Column of the report -> phases of `timing_s` that it adds up; the remainder of a step is "rest"."""

REST = "rest"


@dataclass(frozen=True)
class Result:
    """The numbers of one finished run: seconds, bytes, and tokens per second of all ranks together.

    step_s: median, smallest, largest. phases_s: column -> seconds. memory_bytes, planned_memory_bytes: of the rank and
    phase with most, as measured and as planned for the same tensors. scores: mean rewards of all
    steps that have one, with those that do not count.
    """

    num_steps: int
    num_ranks: int
    step_s: tuple[float, float, float]
    phases_s: dict[str, float]
    tokens_per_s: float
    received_bytes: int
    bound_bytes: int
    exchange_s: float
    memory_bytes: float
    planned_memory_bytes: float
    scores: tuple[float, ...]

    @property
    def tokens_per_s_per_rank(self) -> float:
        return self.tokens_per_s / self.num_ranks


@dataclass(frozen=True)
class ResultRow:
    """One point in a report: its plan, its outcome, and its numbers if it finished."""

    planned: PlannedPoint
    outcome: TrialOutcome
    reason: str = ""
    seconds: float | None = None
    result: Result | None = None
    tail: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.planned.point.name

    @property
    def measured_over_planned(self) -> float | None:
        """The measured step time over the planned one; None without either."""
        if self.result is None or self.planned.expected is None:
            return None
        return self.result.step_s[0] / self.planned.expected.step_s


def result_of(record: Record, num_ranks: int, warmup_steps: int) -> Result:
    """The numbers of a record. Raises ConfigError for one that has no more than `warmup_steps` steps."""
    counted = record.counted(warmup_steps)
    if not counted:
        last = max(record.steps, default=0)
        raise ConfigError(f"warmup_steps={warmup_steps} must be less than {last}, the last step of point {record.name}")

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, 0.0) for metrics in counted)

    def spent(metrics: Mapping[str, float], names: Sequence[str]) -> float:
        return sum(metrics.get(f"timing_s/{name}", 0.0) for name in names)

    steps = [metrics["timing_s/step"] for metrics in counted]
    phases = {name: statistics.median(spent(metrics, parts) for metrics in counted) for name, parts in PHASES.items()}
    known = [name for names in PHASES.values() for name in names]
    phases[REST] = statistics.median(metrics["timing_s/step"] - spent(metrics, known) for metrics in counted)
    return Result(
        num_steps=len(counted),
        num_ranks=num_ranks,
        step_s=(statistics.median(steps), min(steps), max(steps)),
        phases_s=phases,
        tokens_per_s=median("perf/throughput") * num_ranks,
        received_bytes=max(record.received_bytes, default=0),
        bound_bytes=max(record.bound_bytes, default=0),
        exchange_s=median("reshard/exchange_s"),
        memory_bytes=_largest(record, "perf/memory_gb/") * 1e9,
        planned_memory_bytes=_largest(record, "perf/memory_planned_gb/") * 1e9,
        scores=tuple(metrics[REWARD] for _, metrics in sorted(record.steps.items()) if REWARD in metrics),
    )


def rows_of(
    planned: Sequence[PlannedPoint], records: Mapping[str, Record | None], warmup_steps: int
) -> list[ResultRow]:
    """One row for each point, in order. records: name of a point -> record; one of another configuration is ignored."""
    return [_row(point, records.get(point.point.name), warmup_steps) for point in planned]


def by_step_time(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows that finished, the fastest first."""
    finished = [(row.result.step_s[0], row) for row in rows if row.result is not None]
    return [row for _, row in sorted(finished, key=itemgetter(0))]


def memory_unit(finished: Sequence[ResultRow]) -> tuple[float, str]:
    """(bytes of the unit that suits the sizes of these rows, its name)."""
    largest = max(row.result.memory_bytes for row in finished if row.result is not None)
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def _row(planned: PlannedPoint, record: Record | None, warmup_steps: int) -> ResultRow:
    if planned.layout is None:
        return ResultRow(planned, TrialOutcome.INVALID, planned.reason)
    if record is None or not is_current(record, planned.point):
        return ResultRow(planned, TrialOutcome.NOT_RUN)
    result = None
    if record.outcome is TrialOutcome.FINISHED:
        result = result_of(record, planned.layout.num_ranks, warmup_steps)
    return ResultRow(planned, record.outcome, record.reason, record.seconds, result, tuple(record.tail))


def _largest(record: Record, prefix: str) -> float:
    sizes = [value for metrics in record.steps.values() for name, value in metrics.items() if name.startswith(prefix)]
    return max(sizes, default=0.0)
