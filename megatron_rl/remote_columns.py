"""Large columns stay in shared memory on the node that produced them; only references go through the driver.

    a rank's reply --files.put--> RemoteSegment ... RemoteColumn: rows, joined --> a rank that reads them maps the file

A segment is a file in shared memory on the node of the rank that made it. Files are written once and never changed.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

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

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def freed_with(self) -> RemoteSegment:
        """Have the file removed when this object goes; returns it."""
        weakref.finalize(self, self.files.free, self.path, self.node).atexit = False
        return self


Part = RemoteSegment | torch.Tensor


class ColumnPiece(NamedTuple):
    """Neighbouring elements of a row: `length` of a part, from its element `first` on."""

    part: Part
    first: int
    length: int

    @classmethod
    def whole(cls, values: torch.Tensor) -> ColumnPiece:
        """All elements of a tensor of this process."""
        return cls(values, 0, len(values))


class RemoteColumn:
    """A ragged column [B, (N), *element], of which this process has not the values but where they lie.

    A row is one or more pieces, which were stored where and when they were made. parts: the segments of all pieces; a
    small share of a column may be a tensor. part, first, sizes: int64 [P], of each piece, row after row, the number of
    its part, its first element in that and its elements. num_pieces: int64 [B], those of each row. Where parts have
    elements of several shapes, the smaller are filled up with 0 on the right. Has the methods of a ragged tensor that
    do not compute.
    """

    is_nested = True

    def __init__(
        self,
        parts: Sequence[Part],
        part: torch.Tensor,
        first: torch.Tensor,
        sizes: torch.Tensor,
        num_pieces: torch.Tensor,
    ) -> None:
        self.parts, self.part, self.first, self.sizes = tuple(parts), part, first, sizes
        self.num_pieces = num_pieces
        self._values: torch.Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteColumn, (self.parts, self.part, self.first, self.sizes, self.num_pieces)

    @classmethod
    def of(cls, part: Part, lengths: torch.Tensor) -> RemoteColumn:
        """All elements of one part, as rows of `lengths` (int64 [B]) end to end."""
        return cls([part], torch.zeros_like(lengths), lengths.cumsum(0) - lengths, lengths, torch.ones_like(lengths))

    @classmethod
    def of_pieces(cls, rows: Sequence[Sequence[ColumnPiece]]) -> RemoteColumn:
        """Rows of pieces, of which there is at least one."""
        pieces = [piece for row in rows for piece in row]
        parts = {id(piece.part): piece.part for piece in pieces}
        numbers = {known: number for number, known in enumerate(parts)}
        table = [(numbers[id(piece.part)], piece.first, piece.length) for piece in pieces]
        part, first, sizes = torch.tensor(table, dtype=torch.int64).view(-1, 3).T.contiguous()
        return cls(list(parts.values()), part, first, sizes, torch.tensor([len(row) for row in rows]))

    @property
    def lengths(self) -> torch.Tensor:
        """int64 [B]: elements of each row."""
        row = torch.arange(len(self.num_pieces)).repeat_interleave(self.num_pieces)
        return torch.zeros_like(self.num_pieces).index_add_(0, row, self.sizes)

    def pieces(self) -> list[ColumnPiece]:
        """Return the pieces of all rows, one after the other."""
        table = zip(self.part.tolist(), self.first.tolist(), self.sizes.tolist(), strict=True)
        return [ColumnPiece(self.parts[part], first, size) for part, first, size in table]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.num_pieces)

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
        return int(self.sizes.sum()) * torch.Size(self.element).numel()

    def offsets(self) -> torch.Tensor:
        """int64 [B + 1]: where each row begins in `values`, and their end."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def rows(self, rows: torch.Tensor) -> RemoteColumn:
        """Return the rows with these numbers (int64), and of the parts those that they lie in."""
        counts = self.num_pieces[rows]
        before = (self.num_pieces.cumsum(0) - self.num_pieces)[rows] - (counts.cumsum(0) - counts)
        pieces = torch.arange(int(counts.sum())) + before.repeat_interleave(counts)
        used, part = self.part[pieces].unique(return_inverse=True)
        parts = [self.parts[number] for number in used.tolist()] or self.parts[:1]
        return RemoteColumn(parts, part, self.first[pieces], self.sizes[pieces], self.num_pieces[rows])

    def regrouped(self, num_pieces: torch.Tensor) -> RemoteColumn:
        """Return the same pieces as other rows. num_pieces: int64, those of each."""
        return RemoteColumn(self.parts, self.part, self.first, self.sizes, num_pieces)

    @staticmethod
    def joined(columns: Sequence[RemoteColumn]) -> RemoteColumn:
        """Return the rows of several columns, one after the other."""
        part, parts = [], list[Part]()
        for column in columns:
            part.append(column.part + len(parts))
            parts += column.parts
        first, sizes, num_pieces = (
            torch.cat([getattr(column, name) for column in columns]) for name in ("first", "sizes", "num_pieces")
        )
        return RemoteColumn(parts, torch.cat(part), first, sizes, num_pieces)

    def runs(self) -> list[tuple[int, Range]]:
        """Return (part, elements) of what lies together, in the order of `values`."""
        runs: list[tuple[int, Range]] = []
        for part, first, length in zip(self.part.tolist(), self.first.tolist(), self.sizes.tolist(), strict=True):
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
        values, start = torch.zeros(int(self.sizes.sum()), *element, dtype=dtype), 0
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
