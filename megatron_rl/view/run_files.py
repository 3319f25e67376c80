"""Read what a run has left in its folder, while it continues or after it. The files may be anybody's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.file_kinds import FILE, NOTHING, kind_of
from megatron_rl.config.json_files import UnreadableFileError, parsed_json, read_json
from megatron_rl.errors import ConfigError
from megatron_rl.observe.loggers import METRICS_FILE
from megatron_rl.observe.sample_files import recorded_files

TRAINING, VALIDATION = "training", "validation"
FOLDER = "a folder"
OWN_TABLES = "val_generations"
STEP = re.compile(r"[0-9]{1,15}")
LARGEST_STEP = 10**15
LONGEST_LINE = 64 << 20
"""Bytes of a line of a table: a response with its prompt; longer ones are left out."""


@dataclass(frozen=True)
class RunRecord:
    """The files of a run. metrics: one dict for each line of metrics.jsonl, with "step" and numbers or None. summary,
    plan: None before they are written. calls: intervals of the last steps. samples: step -> file of recorded samples.
    tables: (kind, step) -> file of a table of responses. left_out: a sentence for each thing that is not shown.
    """

    folder: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    plan: dict[str, Any] | None
    calls: list[dict[str, Any]]
    samples: dict[int, Path]
    tables: dict[tuple[str, int], Path]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunFiles:
    """The files in a run's folder. A file elsewhere, which a link or plan.json names, is read only if `outside`.

    left_out: gets a sentence for each file that is not read.
    """

    folder: Path
    outside: bool = False
    left_out: list[str] = field(default_factory=list)

    def may_read(self, file: Path) -> bool:
        """Whether a file or folder is in the run's folder, or may be outside; says so if not."""
        try:
            is_own = self.outside or file.resolve().is_relative_to(self.folder.resolve())
        except (OSError, ValueError, RuntimeError):  # a loop of links, a name with a null byte or too long
            is_own = False
        if not is_own:
            self.left_out.append(f"{file} is left out: it is outside of the run's folder; --outside reads it, too")
        return is_own

    def content(self, name: str, kind: type) -> Any:
        """Return the content of a JSON file of the folder if it is of this type; None if there is none."""
        file = self.folder / name
        if kind_of(file) == NOTHING or not self.may_read(file):
            return None
        try:
            content = read_json(file)
        except UnreadableFileError as error:
            self.left_out.append(f"{file} is left out: {error}")
            return None
        if not isinstance(content, kind):
            self.left_out.append(f"{file} is left out: it does not have the form that a run writes")
            return None
        return content

    def numbered(self, folder: Path) -> list[tuple[int, Path]]:
        """Return (step, file) of the tables STEP.jsonl in a folder, in order."""
        if kind_of(folder) != FOLDER or not self.may_read(folder):
            return []
        found = [file for file in folder.glob("*.jsonl") if STEP.fullmatch(file.stem) and kind_of(file) == FILE]
        return sorted((int(file.stem), file) for file in found if self.may_read(file))

    def samples(self) -> dict[int, Path]:
        """Return step -> file of recorded samples, in order."""
        return {step: file for step, file in recorded_files(self.folder).items() if self.may_read(file)}


def read_run(folder: Path, outside: bool = False) -> RunRecord:
    """Read the files of a run. outside: also what links and plan.json name outside of its folder.

    Raises ConfigError for what is no folder of a run, or has no step yet.
    """
    files = RunFiles(folder, outside)
    if kind_of(folder) != FOLDER:
        raise ConfigError(f"{folder} is no folder; try: {nearest_run(folder.parent)}")
    if kind_of(folder / METRICS_FILE) != FILE:
        rule = f"is not the folder of a run that logs to jsonl: it has no {METRICS_FILE}"
        raise ConfigError(f"{folder} {rule}; try: {nearest_run(folder)}")
    metrics = metrics_of(folder / METRICS_FILE, files.left_out) if files.may_read(folder / METRICS_FILE) else []
    if not metrics:
        why = f"; {files.left_out[0]}" if files.left_out else "; try: the same command after the first step"
        raise ConfigError(f"{folder / METRICS_FILE} has no step yet{why}")
    plan = files.content("plan.json", dict)
    places = (
        (VALIDATION, at(plan, "config", "trainer", "validation_data_dir")),
        (VALIDATION, str(folder / OWN_TABLES)),
        (TRAINING, at(plan, "config", "trainer", "rollout_data_dir")),
    )
    tables = {
        (kind, step): file
        for kind, path in places
        if isinstance(path, str)
        for step, file in files.numbered(Path(path))
    }
    calls = calls_of(files.content("timeline.json", list) or [], files.left_out)
    summary = files.content("summary.json", dict)
    return RunRecord(folder, metrics, summary, plan, calls, files.samples(), tables, files.left_out)


def metrics_of(file: Path, left_out: list[str]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are steps, with "step" and the values that are numbers, NaN as None."""
    metrics, strange = list[dict[str, Any]](), 0
    for line in json_lines(file, left_out):
        step = line.get("step")
        if type(step) is not int or abs(step) > LARGEST_STEP:
            strange += 1
            continue
        values = {name: value for name, value in line.items() if value is None or is_number(value)}
        strange += len(values) < len(line)
        metrics.append({name: None if value is None else finite(value) for name, value in values.items()})
    if strange:
        left_out.append(f"{file}: {strange} line(s) have no step, or values that are not numbers; these are left out")
    return metrics


def calls_of(content: list[Any], left_out: list[str]) -> list[dict[str, Any]]:
    """Return the calls of timeline.json: texts `lane` and `name`, finite numbers `start` and `stop`."""

    def is_call(call: Any) -> bool:
        if not isinstance(call, dict):
            return False
        texts, numbers = (call.get("lane"), call.get("name")), (call.get("start"), call.get("stop"))
        return all(isinstance(text, str) for text in texts) and all(finite(number) is not None for number in numbers)

    calls = [call for call in content if is_call(call)]
    if len(calls) < len(content):
        left_out.append(f"{len(content) - len(calls)} call(s) of timeline.json are left out: they are no calls")
    return calls


def json_lines(file: Path, left_out: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's lines; what is none is counted in `left_out`, but for a last line that was cut."""
    strange = last = 0
    try:
        with file.open("rb") as opened:
            while line := opened.readline(LONGEST_LINE):
                last = 0
                try:
                    content = parsed_json(line)
                except ValueError:
                    strange, last = strange + 1, 1
                    continue
                if isinstance(content, dict):
                    yield content
                else:
                    strange += 1
    except OSError as error:
        left_out.append(f"{file} is left out: {error.strerror}")
    if strange > last:
        left_out.append(f"{file}: {strange - last} line(s) are no objects of JSON, and left out")


def at(content: Any, *keys: str) -> Any:
    """Return what stands at these keys of nested objects, or None."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def finite(value: Any) -> float | None:
    """Return a number of JSON; None for NaN, infinities and what is no number."""
    return value if is_number(value) and math.isfinite(value) else None


def nearest_run(folder: Path) -> str:
    """Return the newest folder of a run in or below a folder, in words."""
    named = (
        [*folder.glob(f"*/{METRICS_FILE}"), *folder.glob(f"*/*/{METRICS_FILE}")] if kind_of(folder) == FOLDER else []
    )
    found = [file for file in named if kind_of(file) == FILE]
    if not found:
        return "trainer.default_local_dir of the run"
    return str(max(found, key=lambda file: file.stat().st_mtime).parent)
