"""The golden file: the metrics that a nightly run must reach, in bands, and the comparison with them.

    {"steps": 4, "stop_after_step": 2, "first_step_within_s": 600, "step_within_s": 120,
     "metrics": {"critic/score/mean": {"values": [0.52, ...], "below": 0.1, "above": null},
                 "perf/throughput": {"values": [150.0], "over": "median", "relative": true, "below": 0.7}}}

`values` has one number for each step; if `over` is "median", the median over all steps alone. `below` and `above` say
how far a number may be from its golden value on either side, as a share of it if `relative`; null: no limit.
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

LARGEST = 1e100
"""Of a number, so that none of what is computed from it is too large for a float."""
OVER = ("steps", "median")

Recorded = Mapping[int, Mapping[str, float]]
"""Step -> metric -> value, from metrics.jsonl."""


@dataclass(frozen=True)
class Band:
    """The golden values of one metric and the distance that a run may have from them."""

    values: tuple[float, ...]
    below: float | None = None
    above: float | None = None
    relative: bool = False
    over: str = "steps"

    def limits(self, value: float) -> tuple[float, float]:
        """(smallest, largest) number that passes for one golden `value`."""
        unit = abs(value) if self.relative else 1.0
        low = -math.inf if self.below is None else value - self.below * unit
        high = math.inf if self.above is None else value + self.above * unit
        return low, high


@dataclass(frozen=True)
class Comparison:
    """One number next to its golden value. step: None for a median. found: None if the run recorded nothing."""

    metric: str
    step: int | None
    golden: float
    low: float
    high: float
    found: float | None

    @property
    def passed(self) -> bool:
        """Whether the number is inside its band; NaN never is."""
        return self.found is not None and self.low <= self.found <= self.high


@dataclass(frozen=True)
class Golden:
    """The content of a golden file. stop_after_step: 0: the run is not stopped. first_step_within_s, step_within_s:
    seconds without a step after which the run counts as hanging, at its start and later.
    """

    steps: int
    stop_after_step: int
    first_step_within_s: float
    step_within_s: float
    metrics: dict[str, Band]

    def compare(self, recorded: Recorded) -> list[Comparison]:
        """All comparisons, metric by metric, step by step."""
        return [
            comparison for metric, band in self.metrics.items() for comparison in self._compared(metric, band, recorded)
        ]

    def renewed(self, recorded: Recorded) -> Golden:
        """These bands around the recorded numbers. Raises ConfigError if a number is missing or not finite."""
        values: dict[str, list[float]] = {name: [] for name in self.metrics}
        missing = []
        for number in self.compare(recorded):
            if number.found is None or not math.isfinite(number.found):
                missing.append(f"{number.metric} of step {number.step}")
            else:
                values[number.metric].append(float(f"{number.found:.6g}"))
        if missing:
            raise ConfigError(f"the golden file cannot be renewed: the run recorded no {', no '.join(missing)}")
        bands = {name: dataclasses.replace(band, values=tuple(values[name])) for name, band in self.metrics.items()}
        return dataclasses.replace(self, metrics=bands)

    def _compared(self, metric: str, band: Band, recorded: Recorded) -> Iterator[Comparison]:
        values = [recorded.get(step, {}).get(metric) for step in range(1, self.steps + 1)]
        if band.over == "median":
            known = [value for value in values if value is not None]
            median = statistics.median(known) if known else None
            yield Comparison(metric, None, band.values[0], *band.limits(band.values[0]), median)
            return
        for step, (golden, value) in enumerate(zip(band.values, values, strict=True), start=1):
            yield Comparison(metric, step, golden, *band.limits(golden), value)


def read_golden(path: Path) -> Golden:
    """The content of a file. Raises ConfigError if it is missing, no JSON, or does not have something."""
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
    """Write one line per metric, so that a renewed file is easy to compare with the previous one."""
    content: dict[str, Any] = dataclasses.asdict(golden)
    metrics = content.pop("metrics")
    head = [f'  "{name}": {json.dumps(value)},' for name, value in content.items()]
    bands = ",\n".join(f"    {json.dumps(metric)}: {json.dumps(band)}" for metric, band in metrics.items())
    path.write_text("\n".join(["{", *head, '  "metrics": {', bands, "  }", "}"]) + "\n")


def _wrong_numbers(golden: Golden) -> Iterator[str]:
    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST

    for name in ("steps", "stop_after_step"):
        if type(value := getattr(golden, name)) is not int:
            yield f"{name}={value!r:.80} must be a whole number"
    for name in ("first_step_within_s", "step_within_s"):
        if not is_number(value := getattr(golden, name)):
            yield f"{name}={value!r:.80} must be a number of at most {LARGEST:g}"
    for metric, band in golden.metrics.items():
        given = [*band.values, *(limit for limit in (band.below, band.above) if limit is not None)]
        wrong = [value for value in given if not is_number(value)]
        if wrong:
            yield f"{metric}: {wrong[0]!r:.80} must be a number of at most {LARGEST:g}"


def _problems(golden: Golden) -> Iterator[str]:
    if not 0 <= golden.stop_after_step < golden.steps:
        yield f"stop_after_step={golden.stop_after_step} must be from 0 to steps - 1 = {golden.steps - 1}"
    for metric, band in golden.metrics.items():
        wanted = 1 if band.over == "median" else golden.steps
        if band.over not in OVER:
            yield f"{metric}: over={band.over} must be one of {', '.join(OVER)}"
        elif len(band.values) != wanted:
            yield f"{metric}: {len(band.values)} values, and over={band.over} needs {wanted}"
