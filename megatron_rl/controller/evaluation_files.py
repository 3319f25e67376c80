"""The files by which an evaluation that was stopped continues: what its responses depend on, and the responses."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config.eval_config import EVALUATION
from megatron_rl.config.file_kinds import ABSENT, instead_of_file
from megatron_rl.config.json_files import UnreadableFileError, parsed_json, read_json_object
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.controller.evaluated_content import evaluated_content
from megatron_rl.errors import ConfigError
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.loggers import METRICS_FILE

ANSWERS_FILE, SETTINGS_FILE = "answers.jsonl", "evaluation.json"
CONTENT, PATHS = "content", ("model", "data")
"""Keys of evaluation.json: digests of what the responses depend on, and the paths where that was, which may change."""
MOST_NAMED = 4
"""Differences that a message names."""


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return what the responses depend on, JSON-ready: another evaluation in the same folder must have the same.

    Raises ConfigError for a file that cannot be read.
    """
    shared = config.actor_rollout_ref
    try:
        content = evaluated_content(config)
    except OSError as error:
        raise ConfigError(f"{error.filename}, on which responses depend, cannot be read: {error.strerror}") from error
    settings = {
        "model": str(Path(shared.model.path).expanduser().resolve()),
        "data": [str(Path(file).expanduser().resolve()) for file in as_list(config.data.val_files)],
        "sampling": asdict(shared.rollout.val_kwargs),
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "rule": [config.custom_reward_function.path, config.custom_reward_function.name],
        "seed": config.trainer.seed,
        CONTENT: content,
    }
    return dict(json.loads(json.dumps(settings)))


def refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError where a folder has an evaluation with other settings, naming them, responses without settings,
    or a run, whose files an evaluation would replace.
    """
    file, nearest = folder / SETTINGS_FILE, f"try: --out {folder}_2"
    if instead_of_file(file) == ABSENT:
        metrics = folder / METRICS_FILE
        is_empty = metrics.is_file() and not metrics.stat().st_size  # what an evaluation leaves that is killed early
        if metrics.exists() and not is_empty:
            raise ConfigError(f"{folder} has the metrics of a run; try: --out {folder / EVALUATION}")
        if instead_of_file(folder / ANSWERS_FILE) != ABSENT:
            raise ConfigError(
                f"{folder} has {ANSWERS_FILE}, and no {SETTINGS_FILE} identifies their settings; {nearest}"
            )
        return
    try:
        there = read_json_object(file)
    except UnreadableFileError as error:
        raise ConfigError(f"{file} cannot be read: {error}; {nearest}") from error
    known = there.get(CONTENT)
    if not isinstance(known, dict):
        raise ConfigError(f"{file} does not identify by content what its responses depend on; {nearest}")
    now, before = _compared(settings), _compared(there)
    other = [
        f"{name} was {before.get(name)!s:.80}, is {now.get(name)!s:.80}"
        for name in now | before
        if now.get(name) != before.get(name)
    ]
    if other:
        more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
        told = ", ".join(other[:MOST_NAMED]) + more
        raise ConfigError(f"{folder} has an evaluation with other settings: {told}; {nearest}")


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide, flat. Of a rule the content does, not its path."""
    left_out = (*PATHS, "rule", CONTENT)
    content: Mapping[str, Any] = settings[CONTENT]
    return {name: value for name, value in settings.items() if name not in left_out} | dict(content)


@dataclass(frozen=True)
class AnswersFile:
    """The recorded responses. num_samples: of each prompt. prompts: their row numbers. is_scored: responses have
    scores."""

    path: Path
    num_samples: int
    prompts: Collection[int]
    is_scored: bool

    def whole_rows(self) -> list[dict[str, Any]]:
        """Return the responses of prompts that have all of theirs, each once, and leave only these in the file.

        A kill may leave a last line without its end, and prompts without all responses: both go. Raises ConfigError for
        any other damage, OSError.
        """
        lacks = instead_of_file(self.path)
        if lacks == ABSENT:
            return []
        if lacks is not None:
            raise ConfigError(f"{self.path} must be a file, and {lacks}")
        content = self.path.read_bytes()
        lines = content.split(b"\n")[:-1]  # behind the last line's end is nothing, or what a kill left
        found: dict[int, dict[int, int]] = {}
        rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        for place, row in enumerate(rows):
            found.setdefault(row["index"], {}).setdefault(row["sample"], place)
        places = sorted(
            place for samples in found.values() if len(samples) == self.num_samples for place in samples.values()
        )
        kept = b"".join(lines[place] + b"\n" for place in places)
        if kept != content:
            replace_file(self.path, kept)
        return [rows[place] for place in places]

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        """One line. Raises ConfigError for one that an evaluation does not write."""
        where, way_out = f"line {number} of {self.path}", f"try: without this line, or --out {self.path.parent}_2"
        try:
            row = parsed_json(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not valid JSON: {error}; {way_out}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{where} is not an object in braces; {way_out}")
        wrong = self._wrong(row)
        if wrong is not None:
            raise ConfigError(f"{where}: {wrong[0]}={row.get(wrong[0])!r:.80} must be {wrong[1]}; {way_out}")
        return row

    def _wrong(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """The key whose value is wrong, and what it must be; None: all are right."""
        index, sample = row.get("index"), row.get("sample")
        if type(index) is not int or index not in self.prompts:
            return "index", "the row number of a prompt"
        if type(sample) is not int or not 0 <= sample < self.num_samples:
            return "sample", f"a number from 0 to {self.num_samples - 1}"
        if not self.is_scored:
            return None
        if not isinstance(row.get("data_source"), str):
            return "data_source", "a text"
        if not _is_number(row.get("score")):
            return "score", "a finite number"
        return None if row.get("acc") is None or _is_number(row["acc"]) else ("acc", "a finite number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
