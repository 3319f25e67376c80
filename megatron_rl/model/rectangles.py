"""Rectangles: which neighbouring queries see which neighbouring keys, all of them or those that are not later.

Sequences and tries are lists of rectangles. Context-parallel ranks cut their columns (`parallel/zigzag.py`), and the
rectangles with them; a window leaves out those beyond it. The nodes of a trie are segments that end where
another branches off: a node's queries see its own keys causally, and all keys of the nodes before it. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from torch import Tensor

from megatron_rl.model.cascade_plan import SharedPiece
from megatron_rl.parallel.zigzag import chunks_of

Span = tuple[int, int]
"""Neighbouring columns, (first, end)."""


class Rectangle(NamedTuple):
    """Queries that see keys: all of them, or, where both are the same columns, those that are not later.

    ahead: how many positions the first query is after the first key. It is right where the positions of the queries
    follow each other, which windows need; see `by_position`.
    """

    queries: Span
    keys: Span
    causal: bool
    ahead: int = 0


def of_chunks(lengths: Sequence[int], size: int, rank: int, source: int, window: int | None) -> list[Rectangle]:
    """Return the rectangles of a rank's two chunks of every segment and another's, in the columns that each has.

    Without a window these are one rectangle: both chunks see the first one of an earlier rank, and the second chunk
    sees both of a later rank. size: number of ranks.
    """
    found, start = [], 0
    for length in lengths:
        long = length // (2 * size)
        middle, end = start + long, start + 2 * long
        if window is None:
            queries, keys = (middle if source > rank else start, end), (start, middle if source < rank else end)
            found.append(Rectangle(queries, keys, source == rank))
        else:
            spans = (start, middle), (middle, end)
            numbered = [zip(spans, chunks_of(one, size), strict=True) for one in (rank, source)]
            for (queries, number), (keys, earlier) in product(*numbered):
                if number >= earlier:
                    found.append(Rectangle(queries, keys, number == earlier, (number - earlier) * long))
        start = end
    return found if window is None else within(found, window)


def of_trie(lengths: Sequence[int], pieces: Iterable[SharedPiece]) -> list[Rectangle]:
    """Return those of nodes of these lengths, end to end, and of their shared pieces."""
    own_keys, column = [], 0
    for length in lengths:
        own = (column, column + length)
        own_keys.append(Rectangle(own, own, causal=True))
        column += length
    return [*own_keys, *(Rectangle(piece.queries, piece.keys, causal=False) for piece in pieces)]


def by_position(whole: Iterable[Rectangle], positions: Tensor) -> list[Rectangle]:
    """Cut rectangles where the positions of neighbouring queries do not follow each other. positions: int64, of all
    columns, on the CPU; those of a rectangle's keys follow each other.
    """
    jumps = ((positions[1:] != positions[:-1] + 1).nonzero()[:, 0] + 1).tolist()
    places, parts = positions.tolist(), []
    for rectangle in whole:
        first, end = rectangle.queries
        bounds = [first, *(jump for jump in jumps if first < jump < end), end]
        for start, stop in pairwise(bounds):
            ahead = places[start] - places[rectangle.keys[0]]
            parts.append(rectangle._replace(queries=(start, stop), ahead=ahead))
    return parts


def within(whole: Iterable[Rectangle], window: int) -> list[Rectangle]:
    """Return what is left of rectangles if a query sees `window` positions, its own included: those beyond are left
    out, and others lose the first keys and last queries that are alone.
    """
    kept = []
    for queries, keys, causal, ahead in whole:
        unseen = max(0, ahead - window + 1)
        seeing = keys[1] - keys[0] - 1 - ahead + window
        if unseen < keys[1] - keys[0]:
            some = (queries[0], min(queries[1], queries[0] + seeing))
            kept.append(Rectangle(some, (keys[0] + unseen, keys[1]), causal, ahead - unseen))
    return kept


def part_of(whole: Iterable[Rectangle], queries: Sequence[Span], keys: Sequence[Span]) -> list[Rectangle]:
    """Return what chunks of queries see of chunks of keys, in columns of these chunks, end to end.

    A chunk of queries and one of keys are the same, or have no column in common.
    """
    parts = []
    for rectangle in whole:
        for of_queries, q_shift in _shifted(queries, rectangle.queries):
            for of_keys, k_shift in _shifted(keys, rectangle.keys):
                if rectangle.causal and of_keys[0] > of_queries[0]:
                    continue  # later
                is_same = rectangle.causal and of_keys == of_queries
                moved = of_queries[0] - rectangle.queries[0] - (of_keys[0] - rectangle.keys[0])
                spans = _moved(of_queries, q_shift), _moved(of_keys, k_shift)
                parts.append(Rectangle(*spans, is_same, rectangle.ahead + moved))
    return parts


def _shifted(chunks: Sequence[Span], span: Span) -> list[tuple[Span, int]]:
    """(columns that a chunk has of the span, how far they are from their place among the chunks) of each that has."""
    in_chunks, before = [], 0
    for first, end in chunks:
        both = (max(first, span[0]), min(end, span[1]))
        if both[0] < both[1]:
            in_chunks.append((both, before - first))
        before += end - first
    return in_chunks


def _moved(span: Span, shift: int) -> Span:
    return span[0] + shift, span[1] + shift


def levels_of(unordered: Iterable[Rectangle]) -> list[list[Rectangle]]:
    """Spread rectangles over few levels, in each of which all are alike and no two have a query in common."""
    levels: list[list[Rectangle]] = []
    for rectangle in sorted(unordered, key=lambda one: (not one.causal, one.queries)):
        free = (
            level
            for level in levels
            if level[0].causal == rectangle.causal and level[-1].queries[1] <= rectangle.queries[0]
        )
        level = next(free, None)
        if level is None:
            levels.append([rectangle])
        else:
            level.append(rectangle)
    return levels
