"""From a finished run's records to the numbers of a report, and their ratios to the baseline's. Pure.

Times are medians over the steps that count: of every round all but the first `warmup_steps`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from megatron_rl.trials.planned import PlannedPoint
from megatron_rl.trials.record import Record, is_current
from megatron_rl.trials.trial_outcome import TrialOutcome

PHASES = {
    "gen": ("gen",),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("update_critic", "update_actor"),
    "reshard": ("reshard",),
}
"""Column of the report -> phases of `timing_s` that it adds up; what a step spends elsewhere is "rest"."""

REST = "rest"


@dataclass(frozen=True)
class Result:
    """One finished run. Seconds, bytes, tokens per second of all ranks together.

    step_s: median, smallest, largest. phases_s: of the columns, in order. memory_bytes: of the rank and phase with
    most, as measured and as planned for the same tensors. scores: mean reward of every step, the first ones too.
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
class Ratios:
    """A result over the baseline's."""

    step_s: float
    tokens_per_s_per_rank: float
    memory_bytes: float


@dataclass(frozen=True)
class ResultRow:
    """One point in a report: what was planned, how it ended, and its numbers where it finished."""

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
        """Of the step time."""
        if self.result is None or self.planned.expected is None:
            return None
        return self.result.step_s[0] / self.planned.expected.step_s


def result_of(record: Record, num_ranks: int, warmup_steps: int) -> Result:
    """The numbers of a record that has more than `warmup_steps` steps."""
    counted = record.counted(warmup_steps)

    def median(name: str) -> float:
        return statistics.median(metrics.get(name, 0.0) for metrics in counted)

    steps = [metrics["timing_s/step"] for metrics in counted]
    phases = {
        column: statistics.median(sum(metrics.get(f"timing_s/{name}", 0.0) for name in names) for metrics in counted)
        for column, names in PHASES.items()
    }
    known = [name for names in PHASES.values() for name in names]
    phases[REST] = statistics.median(
        metrics["timing_s/step"] - sum(metrics.get(f"timing_s/{name}", 0.0) for name in known) for metrics in counted
    )
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
        scores=tuple(metrics["critic/score/mean"] for _, metrics in sorted(record.steps.items())),
    )


def rows_of(
    planned: Sequence[PlannedPoint], records: Mapping[str, Record | None], warmup_steps: int
) -> list[ResultRow]:
    """One for each point, in their order. records: by name; of another configuration they count as none."""
    return [_row(point, records.get(point.point.name), warmup_steps) for point in planned]


def ratios(row: ResultRow, rows: Sequence[ResultRow], baseline: str | None) -> Ratios | None:
    """None where this point or the baseline has no result, or there is no baseline."""
    base = next((other.result for other in rows if other.name == baseline), None)
    if base is None or row.result is None:
        return None
    mine = row.result
    return Ratios(
        mine.step_s[0] / base.step_s[0],
        mine.tokens_per_s_per_rank / base.tokens_per_s_per_rank,
        mine.memory_bytes / base.memory_bytes,
    )


def by_step_time(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Those that finished, the fastest first."""
    finished = [(row.result.step_s[0], row) for row in rows if row.result is not None]
    return [row for _, row in sorted(finished, key=itemgetter(0))]


def memory_unit(finished: Sequence[ResultRow]) -> tuple[float, str]:
    """Bytes of the unit that suits their sizes, and its name."""
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
