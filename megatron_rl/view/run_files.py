"""Read what a run has left in its folder, while it goes on or after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.sample_files import recorded_files

TRAINING, VALIDATION = "training", "validation"


@dataclass(frozen=True)
class RunRecord:
    """The files of a run. metrics: one dict for each line of metrics.jsonl, with "step". summary, plan: None before
    they are written. calls: intervals of the last steps. samples: step -> file of recorded samples. tables: (kind,
    step) -> file of a table of answers.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    plan: dict[str, Any] | None
    calls: list[dict[str, Any]]
    samples: dict[int, Path]
    tables: dict[tuple[str, int], Path]


def read_run(folder: Path) -> RunRecord:
    """Read the files of a run. Raises ConfigError for what is no folder of a run, or has no step yet."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; nearest: {nearest_run(folder.parent)}")
    if not (folder / METRICS_FILE).is_file():
        rule = f"is not the folder of a run that logs to jsonl: it has no {METRICS_FILE}"
        raise ConfigError(f"{folder} {rule}; nearest: {nearest_run(folder)}")
    metrics = [line for line in json_lines(folder / METRICS_FILE) if isinstance(line.get("step"), int)]
    if not metrics:
        raise ConfigError(f"{folder / METRICS_FILE} has no step yet; nearest: the same command after the first step")
    plan = json_file(folder / "plan.json")
    calls = json_file(folder / "timeline.json")
    trainer = (plan or {}).get("config", {}).get("trainer", {})
    tables = {
        (kind, step): file
        for kind, path in (
            (VALIDATION, trainer.get("validation_data_dir")),
            (VALIDATION, folder / "val_generations"),
            (TRAINING, trainer.get("rollout_data_dir")),
        )
        if path is not None
        for step, file in numbered(Path(path), ".jsonl")
    }
    samples, summary = recorded_files(folder), json_file(folder / "summary.json")
    return RunRecord(folder, metrics, summary, plan, calls or [], samples, tables)


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's lines, without what a kill has cut off."""
    for line in file.read_text(errors="replace").splitlines():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            yield content


def json_file(file: Path) -> Any:
    """Return the content of a JSON file, or None if it is absent or incomplete."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """Return (step, file) of the files STEP`suffix` in a folder, in order."""
    files = folder.glob(f"*{suffix}")
    return sorted((int(file.stem), file) for file in files if file.stem.isdigit())


def nearest_run(folder: Path) -> str:
    """Return the newest folder of a run in or below a folder, in words."""
    files = [*folder.glob(f"*/{METRICS_FILE}"), *folder.glob(f"*/*/{METRICS_FILE}")] if folder.is_dir() else []
    if not files:
        return "trainer.default_local_dir of the run"
    return str(max(files, key=lambda file: file.stat().st_mtime).parent)
