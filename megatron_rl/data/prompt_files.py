"""From a parquet or jsonl file in verl's row schema to checked rows.

Read per row: the prompt (`data.prompt_key`: chat messages or a string), the data source (`data.reward_fn_key`),
`reward_model` (with `ground_truth`) and, where present, `extra_info`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from megatron_rl.config.file_kinds import instead_of_file
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.schema import DataConfig
from megatron_rl.errors import ConfigError

ROWS_AT_ONCE = 1024
MOST_LEVELS = 100

Message = dict[str, Any]
Located = tuple[str, dict[str, Any]]
"""Where a row stands, which begins an error message, and its content."""


class RepeatedField(Exception):
    """An object names a field twice; the message is the name."""


class PromptRow(NamedTuple):
    """One row; prompt: text, or messages as dicts with role and content."""

    prompt: str | list[Message]
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_rows(path: str, data_config: DataConfig, needs_ground_truth: bool = True) -> list[PromptRow]:
    """All rows of `path`, which is JSON lines if its name ends in .jsonl, else parquet.

    needs_ground_truth: whether every row must have `reward_model.ground_truth`, which is else None where it has none.

    Raises ConfigError, naming the row where there is one, for a missing, unreadable, damaged or empty file, and for
    rows that lack something.
    """
    file = Path(path).expanduser()
    lacks = instead_of_file(file)
    if lacks is not None:
        neighbours = [str(other) for suffix in ("parquet", "jsonl") for other in file.parent.glob(f"*.{suffix}")]
        hint = nearest_hint(str(file), neighbours, "parquet or jsonl file in that folder")
        raise ConfigError(f"no prompt file at {path}: {lacks}; {hint}")
    read = _read_json_lines if file.suffix == ".jsonl" else _read_parquet
    keys = (data_config.prompt_key, data_config.reward_fn_key, *(("reward_model",) if needs_ground_truth else ()))
    rows = [_checked(place, content, data_config, keys) for place, content in read(path, file, data_config, keys)]
    if not rows:
        raise ConfigError(f"{path} holds 0 rows: at least 1 prompt is needed")
    return rows


def column_kinds(file: Path) -> dict[str, str]:
    """Column -> what it can be used as: text | messages | reward (has a ground truth) | other. No row but the first
    is read, and of a parquet file none.

    Raises ConfigError for an unreadable or empty file.
    """
    if file.suffix == ".jsonl":
        first = next(_read_json_lines(str(file), file, None), None)
        if first is None:
            raise ConfigError(f"{file} holds 0 rows: at least 1 prompt is needed")
        return {name: _kind_of_value(value) for name, value in first[1].items()}
    schema, num_rows = _parquet_facts(file)
    if not num_rows:
        raise ConfigError(f"{file} holds 0 rows: at least 1 prompt is needed")
    return {field.name: _kind_of_type(field.type) for field in schema}


def count_rows(file: Path, most: int) -> int:
    """Rows of a file, counted up to `most`; lines are not looked into. Raises ConfigError for an unreadable parquet
    file, OSError.
    """
    if file.suffix != ".jsonl":
        return min(_parquet_facts(file)[1], most)
    with file.open("rb") as lines:
        return sum(1 for _ in islice((line for line in lines if line.strip()), most))


def _parquet_facts(file: Path) -> tuple[pyarrow.Schema, int]:
    """Columns and number of rows, from the end of the file alone. Raises ConfigError."""
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            schema, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} is not a readable parquet file: {error}") from error
    check_named_once(str(file), schema)
    return schema, num_rows


def check_named_once(path: str, schema: pyarrow.Schema) -> None:
    """Raise ConfigError for two columns of one name, or two fields of one struct, of which a row can have only one."""
    repeated = next(_repeated("", list(schema)), None)
    if repeated is not None:
        raise ConfigError(f"{path} has two columns named {repeated!r}; rename one of them, or take it out")


def _repeated(where: str, fields: Sequence[pyarrow.Field]) -> Iterator[str]:
    """Names that stand twice in one place, with the columns that they are in before them."""
    names = [field.name for field in fields]
    yield from (where + name for name in names if names.count(name) > 1)
    for field in fields:
        kind = field.type
        while pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            kind = kind.value_type
        if pyarrow.types.is_struct(kind):
            yield from _repeated(f"{where}{field.name}.", list(kind))


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `object_pairs_hook`. Raises RepeatedField."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedField(next(name for name in names if names.count(name) > 1))
    return content


def _kind_of_type(kind: pyarrow.DataType) -> str:
    types = pyarrow.types
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if (types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type):
        return "messages" if {"role", "content"} <= {field.name for field in kind.value_type} else "other"
    return "reward" if types.is_struct(kind) and "ground_truth" in [field.name for field in kind] else "other"


def _kind_of_value(value: object) -> str:
    if isinstance(value, str):
        return "text"
    if (
        isinstance(value, list)
        and value
        and all(isinstance(one, dict) and {"role", "content"} <= set(one) for one in value)
    ):
        return "messages"
    return "reward" if isinstance(value, dict) and value.get("ground_truth") is not None else "other"


def nearest_hint(name: str, choices: Sequence[str], kind: str) -> str:
    """A hint for the end of an error message."""
    return f"the nearest {kind} is {nearest_name(name, choices)!r}" if choices else f"there is no {kind}"


def _read_parquet(path: str, file: Path, data_config: DataConfig, needed: Sequence[str]) -> Iterator[Located]:
    """Every row, which must have the columns `needed`."""
    try:
        parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}") from error
    with parquet:
        check_named_once(path, parquet.schema_arrow)
        _check_columns(path, parquet.schema_arrow, data_config, needed)
        wanted = (data_config.prompt_key, data_config.reward_fn_key, "reward_model", "extra_info")
        columns = [name for name in parquet.schema_arrow.names if name in wanted]
        batches = parquet.iter_batches(ROWS_AT_ONCE, columns=columns)
        num_read = 0
        while True:
            try:
                contents = next(batches).to_pylist()
            except StopIteration:
                return
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path} is damaged somewhere from row {num_read} on (of {parquet.metadata.num_rows}): {error}; "
                    "write the file anew"
                ) from error
            for row, content in enumerate(contents, start=num_read):
                yield f"{path}: row {row}", content
            num_read += len(contents)


def _check_columns(path: str, schema: pyarrow.Schema, data_config: DataConfig, needed: Sequence[str]) -> None:
    keys = {data_config.prompt_key: " (data.prompt_key)", data_config.reward_fn_key: " (data.reward_fn_key)"}
    for column in needed:
        if column not in schema.names:
            raise ConfigError(
                f"{path} has no column {column!r}{keys.get(column, '')}: its columns are {', '.join(schema.names)}; "
                f"{nearest_hint(column, schema.names, 'column')}"
            )
    if "reward_model" not in needed:
        return
    reward_type = schema.field("reward_model").type
    if not pyarrow.types.is_struct(reward_type) or "ground_truth" not in [field.name for field in reward_type]:
        raise ConfigError(
            f"{path}: column 'reward_model' is {reward_type}; it must be a struct with the field 'ground_truth'"
        )


def _read_json_lines(path: str, file: Path, _: DataConfig | None, __: Sequence[str] = ()) -> Iterator[Located]:
    """Every line that is not blank; rows count these lines, from 0."""
    row = 0
    try:
        lines = file.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}: row {row} (line {number})"
            try:
                content = json.loads(line, object_pairs_hook=named_once)
            except RepeatedField as name:
                raise ConfigError(f"{place} names the field {str(name)!r} twice; keep one of the two") from None
            except RecursionError:
                raise ConfigError(f"{place} is nested more deeply than can be read") from None
            except ValueError as error:
                raise ConfigError(f"{place} is not JSON: {error}") from error
            if not isinstance(content, dict):
                raise ConfigError(f"{place} holds a {type(content).__name__}; every line must be an object in braces")
            if is_deep(line, content):
                raise ConfigError(f"{place} is nested more deeply than can be read")
            _check_unicode(place, line, content)
            yield place, content
            row += 1


def is_deep(line: bytes, content: dict[str, Any]) -> bool:
    """Whether lists and objects of a line are nested more than MOST_LEVELS deep: what copies rows recurses."""
    if line.count(b"[") + line.count(b"{") <= MOST_LEVELS:
        return False
    level, inner = 0, list[Any]([content])
    while inner and level <= MOST_LEVELS:
        values = (value for outer in inner for value in (outer.values() if isinstance(outer, dict) else outer))
        level, inner = level + 1, [value for value in values if isinstance(value, dict | list)]
    return level > MOST_LEVELS


def _check_unicode(place: str, line: bytes, content: dict[str, Any]) -> None:
    """JSON can write halves of a pair of surrogates, which are no characters and which no tokenizer takes."""
    if b"\\ud" not in line.lower():
        return
    for name, value in content.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ConfigError(
                f"{place}: {name!r} holds half of a pair of surrogates, {half!r}, which is no character: "
                "take it out, or write the character whole"
            ) from None


def _checked(place: str, content: dict[str, Any], data_config: DataConfig, needed: Sequence[str]) -> PromptRow:
    for name in needed:
        if content.get(name) is None:
            given = ", ".join(key for key, value in content.items() if value is not None)
            raise ConfigError(f"{place} has no {name!r}; every row needs one, and this one has {given}")
    reward = content.get("reward_model")
    ground_truth = reward.get("ground_truth") if isinstance(reward, dict) else None
    if "reward_model" in needed and ground_truth is None:
        raise ConfigError(f"{place} has no 'ground_truth' in its 'reward_model', which is {reward!r:.200}")
    extra_info = content.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise ConfigError(f"{place}: 'extra_info' is a {type(extra_info).__name__}; it must be an object, or absent")
    prompt = content[data_config.prompt_key]
    _check_prompt(place, prompt)
    return PromptRow(prompt, str(content[data_config.reward_fn_key]), ground_truth, extra_info)


def _check_prompt(place: str, prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise ConfigError(
            f"{place}: the prompt is of type {type(prompt).__name__}; it must be text or a list of {{role, content}}"
        )
    for number, message in enumerate(prompt):
        if message.get("role") is None or message.get("content") is None:
            raise ConfigError(f"{place}: message {number} of the prompt lacks role or content: {message!r:.200}")
