"""Parquet and JSON-lines files as rows of dicts, and the choice of rows. A row that cannot be read is a bad row; a file
is an error.

The form of a column says what it holds: text | texts | messages | conversations (lists of messages) | turns (ShareGPT's
from and value) | number | numbers | boolean | struct | null | other.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pyarrow
import pyarrow.parquet

from megatron_rl.config.file_kinds import NOTHING, kind_of
from megatron_rl.config.problems import nearest_name
from megatron_rl.data.row_problems import BadRow, RowPlace, RowProblem, refuse
from megatron_rl.errors import ConfigError

Row = dict[str, Any]
NOT_TEXT = ("images", "videos", "audios")
"""verl's columns of what is no text, which a language model would be trained without."""
Content = TypeVar("Content")

ROWS_AT_ONCE = 1024
MOST_LEVELS = 100
UTF8_MARK, UTF16_MARKS, GZIP_MARK = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff"), b"\x1f\x8b"
LISTS = {"text": "texts", "messages": "conversations", "number": "numbers"}
"""Form of a list's elements -> form of the list."""


@dataclass(frozen=True)
class FileRows:
    """chosen: numbers of the rows of a file to use, from 0; None: all. num_rows: all of its rows, counted where some
    are chosen.
    """

    chosen: Set[int] | None = None
    num_rows: int = 0


ALL_ROWS = FileRows()


def column_forms(path: str, first_row_only: bool = False) -> dict[str, str]:
    """Column -> its form; the fields of structs follow as column.field. The schema of a parquet file says it; in a
    jsonl file most rows do, or the first row alone.

    Raises ConfigError for a file that is missing, unreadable, empty, or neither parquet nor jsonl, and if no row that
    is read can be used.
    """
    file = _checked_file(path)
    if file.suffix == ".parquet":
        with _opened(path, file) as parquet:
            if parquet.metadata.num_rows:
                return dict(form for column in parquet.schema_arrow for form in _forms(column.name, column.type))
        raise ConfigError(f"{path} holds 0 rows: at least 1 is needed")
    forms: dict[str, Counter[str]] = {}
    bad_rows, num_rows = [], 0
    for place, content in islice(_json_rows(path, file), 1 if first_row_only else None):
        num_rows += 1
        if isinstance(content, RowProblem):
            bad_rows.append(content.at(place))
            continue
        for name, value in _flat(content):
            forms.setdefault(name, Counter())[form_of_value(value)] += value is not None
    if not num_rows:
        raise ConfigError(f"{path} holds 0 rows: at least 1 is needed")
    if len(bad_rows) == num_rows and first_row_only:
        raise ConfigError(str(bad_rows[0]))
    if len(bad_rows) == num_rows:
        refuse(bad_rows, num_rows)
    return {name: counts.most_common(1)[0][0] for name, counts in forms.items()}


def read_rows(
    path: str,
    columns: Sequence[str],
    read: Callable[[Row], Content],
    file_rows: FileRows = ALL_ROWS,
    image_key: str | None = None,
) -> tuple[list[tuple[RowPlace, Content]], list[BadRow]]:
    """The rows of a file: (place, `read` of its content) of each that can be used, and the bad rows.

    columns: the columns, or fields of structs (column.field), that a parquet file is read for; jsonl is read whole.
    read: raises RowProblem for a row that cannot be used. A row with images, videos or sounds cannot, but for images in
    the column `image_key`. file_rows: the rows to use, without which nothing is returned.

    Raises ConfigError as `column_forms`, and for a damaged file.
    """
    file = _checked_file(path)
    rows, bad_rows = [], []
    columns = (*columns, *NOT_TEXT)
    for place, content in _json_rows(path, file) if file.suffix == ".jsonl" else _parquet_rows(path, file, columns):
        if file_rows.chosen is not None and place.row not in file_rows.chosen:
            continue
        try:
            if isinstance(content, RowProblem):
                raise content
            _refuse_what_is_not_text(content, image_key)
            rows.append((place, read(content)))
        except RowProblem as problem:
            bad_rows.append(problem.at(place))
    return rows, bad_rows


def _refuse_what_is_not_text(content: Row, image_key: str | None) -> None:
    for name in NOT_TEXT:
        if content.get(name) and name != image_key:
            number = f"{len(content[name])} entries" if isinstance(content[name], list) else "an entry"
            raise RowProblem("not_text", name, number)


def first_row(path: str, columns: Sequence[str]) -> Row:
    """The first row that can be read, of parquet these columns of it; {} where none can. Raises ConfigError as
    `column_forms`.
    """
    file = _checked_file(path)
    rows = _json_rows(path, file) if file.suffix == ".jsonl" else _parquet_rows(path, file, columns)
    return next((content for _, content in rows if not isinstance(content, RowProblem)), {})


def count_rows(path: str, most: int) -> int:
    """The number of rows, counted up to `most`; lines are not parsed. Raises ConfigError as `column_forms`, OSError."""
    file = _checked_file(path)
    if file.suffix == ".parquet":
        with _opened(path, file) as parquet:
            return min(int(parquet.metadata.num_rows), most)
    with file.open("rb") as lines:
        return sum(1 for _ in islice((line for line in lines if line.strip()), most))


def chosen_rows(paths: Sequence[str], most: int, seed: int | None) -> list[FileRows]:
    """Choose `most` rows of all files together, at random without repetition, or the first ones.

    most: below 1: all rows. seed: of the random choice, which is verl's of the same seed; None: the first rows.
    Raises ConfigError for a file that cannot be read.
    """
    if most < 1:
        return [ALL_ROWS for _ in paths]
    sizes = [count_rows(path, sys.maxsize) for path in paths]
    total = sum(sizes)
    if most >= total:
        return [ALL_ROWS for _ in paths]
    numbers = range(most)
    if seed is not None:
        numbers = numpy.random.default_rng(seed).choice(total, size=most, replace=False).tolist()
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        FileRows({number - start for number in numbers if start <= number < start + size}, size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def value_of(content: Row, name: str) -> Any:
    """The value of a column, or of a field of a struct (column.field); None if it is absent."""
    if name in content:
        return content[name]
    value: Any = content
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def needed_value(content: Row, name: str, note: str = "") -> Any:
    """`value_of`. Raises RowProblem for null; note: what the message says after it."""
    value = value_of(content, name)
    if value is None:
        given = ", ".join(column for column, other in content.items() if other is not None)
        raise RowProblem("missing", name, f"nothing{note}; the row has {given or 'no field'}")
    return value


def nearest_hint(name: str, choices: Sequence[str], kind: str) -> str:
    """A hint for the end of an error message."""
    return f"did you mean: {nearest_name(name, choices)}" if choices else f"there is no {kind}"


def form_of_value(value: Any) -> str:
    """The form of a value; a list has that of its first element that is not null."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, dict):
        return "struct"
    if not isinstance(value, list):
        return "other"
    first = next((element for element in value if element is not None), None)
    if isinstance(first, dict):
        return _form_of_fields(set(first))
    return LISTS.get(form_of_value(first), "other")


def _form_of_fields(names: set[str]) -> str:
    """The form of a list of structs with these fields."""
    if names & {"role", "content"}:
        return "messages"
    return "turns" if {"from", "value"} <= names else "other"


def _form_of_type(kind: pyarrow.DataType) -> str:
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _form_of_type(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_null(kind):
        return "null"
    if types.is_struct(kind):
        return "struct"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if types.is_struct(kind.value_type):
            return _form_of_fields({field.name for field in kind.value_type})
        return LISTS.get(_form_of_type(kind.value_type), "other")
    return "other"


def _forms(name: str, kind: pyarrow.DataType) -> Iterator[tuple[str, str]]:
    """(column, form) of a column of parquet, then of the fields of a struct, as column.field."""
    yield name, _form_of_type(kind)
    if pyarrow.types.is_struct(kind):
        for field in kind:
            yield from _forms(f"{name}.{field.name}", field.type)


def _flat(content: Row, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        yield f"{before}{name}", value
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")


def _checked_file(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        neighbours = [str(other) for suffix in ("parquet", "jsonl") for other in file.parent.glob(f"*.{suffix}")]
        kind = kind_of(file)
        what = "no file" if kind == NOTHING else kind
        raise ConfigError(f"{path} is {what}; {nearest_hint(str(file), neighbours, 'parquet or jsonl file there')}")
    if file.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(
            f"{path} must end in .parquet or in .jsonl (one JSON object per line), not in {file.suffix or 'nothing'}"
        )
    try:
        with file.open("rb") as start:
            head = start.read(4)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if file.suffix == ".jsonl" and head.startswith(UTF16_MARKS):
        raise ConfigError(f"{path} is UTF-16; it must be UTF-8: iconv -f utf-16 -t utf-8 {path} > other.jsonl")
    if file.suffix == ".jsonl" and head.startswith((GZIP_MARK, b"PAR1")):
        kind = "compressed: unpack it with gunzip" if head.startswith(GZIP_MARK) else "a parquet file: call it .parquet"
        raise ConfigError(f"{path} ends in .jsonl and is {kind}")
    return file


def _opened(path: str, file: Path) -> pyarrow.parquet.ParquetFile:
    """The file. Raises ConfigError if it is unreadable, or if a row could have only one of two columns of one name."""
    try:
        parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}") from error
    repeated = next(_repeated("", list(parquet.schema_arrow)), None)
    if repeated is not None:
        parquet.close()
        raise ConfigError(f"{path} has two columns named {repeated!r}; rename one of them, or take it out")
    return parquet


def _repeated(where: str, fields: Sequence[pyarrow.Field]) -> Iterator[str]:
    """Names that occur twice among these fields, or among the fields of one of them, as column.field."""
    names = [field.name for field in fields]
    yield from (where + name for name in names if names.count(name) > 1)
    for field in fields:
        kind = field.type
        while pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
            kind = kind.value_type
        if pyarrow.types.is_struct(kind):
            yield from _repeated(f"{where}{field.name}.", list(kind))


def _parquet_rows(path: str, file: Path, columns: Sequence[str]) -> Iterator[tuple[RowPlace, Row | RowProblem]]:
    with _opened(path, file) as parquet:
        names = {name if name in parquet.schema_arrow.names else name.split(".")[0] for name in columns}
        wanted = [name for name in parquet.schema_arrow.names if name in names]
        batches = parquet.iter_batches(ROWS_AT_ONCE, columns=wanted)
        num_read = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pyarrow.ArrowException, OSError) as error:
                raise ConfigError(
                    f"{path} is damaged somewhere from row {num_read} on (of {parquet.metadata.num_rows}): {error}; "
                    "write the file again"
                ) from error
            yield from ((RowPlace(path, row), content) for row, content in enumerate(_contents(batch), start=num_read))
            num_read += batch.num_rows


def _contents(batch: pyarrow.RecordBatch) -> Iterable[Row | RowProblem]:
    try:
        contents: list[Row] = batch.to_pylist()
        return contents
    except UnicodeDecodeError:  # arrow does not look into texts before they are taken out
        return [_content(batch.slice(row, 1)) for row in range(batch.num_rows)]


def _content(row: pyarrow.RecordBatch) -> Row | RowProblem:
    content = {}
    for name in row.schema.names:
        try:
            content[name] = row.column(name)[0].as_py()
        except UnicodeDecodeError as error:
            return RowProblem("not_utf8", name, f"byte {error.object[error.start]:#04x} at {error.start}")
    return content


def _json_rows(path: str, file: Path) -> Iterator[tuple[RowPlace, Row | RowProblem]]:
    """Every line that is not blank; rows count these lines, from 0."""
    row = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(UTF8_MARK)
            if not line.strip():
                continue
            try:
                content: Row | RowProblem = _parsed(line)
            except RowProblem as problem:
                content = problem
            yield RowPlace(path, row, number), content
            row += 1


def _parsed(line: bytes) -> Row:
    try:
        content = json.loads(line.decode(), object_pairs_hook=_named_once)
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start]:#04x} at {error.start} of the line"
        raise RowProblem("not_utf8", "", found) from None
    except RecursionError:
        raise RowProblem("not_json", "", "nested more deeply than can be read") from None
    except json.JSONDecodeError as error:  # its own lines and columns would be taken for those of the file
        place = min(error.pos, len(line.decode().rstrip())) + 1
        raise RowProblem("not_json", "", f"{error.msg} at character {place} of the line") from None
    except ValueError as error:
        raise RowProblem("not_json", "", str(error)) from None
    if not isinstance(content, dict):
        raise RowProblem("not_an_object", "", f"a {type(content).__name__}")
    if _is_deep(line, content):
        raise RowProblem("not_json", "", "nested more deeply than can be read")
    if b"\\ud" in line.lower():  # JSON can write halves of a pair of surrogates, which no tokenizer takes
        for name, value in content.items():
            _check_surrogates(name, value)
    return content


def _named_once(pairs: list[tuple[str, Any]]) -> Row:
    """An object of JSON, for `object_pairs_hook`. Raises RowProblem for a name that occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise RowProblem("repeated_field", next(name for name in names if names.count(name) > 1), "named twice")
    return content


def _is_deep(line: bytes, content: Row) -> bool:
    """Whether lists and objects of a line are nested more than MOST_LEVELS deep: copies of rows recurse."""
    if line.count(b"[") + line.count(b"{") <= MOST_LEVELS:
        return False
    level, inner = 0, list[Any]([content])
    while inner and level <= MOST_LEVELS:
        values = (value for outer in inner for value in (outer.values() if isinstance(outer, dict) else outer))
        level, inner = level + 1, [value for value in values if isinstance(value, dict | list)]
    return level > MOST_LEVELS


def _check_surrogates(name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = ascii(name).strip("'") if name.encode("utf-8", "ignore").decode() != name else name
        raise RowProblem("half_surrogate", shown, ascii(error.object[error.start])) from None
