"""From parquet and jsonl files to rows as dicts. A row that cannot be read is a bad row; a file is an error."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from megatron_rl.config.file_kinds import NOTHING, kind_of
from megatron_rl.data.examples import RowPlace
from megatron_rl.data.forms import form_of_type, form_of_value
from megatron_rl.data.prompt_files import RepeatedField, check_named_once, is_deep, named_once, nearest_hint
from megatron_rl.data.row_problems import BadRow, RowProblem
from megatron_rl.errors import ConfigError

ROWS_AT_ONCE = 1024
UTF8_MARK, UTF16_MARKS, GZIP_MARK = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff"), b"\x1f\x8b"


@dataclass
class RawRows:
    """rows: place and content of each that could be read. num_rows: with those that could not."""

    rows: list[tuple[RowPlace, dict[str, Any]]] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """All rows of the file."""
        return len(self.rows) + len(self.bad_rows)


def column_forms(path: str) -> dict[str, str]:
    """Column -> its form (see `forms`), fields of structs as column.field; in a jsonl file that of most of its rows.

    Raises ConfigError for a file that is missing, unreadable, empty, or neither parquet nor jsonl.
    """
    file = _checked_file(path)
    if file.suffix == ".jsonl":
        forms: dict[str, Counter[str]] = {}
        for _, content in _read_lines(path, file):
            if isinstance(content, dict):
                for name, value in _flat(content):
                    forms.setdefault(name, Counter())[form_of_value(value)] += value is not None
        return {name: counts.most_common(1)[0][0] for name, counts in forms.items()}
    with _opened(path, file) as parquet:
        return dict(form for one in parquet.schema_arrow for form in form_of_type(one.name, one.type))


def read_raw(path: str, columns: Sequence[str]) -> RawRows:
    """All rows of a file, of a parquet file the named columns (or fields of structs) alone.

    Raises ConfigError as `column_forms`, and for a damaged or empty file.
    """
    file = _checked_file(path)
    raw = RawRows()
    read = _read_lines(path, file) if file.suffix == ".jsonl" else _read_parquet(path, file, columns)
    for place, content in read:
        if isinstance(content, RowProblem):
            raw.bad_rows.append(content.at(place))
        else:
            raw.rows.append((place, content))
    if not raw.num_rows:
        raise ConfigError(f"{path} holds 0 rows: at least 1 is needed")
    return raw


def value_of(content: dict[str, Any], name: str) -> Any:
    """The value of a column, or of a field of a struct (column.field); None where there is none."""
    if name in content:
        return content[name]
    value: Any = content
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _flat(content: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
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
        raise ConfigError(f"{path} is {what}: {nearest_hint(str(file), neighbours, 'parquet or jsonl file there')}")
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
    try:
        parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not a readable parquet file: {error}") from error
    check_named_once(path, parquet.schema_arrow)
    return parquet


Read = tuple[RowPlace, dict[str, Any] | RowProblem]


def _read_parquet(path: str, file: Path, columns: Sequence[str]) -> Iterator[Read]:
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
                    "write the file anew"
                ) from error
            yield from ((RowPlace(path, row), content) for row, content in enumerate(_contents(batch), start=num_read))
            num_read += batch.num_rows


def _contents(batch: pyarrow.RecordBatch) -> Iterable[dict[str, Any] | RowProblem]:
    try:
        contents: list[dict[str, Any]] = batch.to_pylist()
        return contents
    except UnicodeDecodeError:  # arrow does not look into texts before they are taken out
        return [_content(batch.slice(row, 1)) for row in range(batch.num_rows)]


def _content(row: pyarrow.RecordBatch) -> dict[str, Any] | RowProblem:
    content = {}
    for name in row.schema.names:
        try:
            content[name] = row.column(name)[0].as_py()
        except UnicodeDecodeError as error:
            return RowProblem("not_utf8", name, f"byte {error.object[error.start]:#04x} at {error.start}")
    return content


def _read_lines(path: str, file: Path) -> Iterator[Read]:
    """Every line that is not blank."""
    row = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(UTF8_MARK)
            if not line.strip():
                continue
            try:
                content: dict[str, Any] | RowProblem = _parsed(line)
            except RowProblem as problem:
                content = problem
            yield RowPlace(path, row, number), content
            row += 1


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line.decode(), object_pairs_hook=named_once)
    except UnicodeDecodeError as error:
        found = f"byte {line[error.start]:#04x} at {error.start} of the line"
        raise RowProblem("not_utf8", "", found) from None
    except RepeatedField as repeated:
        raise RowProblem("repeated_field", str(repeated), "named twice") from None
    except RecursionError:
        raise RowProblem("not_json", "", "nested more deeply than can be read") from None
    except ValueError as error:
        raise RowProblem("not_json", "", str(error)) from None
    if not isinstance(content, dict):
        raise RowProblem("not_an_object", "", f"a {type(content).__name__}")
    if is_deep(line, content):
        raise RowProblem("not_json", "", "nested more deeply than can be read")
    if b"\\ud" in line.lower():
        for name, value in content.items():
            _check_surrogates(name, value)
    return content


def _check_surrogates(name: str, value: Any) -> None:
    try:
        json.dumps([name, value], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = ascii(name).strip("'") if name.encode("utf-8", "ignore").decode() != name else name
        raise RowProblem("half_surrogate", shown, ascii(error.object[error.start])) from None
