"""The golden file: what a nightly run is to reach, in bands, and the comparison. Pure; no process is started here.

    {"steps": 4, "stop_after_step": 2, "first_step_within_s": 600, "step_within_s": 120,
     "metrics": {"critic/score/mean": {"values": [0.52, ...], "below": 0.1, "above": null},
                 "perf/throughput": {"values": [150.0], "over": "median", "relative": true, "below": 0.7}}}

`values` has one number for each step, or one where `over` is "median": of all steps. `below` and `above` say how far a
number may be from its golden one on either side, as a share of it where `relative`; null: any far.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError

OVER = ("steps", "median")

Recorded = Mapping[int, Mapping[str, float]]
"""Step -> metric -> value, as read from metrics.jsonl."""


@dataclass(frozen=True)
class Band:
    """One metric's golden values and how far from them a run may be."""

    values: tuple[float, ...]
    below: float | None = None
    above: float | None = None
    relative: bool = False
    over: str = "steps"

    def limits(self, value: float) -> tuple[float, float]:
        """Smallest and largest number that passes for one golden `value`."""
        unit = abs(value) if self.relative else 1.0
        low = -math.inf if self.below is None else value - self.below * unit
        high = math.inf if self.above is None else value + self.above * unit
        return low, high


@dataclass(frozen=True)
class Comparison:
    """Of one number. step: None for a median. found: None where the run recorded nothing."""

    metric: str
    step: int | None
    golden: float
    low: float
    high: float
    found: float | None

    @property
    def passed(self) -> bool:
        """A number inside its band; NaN is in none."""
        return self.found is not None and self.low <= self.found <= self.high


@dataclass(frozen=True)
class Golden:
    """What one golden file says. stop_after_step: 0 lets the run end by itself; times are seconds without progress."""

    steps: int
    stop_after_step: int
    first_step_within_s: float
    step_within_s: float
    metrics: dict[str, Band]

    def compare(self, recorded: Recorded) -> list[Comparison]:
        """Every comparison, metric by metric, step by step."""
        return [one for metric, band in self.metrics.items() for one in self._compared(metric, band, recorded)]

    def renewed(self, recorded: Recorded) -> Golden:
        """The same bands around what was recorded. Raises ConfigError where a number is missing or not finite."""
        missing = [
            f"{one.metric} of step {one.step}"
            for one in self.compare(recorded)
            if one.found is None or not math.isfinite(one.found)
        ]
        if missing:
            raise ConfigError(f"the golden file cannot be renewed: the run recorded no {', no '.join(missing)}")
        found: dict[str, list[float]] = {}
        for one in self.compare(recorded):
            found.setdefault(one.metric, []).append(float(f"{one.found:.6g}"))
        bands = {name: dataclasses.replace(band, values=tuple(found[name])) for name, band in self.metrics.items()}
        return dataclasses.replace(self, metrics=bands)

    def _compared(self, metric: str, band: Band, recorded: Recorded) -> Iterator[Comparison]:
        def found(step: int) -> float | None:
            return recorded.get(step, {}).get(metric)

        if band.over == "median":
            known = [value for step in range(1, self.steps + 1) if (value := found(step)) is not None]
            median = statistics.median(known) if known else None
            yield Comparison(metric, None, band.values[0], *band.limits(band.values[0]), median)
            return
        for step, value in enumerate(band.values, start=1):
            yield Comparison(metric, step, value, *band.limits(value), found(step))


def read_golden(path: Path) -> Golden:
    """Raises ConfigError for a file that is not there, no JSON, or does not say what is needed."""
    if not path.is_file():
        raise ConfigError(f"no golden file at {path}; the one of this repository is configs/nightly_golden.json")
    try:
        content = json.loads(path.read_text())
        bands = {
            metric: Band(**(band | {"values": tuple(band["values"])})) for metric, band in content["metrics"].items()
        }
        golden = Golden(**(content | {"metrics": bands}))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no golden file: {error!r}; see configs/nightly_golden.json for one") from error
    problems = [*_wrong_numbers(golden)] or [*_problems(golden)]
    if problems:
        raise ConfigError(f"{path} is no golden file: {'; '.join(problems)}")
    return golden


def write_golden(golden: Golden, path: Path) -> None:
    """One line per metric, so that a renewed file is easy to compare with the one before."""
    content: dict[str, Any] = dataclasses.asdict(golden)
    metrics = content.pop("metrics")
    head = [f'  "{name}": {json.dumps(value)},' for name, value in content.items()]
    bands = ",\n".join(f"    {json.dumps(metric)}: {json.dumps(band)}" for metric, band in metrics.items())
    path.write_text("\n".join(["{", *head, '  "metrics": {', bands, "  }", "}"]) + "\n")


def _wrong_numbers(golden: Golden) -> Iterator[str]:
    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf

    for name in ("steps", "stop_after_step"):
        if type(value := getattr(golden, name)) is not int:
            yield f"{name}={value!r:.80} must be a whole number"
    for name in ("first_step_within_s", "step_within_s"):
        if not is_number(value := getattr(golden, name)):
            yield f"{name}={value!r:.80} must be a finite number"
    for metric, band in golden.metrics.items():
        given = [*band.values, *(limit for limit in (band.below, band.above) if limit is not None)]
        wrong = [value for value in given if not is_number(value)]
        if wrong:
            yield f"{metric}: {wrong[0]!r:.80} must be a finite number"


def _problems(golden: Golden) -> Iterator[str]:
    if not 0 <= golden.stop_after_step < golden.steps:
        yield f"stop_after_step={golden.stop_after_step} must be from 0 to steps - 1 = {golden.steps - 1}"
    for metric, band in golden.metrics.items():
        wanted = 1 if band.over == "median" else golden.steps
        if band.over not in OVER:
            yield f"{metric}: over={band.over} must be one of {', '.join(OVER)}"
        elif len(band.values) != wanted:
            yield f"{metric}: {len(band.values)} values, and over={band.over} needs {wanted}"
