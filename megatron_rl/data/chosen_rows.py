"""The rows of some files that `data.train_max_samples` or `data.val_max_samples` leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

import numpy

from megatron_rl.data.row_files import count_rows
from megatron_rl.data.row_problems import BadRow, RowPlace

Content = TypeVar("Content")


@dataclass(frozen=True)
class FileRows:
    """chosen: numbers of the rows of a file to use, from 0; None: all. num_rows: all of its rows, counted where some
    are chosen.
    """

    chosen: Set[int] | None = None
    num_rows: int = 0

    def used(
        self, rows: list[tuple[RowPlace, Content]], bad_rows: list[BadRow]
    ) -> tuple[list[tuple[RowPlace, Content]], list[BadRow]]:
        """Return the rows and the bad rows of a file that are to be used."""
        chosen = self.chosen
        if chosen is None:
            return rows, bad_rows
        return [row for row in rows if row[0].row in chosen], [bad for bad in bad_rows if bad.place.row in chosen]


ALL_ROWS = FileRows()


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
