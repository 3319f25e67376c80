"""From a parquet file in verl's row schema to token records.

Read columns: the prompt (`data.prompt_key`: chat messages or a string), `data_source`, `reward_model` (a struct with
`ground_truth`) and, where present, `extra_info`. Everything is checked and tokenised once, when the file is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import pyarrow
import pyarrow.parquet
import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.problems import nearest_name
from megatron_rl.config.schema import DataConfig
from megatron_rl.errors import ConfigError
from megatron_rl.records import Prompts, non_tensor, ragged


class PromptDataset:
    """The prompts of one file that are short enough to use, in file order."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, data_config: DataConfig):
        """Read and tokenise `path`; see `DataConfig` for `prompt_key`, `max_prompt_length`, `filter_overlong_prompts`.

        Raises ConfigError for a missing or unreadable file, missing or empty columns, an empty dataset, and prompts
        that cannot be tokenised or are too long.
        """
        self.path = path
        table = _read_table(path)
        _check_columns(path, table, data_config.prompt_key)
        prompt_ids = _tokenise(path, table.column(data_config.prompt_key), tokenizer)
        self._rows = _short_enough(path, prompt_ids, data_config)
        self._prompt_ids = [torch.tensor(prompt_ids[row]) for row in self._rows]
        self._data_source = table.column("data_source").take(self._rows).to_pylist()
        rewards = table.column("reward_model").take(self._rows).to_pylist()
        self._ground_truth = [reward["ground_truth"] for reward in rewards]
        if "extra_info" in table.column_names:
            self._extra_info = [info or {} for info in table.column("extra_info").take(self._rows).to_pylist()]
        else:
            self._extra_info = [{} for _ in self._rows]

    def __len__(self) -> int:
        """Number of usable prompts."""
        return len(self._rows)

    def batch(self, indices: Sequence[int]) -> Prompts:
        """The prompts at `indices` (each in [0, len(self)), at least one) as a record of B = len(indices) rows.

        `Prompts.index` is the row number in the file, which filtering does not change; `sample` is 0.
        """
        return Prompts(
            index=torch.tensor([self._rows[i] for i in indices]),
            sample=torch.zeros(len(indices), dtype=torch.int64),
            prompt_ids=ragged([self._prompt_ids[i] for i in indices]),
            data_source=non_tensor([self._data_source[i] for i in indices]),
            ground_truth=non_tensor([self._ground_truth[i] for i in indices]),
            extra_info=non_tensor([self._extra_info[i] for i in indices]),
            batch_size=[len(indices)],
        )


def _read_table(path: str) -> pyarrow.Table:
    file = Path(path).expanduser()
    if not file.is_file():
        neighbours = [str(other) for other in file.parent.glob("*.parquet")]
        raise ConfigError(f"no prompt file at {path}: {_nearest(str(file), neighbours, 'parquet file in that folder')}")
    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}") from error
    if table.num_rows == 0:
        raise ConfigError(f"{path} holds 0 rows: at least 1 prompt is needed")
    return table


def _check_columns(path: str, table: pyarrow.Table, prompt_key: str) -> None:
    for column in (prompt_key, "data_source", "reward_model"):
        if column not in table.column_names:
            key = " (data.prompt_key)" if column == prompt_key else ""
            raise ConfigError(
                f"{path} has no column {column!r}{key}: its columns are {', '.join(table.column_names)}; "
                f"{_nearest(column, table.column_names, 'column')}"
            )
        if table.column(column).null_count:
            missing = table.column(column).is_null().to_pylist().index(True)
            raise ConfigError(f"{path}: column {column!r} is empty in row {missing}; every row needs a value")
    reward_type = table.schema.field("reward_model").type
    if not pyarrow.types.is_struct(reward_type) or "ground_truth" not in [field.name for field in reward_type]:
        raise ConfigError(
            f"{path}: column 'reward_model' is {reward_type}; it must be a struct with the field 'ground_truth'"
        )


def _tokenise(path: str, column: pyarrow.ChunkedArray, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids per row: strings are encoded as they are, chat messages through the chat template."""
    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        prompt_ids = tokenizer(column.to_pylist())["input_ids"]
    elif pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"the prompts of {path} are chat messages, but the tokenizer has no chat_template: "
                "add one to the model folder, or store the prompts as plain strings"
            )
        try:
            prompt_ids = tokenizer.apply_chat_template(
                column.to_pylist(), add_generation_prompt=True, return_dict=False
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the tokenizer's chat_template refuses a prompt of {path}: {error}") from error
    else:
        raise ConfigError(
            f"the prompts of {path} are of type {column.type}; they must be strings or lists of {{role, content}}"
        )
    for row, ids in enumerate(prompt_ids):
        if not ids:
            raise ConfigError(f"{path}: the prompt of row {row} has 0 tokens; it needs at least 1")
    return prompt_ids


def _short_enough(path: str, prompt_ids: list[list[int]], data_config: DataConfig) -> list[int]:
    """Rows with at most `max_prompt_length` tokens; raises ConfigError if one is longer and may not be dropped."""
    limit = data_config.max_prompt_length
    rows = [row for row, ids in enumerate(prompt_ids) if len(ids) <= limit]
    if len(rows) == len(prompt_ids):
        return rows
    counted = f"{len(prompt_ids) - len(rows)} of {len(prompt_ids)} prompts of {path}"
    if not data_config.filter_overlong_prompts:
        longest = max(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        raise ConfigError(
            f"{counted} are longer than data.max_prompt_length={limit}; the longest has {len(prompt_ids[longest])} "
            f"tokens (row {longest}): set data.max_prompt_length={len(prompt_ids[longest])}, "
            "or data.filter_overlong_prompts=true to drop them"
        )
    if not rows:
        shortest = min(len(ids) for ids in prompt_ids)
        raise ConfigError(
            f"{counted} are longer than data.max_prompt_length={limit}, so none is left; the shortest has {shortest} "
            f"tokens: set data.max_prompt_length to {shortest} or more"
        )
    return rows


def _nearest(name: str, choices: Sequence[str], kind: str) -> str:
    """A hint for the end of an error message."""
    return f"the nearest {kind} is {nearest_name(name, choices)!r}" if choices else f"there is no {kind}"
