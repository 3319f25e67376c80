"""Copy a file of rows into two: rows to train on, and rows that are held out. No torch."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pyarrow
import pyarrow.parquet

from megatron_rl.data.row_files import UTF8_MARK
from megatron_rl.observe.appended_file import replace_file

ROWS_AT_ONCE = 1024


def held_out_rows(num_rows: int, most: int) -> set[int]:
    """Return the numbers of the rows to hold out: a tenth, at least 1 and at most `most`, spread evenly.

    The first row is trained on. Raises ValueError for fewer than 2 rows.
    """
    if num_rows < 2:
        raise ValueError(f"{num_rows} rows cannot be split")
    number = max(1, min(most, num_rows // 10))
    return {(place + 1) * num_rows // number - 1 for place in range(number)}


def split(source: Path, held_out: set[int], train: Path, val: Path) -> None:
    """Write the rows of a parquet or jsonl file, as they are, to two files of its kind. Raises OSError."""
    if source.suffix == ".parquet":
        _split_parquet(source, held_out, train, val)
        return
    lines = [line for line in source.read_bytes().removeprefix(UTF8_MARK).split(b"\n") if line.strip()]
    for target, is_held in ((train, False), (val, True)):
        rows = (line + b"\n" for row, line in enumerate(lines) if (row in held_out) == is_held)
        replace_file(target, b"".join(rows))


def _split_parquet(source: Path, held_out: set[int], train: Path, val: Path) -> None:
    numbers = count()
    with pyarrow.parquet.ParquetFile(source) as opened:
        schema = opened.schema_arrow
        with (
            pyarrow.parquet.ParquetWriter(train, schema) as trained,
            pyarrow.parquet.ParquetWriter(val, schema) as validated,
        ):
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                is_held = [next(numbers) in held_out for _ in range(batch.num_rows)]
                trained.write_batch(batch.filter(pyarrow.array([not held for held in is_held])))
                validated.write_batch(batch.filter(pyarrow.array(is_held)))
