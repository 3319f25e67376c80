"""What the page of a run shows, as plain data: from records to curves, times, tables, samples and plans. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.observe.picture_style import LINE_PANELS, STACKED, phase_color
from megatron_rl.observe.sample_files import RecordedStep, read_step
from megatron_rl.plain_values import plain_text
from megatron_rl.view.run_files import TRAINING, RunRecord, at, finite, json_lines
from megatron_rl.view.sample_life import TABLE_NAMES, TOKEN_NUMBERS, check_rows, sample_life
from megatron_rl.view.sample_pictures import digests_of

MEMORY, PLANNED_MEMORY = "perf/memory_gb/", "perf/memory_planned_gb/"
SECONDS = "timing_s/"
ACCURACY = "val-core/"
Metrics = dict[str, tuple[list[int], list[float | None]]]


def page_data(records: Sequence[RunRecord], most_samples: int) -> dict[str, Any]:
    """Return the data of the page of one run or two: everything but samples. most_samples: as for `page_samples`."""
    runs = [run_data(record) for record in records]
    names = dict.fromkeys(name for run in runs for name in run["metrics"])
    phases = dict.fromkeys(
        [name.removeprefix(SECONDS) for name in names if name.startswith(SECONDS)]
        + [call["name"] for run in runs for call in run["calls"]]
    )
    return {
        "runs": runs,
        "panels": panels(names),
        "stacked": [phase for phase in STACKED if phase in phases],
        "colors": {phase: phase_color(phase) for phase in phases},
        "token_numbers": TOKEN_NUMBERS,
        "differences": differences([record.plan for record in records]),
        "most_samples": most_samples,
    }


def panels(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the panels of curves.png that have a metric of these names."""
    known = list(names)
    accuracy = [name for name in known if name.startswith(ACCURACY) and not name.endswith("/std")]
    held_out = ("Held-out accuracy", {name: name.removeprefix(ACCURACY) for name in accuracy}, "linear")
    described = [
        {"title": title, "scale": scale, "names": {name: text for name, text in labels.items() if name in known}}
        for title, labels, scale in (held_out, *LINE_PANELS)
    ]
    return [panel for panel in described if panel["names"]]


def run_data(record: RunRecord) -> dict[str, Any]:
    """Return what the page has of one run. metrics: name -> (steps that logged it, its values); a value that was not
    finite is None.
    """
    metrics: Metrics = {}
    for line in record.metrics:
        for name, value in line.items():
            if name != "step":
                steps, values = metrics.setdefault(name, ([], []))
                steps.append(line["step"])
                values.append(value)
    first = min((call["start"] for call in record.calls), default=0.0)
    calls = [call | {"start": call["start"] - first, "stop": call["stop"] - first} for call in record.calls]
    return {
        "name": plain_text(record.folder.name or str(record.folder)),
        "folder": plain_text(str(record.folder)),
        "ended": record.summary is not None,
        "summary": record.summary or {},
        "steps": [line["step"] for line in record.metrics],
        "metrics": metrics,
        "calls": calls,
        "plan": plan_rows(metrics, record.plan),
        "recorded": {str(step): file.name for step, file in record.samples.items()},
    }


def plan_rows(metrics: Metrics, plan: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return planned and measured numbers of each phase: gigabytes of the fullest rank in the fullest step, and seconds
    of the median step.
    """

    def values(name: str) -> list[float]:
        return [value for value in metrics.get(name, ([], []))[1] if value is not None]

    rows = []
    for name in metrics:
        if name.startswith(MEMORY):
            phase = name.removeprefix(MEMORY)
            planned, measured = values(f"{PLANNED_MEMORY}{phase}"), values(name)
            rows.append(plan_row("GB", phase, max(planned, default=None), max(measured, default=None)))
    stated = at(plan, "plan", "time", "seconds")
    seconds = {phase: finite(value) for phase, value in stated.items()} if isinstance(stated, dict) else {}
    timed = [name.removeprefix(SECONDS) for name in metrics if name.startswith(SECONDS)]
    for phase in dict.fromkeys((*seconds, *timed)):
        measured = values(f"{SECONDS}{phase}")
        rows.append(plan_row("seconds", phase, seconds.get(phase), median(measured) if measured else None))
    return rows


def plan_row(unit: str, phase: str, planned: float | None, measured: float | None) -> dict[str, Any]:
    """Return one row of the plan next to the measured."""
    return {"unit": unit, "phase": phase, "planned": planned, "measured": measured}


def differences(plans: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, Any, Any]]:
    """Return (key, value of the first run, value of the second) where the configurations of two runs differ."""
    if len(plans) != 2 or None in plans:
        return []
    first, second = (dict(leaves(at(plan, "config") or {})) for plan in plans)
    keys = dict.fromkeys((*first, *second))
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def leaves(content: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield (dotted key, value) of nested dicts."""
    if isinstance(content, Mapping) and content:
        for name, value in content.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, content


def page_samples(records: Sequence[RunRecord], most: int) -> tuple[list[dict[str, Any]], int]:
    """Return (samples of all runs, how many their files hold). At most about `most` for each run: as many of every step
    as there is room for, the first ones of each.
    """
    samples, total = list[dict[str, Any]](), 0
    for number, record in enumerate(records):
        recorded, held = run_samples(record, most)
        samples += [{"run": number, **sample} for sample in recorded]
        total += held
    return samples, total


def run_samples(record: RunRecord, most: int) -> tuple[list[dict[str, Any]], int]:
    """Return samples of one run as `page_samples` does. A step whose samples are recorded needs no table of them."""
    sources: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (kind, step), file in record.tables.items():
        if not (kind == TRAINING and step in record.samples):
            lines = enumerate(json_lines(file, record.left_out))
            sources[kind, step] = [table_sample(kind, step, row, line) for row, line in lines]
    recorded = dict(read_steps(record))
    counts = {place: len(rows) for place, rows in sources.items()}
    counts |= {(TRAINING, step): len(one.rows) for step, one in recorded.items()}
    most_of_step = level(list(counts.values()), most)
    for step, one in recorded.items():
        rows = range(min(most_of_step, len(one.rows)))
        sources[TRAINING, step] = [{"kind": TRAINING, "row": row, **sample_life(one, row)} for row in rows]
    chosen = [sample for place in sorted(sources) for sample in sources[place][:most_of_step]]
    return chosen, sum(counts.values())


def read_steps(record: RunRecord) -> Iterator[tuple[int, RecordedStep]]:
    """Yield step and recorded samples; files that cannot be read are left out, and said."""
    for step, file in record.samples.items():
        try:
            recorded = read_step(file)
            check_rows(recorded)
            yield step, recorded
        except ConfigError as error:
            record.left_out.append(f"{error}; it is left out")


def level(counts: Sequence[int], most: int) -> int:
    """Return the largest number n >= 1 with sum(min(n, count)) <= most over all counts, at least 1."""
    number = 1
    while number < max(counts, default=0) and sum(min(number + 1, count) for count in counts) <= most:
        number += 1
    return number


def table_sample(kind: str, step: int, row: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table of responses in the form of a recorded sample, without tokens."""
    failure = str(line.get("failure") or "")
    return {
        "kind": kind,
        "row": row,
        "step": step,
        "sample": row,
        "data_source": text_of(line.get("data_source", "")),
        "prompt": text_of(line.get("input", "")),
        "images": digests_of(line),
        "answer": text_of(line.get("output", "")),
        "ground_truth": line.get("gts"),
        "outcome": f"reward function {failure}".replace("_", " ") if failure else "ended",
        "score": finite(line.get("score")),
        "rewards": {name: value for name, value in line.items() if name not in TABLE_NAMES},
    }


def text_of(value: Any) -> str:
    """Return a text of a table as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
