"""Rows in verl's schema, made of tasks and of files with other columns, as parquet or JSON lines. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_rl.config.problems import nearest_name
from megatron_rl.data.row_files import column_forms, read_rows, value_of
from megatron_rl.data.row_problems import SHOWN, RowProblem
from megatron_rl.errors import ConfigError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".parquet")
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
TRUTHS = ("answer", "ground_truth", "solution", "target", "label", "output")
"""Usual names of columns, in the order in which they are looked for."""


@dataclass(frozen=True)
class TaskColumns:
    """Where rows of a file have their parts. prompt: a text, or messages. truth: None: rows have none.

    after: what follows its last appearance in the truth is the truth: "####" in gsm8k.
    """

    prompt: str
    truth: str | None
    after: str = ""


def chosen_columns(path: str, prompt: str | None, truth: str | None, after: str) -> TaskColumns:
    """Return the columns of a file: those that are named, or else usual ones.

    Raises ConfigError for a file that cannot be read, a name that it does not have, and where no column of a prompt has
    a usual name.
    """
    forms = column_forms(path)
    for option, name in (("--prompt", prompt), ("--answer", truth)):
        if name is not None and name not in forms:
            raise ConfigError(f"{option} {name} is no column of {path}; did you mean: {nearest_name(name, forms)}")
    prompt = prompt or next((name for name in PROMPTS if name in forms), None)
    if prompt is None:
        raise ConfigError(f"--prompt must name a column of {path}: {', '.join(forms)}")
    if forms[prompt] not in ("text", "messages", "turns"):
        raise ConfigError(f"--prompt {prompt} of {path} must be a text or messages; it is of the form {forms[prompt]}")
    return TaskColumns(
        prompt, truth or next((name for name in TRUTHS if name in forms and name != prompt), None), after
    )


def rows_of_file(path: str, columns: TaskColumns, source: str) -> list[Row]:
    """Return the rows of a file; its other columns are in `extra_info`. source: their data source.

    Raises ConfigError, with row and field, for rows without a prompt or a truth.
    """
    names = [name for name in column_forms(path) if "." not in name]

    def read(content: Row) -> tuple[Any, str, Row]:
        said, truth = value_of(content, columns.prompt), _truth(content, columns)
        if not said or not isinstance(said, str | list):
            kind = "nothing" if said is None else type(said).__name__
            raise RowProblem("missing" if said is None else "wrong_type", columns.prompt, kind)
        others = {name: content.get(name) for name in names if name not in (columns.prompt, columns.truth)}
        return said, truth, {name: value for name, value in others.items() if value is not None}

    rows, bad_rows = read_rows(path, names, read)
    if bad_rows:
        listed = "; ".join(map(str, bad_rows[:SHOWN]))
        raise ConfigError(f"{len(bad_rows)} of {len(rows) + len(bad_rows)} rows cannot be used: {listed}")
    tasks = [{"prompt": said, "ground_truth": truth, "extra_info": extra} for _, (said, truth, extra) in rows]
    return rows_of_tasks(tasks, source)


def _truth(content: Row, columns: TaskColumns) -> str:
    if columns.truth is None:
        return ""
    value = value_of(content, columns.truth)
    if value is None:
        raise RowProblem("missing", columns.truth, "nothing")
    text = value if isinstance(value, str) else json.dumps(value)
    return text.rpartition(columns.after)[2].strip() if columns.after else text


def rows_of_tasks(tasks: Iterable[Mapping[str, Any]], source: str) -> list[Row]:
    """Return tasks (prompt, ground_truth, extra_info) as rows."""
    rows = []
    for index, task in enumerate(tasks):
        said = task["prompt"]
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        rows.append(
            {
                "data_source": source,
                "prompt": messages,
                "reward_model": {"style": "rule", "ground_truth": task["ground_truth"]},
                "extra_info": {**task["extra_info"], "index": index},
            }
        )
    return rows


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write rows in the form of the file's suffix. Raises ConfigError for another suffix and for values
    that a column of parquet cannot hold; OSError.
    """
    if file.suffix not in SUFFIXES:
        raise ConfigError(
            f"--out {file} must end with {' or '.join(SUFFIXES)}; try: --out {file.with_suffix('.jsonl')}"
        )
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    except pyarrow.ArrowException as error:
        problem = f"{file} cannot hold these rows: {error}"
        raise ConfigError(f"{problem}; try: --out {file.with_suffix('.jsonl')}") from None
