"""Rows of verl's prompt schema, checked.

A row has the prompt (`data.prompt_key`: chat messages or a string), the data source (`data.reward_fn_key`),
`reward_model` with `ground_truth`, and perhaps `extra_info`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_rl.config.schema import DataConfig
from megatron_rl.data.row_files import Row, column_forms, nearest_hint, needed_value, read_rows, value_of
from megatron_rl.data.row_problems import RowPlace, RowProblem, refuse
from megatron_rl.errors import ConfigError

Message = dict[str, Any]
GROUND_TRUTH = "reward_model.ground_truth"


class PromptRow(NamedTuple):
    """One row. prompt: text, or messages as dicts with role and content."""

    prompt: str | list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_prompts(path: str, data: DataConfig, needs_ground_truth: bool = True) -> list[tuple[RowPlace, PromptRow]]:
    """All rows of a parquet or jsonl file, with their places.

    needs_ground_truth: whether every row must have `reward_model.ground_truth`; else it may be None.

    Raises ConfigError for a missing, unreadable, damaged or empty file, for a missing column, and for bad rows, which
    it names.
    """
    _check_columns(path, data, needs_ground_truth)
    columns = (data.prompt_key, data.reward_fn_key, "reward_model", "extra_info")

    def read(content: Row) -> PromptRow:
        prompt, source = needed_value(content, data.prompt_key), needed_value(content, data.reward_fn_key)
        ground_truth = (needed_value if needs_ground_truth else value_of)(content, GROUND_TRUTH)
        extra_info = content.get("extra_info") or {}
        if not isinstance(extra_info, dict):
            raise RowProblem("wrong_type", "extra_info", f"a {type(extra_info).__name__}, and not an object")
        _check_prompt(prompt, data.prompt_key)
        return PromptRow(prompt, str(source), ground_truth, extra_info)

    rows, bad_rows = read_rows(path, columns, read)
    refuse(bad_rows, len(rows) + len(bad_rows), can_be_skipped=False)
    return rows


def _check_columns(path: str, data: DataConfig, needs_ground_truth: bool) -> None:
    forms = column_forms(path, first_row_only=True)
    columns = {data.prompt_key: " (data.prompt_key)", data.reward_fn_key: " (data.reward_fn_key)"}
    if needs_ground_truth:
        columns["reward_model"] = ""
    for column, key in columns.items():
        if column not in forms:
            raise ConfigError(
                f"{path} has no column {column!r}{key}: its columns are {', '.join(forms)}; "
                f"{nearest_hint(column, list(forms), 'column')}"
            )
    if needs_ground_truth and GROUND_TRUTH not in forms:
        form = forms["reward_model"]
        raise ConfigError(f"{path}: column 'reward_model' is {form}; it must be a struct with the field 'ground_truth'")


def _check_prompt(prompt: object, field: str) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise RowProblem("wrong_type", field, f"{prompt!r:.80}, and not text or messages")
    for number, message in enumerate(prompt):
        for name in ("role", "content"):
            if message.get(name) is None:
                raise RowProblem("not_a_message", f"{field}[{number}].{name}", f"no {name}")
