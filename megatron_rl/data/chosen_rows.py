"""The rows of some files that `data.train_max_samples` or `data.val_max_samples` leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy

from megatron_rl.data.row_files import count_rows


@dataclass(frozen=True)
class FileRows:
    """num_rows: all rows of a file. chosen: numbers of those to use, from 0; None: all."""

    num_rows: int
    chosen: Set[int] | None = None

    def has(self, row: int) -> bool:
        """Return whether a row is to be used."""
        return self.chosen is None or row in self.chosen


def chosen_rows(paths: Sequence[str], most: int, seed: int | None) -> list[FileRows]:
    """Choose `most` rows of all files together, at random without repetition, or the first ones.

    most: below 1: all rows. seed: of the random choice, which is verl's of the same seed; None: the first rows.
    Raises ConfigError for a file that cannot be read.
    """
    sizes = [count_rows(path, sys.maxsize) for path in paths]
    total = sum(sizes)
    if not 0 < most < total:
        return [FileRows(size) for size in sizes]
    numbers = range(most)
    if seed is not None:
        numbers = numpy.random.default_rng(seed).choice(total, size=most, replace=False).tolist()
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [
        FileRows(size, {number - start for number in numbers if start <= number < start + size})
        for start, size in zip(starts, sizes, strict=True)
    ]
