"""Rows of held columns, chosen and joined in any order, are those of the tensors that lie in their segments."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.cluster.rank_messages import answer_of, dumps, loads, packed
from megatron_rl.columns import COLUMNS
from megatron_rl.records import Batch, ragged_from_lengths, ragged_of_pieces, row_lengths
from megatron_rl.remote_columns import ColumnPiece, Range, RemoteColumn, RemoteSegment
from megatron_rl.rollout.slices import Drawn, SliceReport

WIDTHS = st.integers(1, 3)
ROWS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


class Shelf:
    """Segments in this process. asked: what was read of each; freed: in their order."""

    keeps_values = False

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.asked: list[tuple[str, list[Range]]] = []
        self.freed: list[str] = []

    def put(self, values: torch.Tensor) -> RemoteSegment:
        path = f"segment {len(self.values)}"
        self.values[path] = values
        return RemoteSegment(path, "node", values.dtype, tuple(values.shape), self)

    def read(self, segment: RemoteSegment, ranges: Sequence[Range]) -> list[torch.Tensor]:
        self.asked.append((segment.path, list(ranges)))
        return [self.values[segment.path][start:stop] for start, stop in ranges]

    def free(self, path: str, node: str) -> None:
        self.freed.append(path)


def column(shelf: Shelf, lengths: Sequence[int], width: int, start: int, is_held: bool) -> RemoteColumn:
    """Numbers from `start`, which no other column has, as float16 or, where the width is odd, float32."""
    count = sum(lengths) * width
    values = torch.arange(start, start + count).view(-1, width).to(torch.float32 if width % 2 else torch.float16)
    return RemoteColumn.of(shelf.put(values) if is_held else values, torch.tensor(lengths))


@settings(max_examples=80, deadline=None)
@given(
    shares=st.lists(st.tuples(ROWS, WIDTHS, st.booleans()), min_size=1, max_size=4), data=st.data(), cuts=st.integers()
)
def test_rows_are_those_of_the_segments(shares, data, cuts) -> None:
    """Joined, chosen with repetition, cut and joined again: each row's numbers, the narrow filled up with 0.
    By lists in Python. Would not catch a wrong file, which the pools' tests do.
    """
    shelf, columns, expected = Shelf(), [], []
    width = max(width for _, width, _ in shares)
    for number, (lengths, own, is_held) in enumerate(shares):
        columns.append(column(shelf, lengths, own, 100 * number, is_held))
        place = 100 * number
        for length in lengths:
            rows = [[place + at * own + each for each in range(own)] + [0] * (width - own) for at in range(length)]
            expected.append(rows)
            place += length * own
    joined = RemoteColumn.joined(columns)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=8)))
    cut = cuts % len(chosen)
    rows, rest = joined.rows(chosen[: cut + 1]), joined.rows(chosen[cut:])
    both = RemoteColumn.joined([rows, rest])
    numbers = [*chosen[: cut + 1].tolist(), *chosen[cut:].tolist()]
    assert not shelf.asked
    for each, held in ((joined, range(len(expected))), (rows, numbers[: cut + 1]), (both, numbers)):
        lengths = [len(expected[number]) for number in held]
        assert row_lengths(each).tolist() == each.lengths.tolist() == lengths and len(each) == len(lengths)
        values = each.values()
        assert each.numel() == values.numel() and each.dim() == values.dim() + 1
        pieces = values.split(lengths)
        wide = each.element[0]
        assert [piece.tolist() for piece in pieces] == [[row[:wide] for row in expected[number]] for number in held]
        assert values.dtype == each.dtype


def test_what_is_wanted_is_what_is_read() -> None:
    """By hand: rows 2, 0 and 2 of one segment, row 1 of another. Would not catch ranges that should be joined."""
    shelf = Shelf()
    joined = RemoteColumn.joined([column(shelf, [2, 1, 3], 1, 0, True), column(shelf, [1, 1], 1, 100, True)])
    rows = joined.rows(torch.tensor([2, 0, 4, 2]))
    assert [(segment.path, ranges) for segment, ranges in rows.wanted()] == [
        ("segment 0", [(0, 2), (3, 6), (3, 6)]),
        ("segment 1", [(1, 2)]),
    ]
    assert rows.values().flatten().tolist() == [3, 4, 5, 0, 1, 101, 3, 4, 5]
    assert shelf.asked == [("segment 0", [(3, 6), (0, 2)]), ("segment 1", [(1, 2)])]


def test_a_batch_reads_a_held_column_when_it_is_asked_for_it() -> None:
    """Joined with rows that are here, and as values; neutral rows have none. Would not catch a copy that is kept."""
    shelf = Shelf()
    tokens = ragged_from_lengths(torch.arange(7), torch.tensor([3, 4]))
    mask = ragged_from_lengths(torch.tensor([False, True, True, False, True, True, True]), torch.tensor([3, 4]))
    batch = Batch(input_ids=tokens, sampled=mask, teacher_hidden=column(shelf, [2, 3], 2, 0, True))
    with pytest.raises(ValueError, match=r"teacher_hidden .* \[2, 3\] in its rows; it has \[3, 2\]"):
        batch[:].add(teacher_hidden=column(shelf, [3, 2], 2, 0, True))
    here = Batch(**{name: batch[name] for name in batch.names})
    shelf.asked.clear()
    joined = Batch.joined([batch[torch.tensor([1])], here])
    assert isinstance(joined.stored("teacher_hidden"), RemoteColumn) and not shelf.asked
    assert joined["teacher_hidden"].values().tolist() == [[4, 5], [6, 7], [8, 9], *here.flat("teacher_hidden").tolist()]
    assert len(shelf.asked) == 1 and joined.get("teacher_hidden") is not None
    assert batch.neutral().flat("teacher_hidden").shape == (0, 2) and batch.neutral().flat("sampled").sum() == 0


def test_a_segment_is_freed_with_its_last_reference() -> None:
    """On the driver, and not on ranks. Once, whatever columns share it. Would not catch a file that is not removed."""
    maker, driver, reader = Shelf(), Shelf(), Shelf()
    answer = Batch(teacher_hidden=column(maker, [2, 1], 2, 0, True))
    taken = answer_of(dumps((None, (answer, answer["teacher_hidden"].values()))), driver)[0]
    del answer
    driver.values = reader.values = maker.values
    part = taken[torch.tensor([1])]
    content, held = packed(("run", part, taken))
    assert [column.lengths.tolist() for column in held] == [[1], [2, 1]]
    alone = packed([ColumnPiece(piece.part, piece.first, 1) for piece in part.stored("teacher_hidden").pieces()])
    assert [column.runs() for column in alone.held] == [[(0, (2, 3))]]  # so that it is copied to its reader's node
    sent = loads(content, reader)
    del taken, alone
    assert not driver.freed and sent[1].flat("teacher_hidden").tolist() == [[4, 5]]
    del sent
    assert (
        not reader.freed
        and part.flat("teacher_hidden").tolist() == [[4, 5]]
        and driver.asked == [("segment 0", [(2, 3)])]
    )
    with pytest.raises(TypeError, match="segment 0 ends with its run"):
        pickle.dumps(part)
    del part, held
    assert driver.freed == ["segment 0"]


def test_what_ranks_alone_read_is_held() -> None:
    """By their readers. Would not catch code on the driver that reads a column without being declared."""
    assert {name for name, column in COLUMNS.items() if column.is_held} == {
        *("routed_experts", "teachers", "teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"),
        *("student_top_ids", "teacher_log_probs_at", "teacher_hidden", "kept", "trained"),
        *("image_pieces", "image_grids", "image_features", "image_patches", "policy_features"),
    }


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 3))), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_row_of_pieces_is_its_pieces_end_to_end(rows, data) -> None:
    """Of two segments and a tensor, in any order, some of no element and some rows of no piece: joined, chosen with
    repetition and read, they are what lists in Python say. Would not catch a segment that is opened twice.
    """
    shelf, numbers = Shelf(), torch.arange(27).view(3, 9, 1)
    parts = [shelf.put(numbers[0]), shelf.put(numbers[1]), numbers[2]]
    pieces = [[ColumnPiece(parts[part], first, length) for part, first, length in row] for row in [[(0, 0, 1)], *rows]]
    expected = [
        [9 * part + first + at for part, first, length in row for at in range(length)] for row in [[(0, 0, 1)], *rows]
    ]
    column = RemoteColumn.of_pieces(pieces)
    assert len(column.parts) <= 3 and column.pieces() == [piece for row in pieces for piece in row]
    chosen = data.draw(st.lists(st.integers(0, len(rows)), min_size=1, max_size=9))
    taken = column.rows(torch.tensor(chosen))
    both = RemoteColumn.joined([taken, column])
    for each, order in ((column, range(len(pieces))), (taken, chosen), (both, [*chosen, *range(len(pieces))])):
        assert row_lengths(each).tolist() == [len(expected[row]) for row in order] and len(each) == len(order)
        assert each.values().flatten().tolist() == [value for row in order for value in expected[row]]
        assert each.numel() == len(each.values())


@pytest.mark.parametrize("is_large", [True, False])
def test_experts_of_a_slice_are_held_together(is_large: bool) -> None:
    """Experts of two responses of three are one column; with those of a slice before they become the rows of a batch.
    Would not catch experts of another slice's tokens.
    """
    shelf = Shelf()

    def hold(column: torch.Tensor) -> torch.Tensor | RemoteColumn:
        return RemoteColumn.of(shelf.put(column.values()), row_lengths(column)) if is_large else column

    before = ColumnPiece.whole(torch.arange(200, 208).view(2, 2, 2))
    experts = [torch.arange(12).view(3, 2, 2), torch.arange(100, 104).view(1, 2, 2)]
    drawn = {
        4: Drawn((1, 2), (0.0, 0.0), "stop", ColumnPiece.whole(experts[0])),
        7: Drawn((3,), (0.0,)),
        9: Drawn((5,), (0.0,), "", ColumnPiece.whole(experts[1])),
    }
    report = SliceReport(0, 0, 1, drawn).with_held(hold)
    assert report.drawn[7] == drawn[7] and len(shelf.values) == is_large
    column = ragged_of_pieces([[before, report.drawn[9].experts], [], [report.drawn[4].experts]])
    assert isinstance(column, RemoteColumn) == is_large and row_lengths(column).tolist() == [3, 0, 3]
    assert torch.equal(column.values(), torch.cat([before.part, experts[1], experts[0]]))
    assert SliceReport(0, 0, 1, {7: drawn[7]}).with_held(hold) == SliceReport(0, 0, 1, {7: drawn[7]})
