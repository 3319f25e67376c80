"""The record of a trial: one JSON file, replaced atomically, which decides what the next start repeats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.durable import write_text
from megatron_rl.observe.summary import finite_or_null
from megatron_rl.trials.points import Point
from megatron_rl.trials.trial import Trial
from megatron_rl.trials.trial_outcome import FAILED, Attempt, TrialOutcome

RECORD, SUMMARY = "record.json", "summary.json"
STEP_S, REWARD = "timing_s/step", "critic/score/mean"
KEPT = ("timing_s/", "perf/", "reshard/", REWARD)
"""Beginnings of the names of metrics that reports need."""
NUM_TAIL_LINES = 20


@dataclass(frozen=True)
class Record:
    """One attempt at a point.

    key: the point's. steps: step -> metric -> value. received_bytes, bound_bytes: bytes that each rank received in the
    last resharding to rollout mode, and the least that is possible. tail: the last lines of its output. further: the
    metrics of steps of the point's other rounds, empty in a file.
    """

    name: str
    key: str
    outcome: TrialOutcome
    reason: str = ""
    exit_code: int | None = None
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    received_bytes: list[int] = field(default_factory=list)
    bound_bytes: list[int] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    further: list[dict[str, float]] = field(default_factory=list)

    def counted(self, warmup_steps: int) -> list[dict[str, float]]:
        """The metrics of the steps after `warmup_steps`, and of the further ones."""
        return [metrics for step, metrics in sorted(self.steps.items()) if step > warmup_steps] + self.further


def is_current(record: Record | None, point: Point) -> bool:
    """Whether a record belongs to this point with its present configuration."""
    return record is not None and record.key == point.key


def must_run(record: Record | None, point: Point, retry_failed: bool) -> bool:
    """Whether to start a point: never again if it finished, always if it was interrupted, on demand if it failed."""
    if record is None or not is_current(record, point):
        return True
    if record.outcome is TrialOutcome.FINISHED:
        return False
    return retry_failed or record.outcome not in (*FAILED, TrialOutcome.INVALID)


def read_record(folder: Path) -> Record | None:
    """The record in a point's folder; None without one, and for one of another version, or one that is damaged."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        steps = {int(step): _numbers(metrics) for step, metrics in content["steps"].items()}
        record = Record(**(content | {"outcome": TrialOutcome(content["outcome"]), "steps": steps}))
        return record if _is_whole(record) else None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of a step as numbers. null is one that was not finite. Raises TypeError, OverflowError."""
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _is_whole(record: Record) -> bool:
    """Whether a record that was read has what reports are made of, in the types that they take."""
    texts = (record.name, record.key, record.reason, *record.tail)
    sizes = (*record.received_bytes, *record.bound_bytes)
    steps = record.steps.values()
    has_steps = all(map(_can_be_reported, steps)) and any(REWARD in metrics for metrics in steps)
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(record.tail, list)
        and all(type(size) is int and 0 <= size < 1 << 63 for size in sizes)
        and isinstance(record.seconds, int | float)
        and not record.further
        and (record.outcome is not TrialOutcome.FINISHED or has_steps)
    )


def _can_be_reported(metrics: Mapping[str, float]) -> bool:
    return all(math.isfinite(value) for value in metrics.values()) and metrics[STEP_S] > 0


def write_record(folder: Path, record: Record) -> None:
    """Replace the record in a point's folder atomically."""
    write_text(folder / RECORD, json.dumps(finite_or_null(asdict(record)), indent=1, allow_nan=False))


def record_of(point: Point, trial: Trial, attempt: Attempt) -> Record:
    """The record of a trial that has ended after one attempt, with the numbers of the steps that it took."""
    summary_file = trial.run / SUMMARY
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    return Record(
        point.name,
        point.key,
        attempt.outcome,
        attempt.reason,
        attempt.exit_code,
        round(attempt.seconds, 1),
        point.settings,
        steps={step: _kept(metrics) for step, metrics in trial.recorded().items() if step > 0},  # 0: before training
        received_bytes=summary.get("transition_bytes_received_per_rank", []),
        bound_bytes=summary.get("transition_bytes_lower_bound_per_rank", []),
        tail=[] if attempt.outcome is TrialOutcome.FINISHED else attempt.tail(NUM_TAIL_LINES),
    )


def _kept(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(KEPT)}


def together(records: Sequence[Record | None], warmup_steps: int) -> Record | None:
    """The rounds of one point as one record: the first, with the steps of all others that count.

    All rounds count, not the fastest alone: on an uneven machine rounds of one point differ by more than points do. A
    round that did not finish, or has not run yet, does not count. Returns None without a first round, and the first if
    it did not finish.
    """
    first, *others = records
    if first is None or first.outcome is not TrialOutcome.FINISHED:
        return first
    rounds = [record for record in others if record is not None and record.key == first.key]
    finished = [record for record in rounds if record.outcome is TrialOutcome.FINISHED]
    return replace(first, further=[metrics for record in finished for metrics in record.counted(warmup_steps)])
