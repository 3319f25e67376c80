"""Large columns stay in shared memory on the node that produced them; only references go through the driver.

    a rank's reply --files.put--> RemoteSegment ... RemoteColumn: rows, joined --> a rank that reads them maps the file

A segment is a file in shared memory on the node of the rank that made it. Files are written once and never changed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch

Range = tuple[int, int]
"""(start, stop), in elements of a segment."""


class Files(Protocol):
    """How this process comes by segments. keeps_values: a column that was read is kept for the next reader."""

    keeps_values: bool

    def read(self, segment: RemoteSegment, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """Return the elements of each range [n, *element]; views of the file where it is here."""

    def free(self, path: str, node: str) -> None:
        """Remove a segment that nothing refers to any longer; only where columns are passed on."""


@runtime_checkable
class HasColumns(Protocol):
    """A response of a rank, other than a batch, in which there are columns that ranks alone read."""

    def with_held(self, hold: Callable[[torch.Tensor], torch.Tensor | RemoteColumn]) -> Any:
        """Return the answer with those columns as `hold` returns them."""


@dataclass(frozen=True, eq=False)
class RemoteSegment:
    """Elements end to end. path: of the file. node: the name of its node. shape: [n, *element].

    files: of this process. The file is removed with the driver's last reference to it.
    """

    path: str
    node: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    files: Files

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.path} ends with its run: read the column before it is stored elsewhere")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    def freed_with(self) -> RemoteSegment:
        """Have the file removed when this object goes; returns it."""
        weakref.finalize(self, self.files.free, self.path, self.node).atexit = False
        return self


Part = RemoteSegment | torch.Tensor


class RemoteColumn:
    """A ragged column [B, (N), *element], of which this process has not the values but where they lie.

    parts: where; a small share of a column may be a tensor. part, first, lengths: int64 [B], of each row the number of
    its part, its first element there and its elements. Where parts have elements of several shapes, the smaller are
    filled up with 0 on the right. Has the methods of a ragged tensor that do not compute.
    """

    is_nested = True

    def __init__(self, parts: Sequence[Part], part: torch.Tensor, first: torch.Tensor, lengths: torch.Tensor) -> None:
        self.parts, self.part, self.first, self.lengths = tuple(parts), part, first, lengths
        self._values: torch.Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteColumn, (self.parts, self.part, self.first, self.lengths)

    @classmethod
    def of(cls, part: Part, lengths: torch.Tensor) -> RemoteColumn:
        """All elements of one part, as rows of `lengths` (int64 [B]) end to end."""
        return cls([part], torch.zeros_like(lengths), lengths.cumsum(0) - lengths, lengths)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    @property
    def element(self) -> tuple[int, ...]:
        """The shape of an element."""
        return max(tuple(part.shape[1:]) for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """The widest of its parts' dtypes."""
        return max((part.dtype for part in self.parts), key=lambda dtype: dtype.itemsize)

    def dim(self) -> int:
        """Return the dimensions, those of rows and of elements in a row among them."""
        return 2 + len(self.element)

    def numel(self) -> int:
        """Return the count of its numbers."""
        return int(self.lengths.sum()) * torch.Size(self.element).numel()

    def offsets(self) -> torch.Tensor:
        """int64 [B + 1]: where each row begins in `values`, and their end."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def rows(self, rows: torch.Tensor) -> RemoteColumn:
        """Return the rows with these numbers (int64), and of the parts those that they lie in."""
        used, part = self.part[rows].unique(return_inverse=True)
        parts = [self.parts[number] for number in used.tolist()] or self.parts[:1]
        return RemoteColumn(parts, part, self.first[rows], self.lengths[rows])

    @staticmethod
    def joined(columns: Sequence[RemoteColumn]) -> RemoteColumn:
        """Return the rows of several columns, one after the other."""
        part, parts = [], list[Part]()
        for column in columns:
            part.append(column.part + len(parts))
            parts += column.parts
        first, lengths = (torch.cat([getattr(column, name) for column in columns]) for name in ("first", "lengths"))
        return RemoteColumn(parts, torch.cat(part), first, lengths)

    def runs(self) -> list[tuple[int, Range]]:
        """Return (part, elements) of what lies together, in the order of `values`."""
        runs: list[tuple[int, Range]] = []
        for part, first, length in zip(self.part.tolist(), self.first.tolist(), self.lengths.tolist(), strict=True):
            if runs and runs[-1][0] == part and runs[-1][1][1] == first:
                runs[-1] = (part, (runs[-1][1][0], first + length))
            elif length:
                runs.append((part, (first, first + length)))
        return runs

    def wanted(self) -> list[tuple[RemoteSegment, list[Range]]]:
        """Return each segment with the elements of it that a reader needs, in ascending order."""
        by_part = ranges_of_parts(sorted(self.runs()))
        wanted = ((self.parts[part], ranges) for part, ranges in by_part.items())
        return [(part, ranges) for part, ranges in wanted if isinstance(part, RemoteSegment)]

    def values(self) -> torch.Tensor:
        """Return the elements of all rows end to end [sum(lengths), *element]; a view where they are so."""
        if self._values is not None:
            return self._values
        runs = self.runs()
        pieces: dict[tuple[int, Range], torch.Tensor] = {}
        for number, ranges in sorted(ranges_of_parts(dict.fromkeys(runs)).items()):
            part = self.parts[number]
            if isinstance(part, RemoteSegment):
                read = part.files.read(part, ranges)
            else:
                read = [part[start:stop] for start, stop in ranges]
            pieces |= {(number, run): piece for run, piece in zip(ranges, read, strict=True)}
        values = self._put_together([pieces[run] for run in runs])
        if all(part.files.keeps_values for part in self.parts if isinstance(part, RemoteSegment)):
            self._values = values
        return values

    def _put_together(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        element, dtype = self.element, self.dtype
        if pieces and all(tuple(piece.shape[1:]) == element and piece.dtype == dtype for piece in pieces):
            return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        values, start = torch.zeros(int(self.lengths.sum()), *element, dtype=dtype), 0
        for piece in pieces:
            stop = start + len(piece)
            values[(slice(start, stop), *(slice(size) for size in piece.shape[1:]))] = piece.to(dtype)
            start = stop
        return values


def ranges_of_parts(runs: Iterable[tuple[int, Range]]) -> dict[int, list[Range]]:
    """Return part -> its ranges, in the order of `RemoteColumn.runs`."""
    ranges = defaultdict[int, list[Range]](list)
    for part, run in runs:
        ranges[part].append(run)
    return ranges
