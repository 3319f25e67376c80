"""Attention over a trie block by block, without slots: on GPUs, and where context-parallel ranks share its columns.

The nodes of a trie are segments that end where another branches off. A node's queries see its own keys causally, and
all keys of the nodes before it. So everything is a rectangle of queries and keys, causal or whole. The columns are cut
over ranks as one sequence is (`parallel/zigzag.py`), and rectangles with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.block_attention import Facing, Pieces
from megatron_rl.model.cascade_plan import SharedPiece, SlotPlan, cut_prefixes
from megatron_rl.model.context_attention import A2A, ContextSegments, KeyBlock
from megatron_rl.model.segments import Segments
from megatron_rl.parallel.zigzag import chunk_ranges, zigzag_columns

Span = tuple[int, int]
"""Neighbouring columns, (first, end)."""


class Rectangle(NamedTuple):
    """Queries that see keys: all of them, or, where both are the same columns, those that are not later."""

    queries: Span
    keys: Span
    causal: bool


def rectangles(lengths: Sequence[int], pieces: Iterable[SharedPiece]) -> list[Rectangle]:
    """Return those of nodes of these lengths, end to end, and of their shared pieces."""
    own_keys, column = [], 0
    for length in lengths:
        own = (column, column + length)
        own_keys.append(Rectangle(own, own, causal=True))
        column += length
    return [*own_keys, *(Rectangle(piece.queries, piece.keys, causal=False) for piece in pieces)]


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
                parts.append(Rectangle(_moved(of_queries, q_shift), _moved(of_keys, k_shift), is_same))
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


@dataclass
class TrieSegments(ContextSegments):
    """The segments of a trie that a rank reads a part of, or all where `size` is 1.

    levels: for the block of keys from every rank, `levels_of` what this rank's queries see of it. made: these on a
    device. depths: the positions of every rank's columns. For heads (`a2a`) the tensors are those of `ContextSegments`,
    of the whole trie.
    """

    levels: tuple[list[list[Rectangle]], ...] = ()
    made: dict[tuple[int, torch.device], list[KeyBlock]] = field(default_factory=dict)
    depths: tuple[Tensor, ...] = ()

    @classmethod
    def share_of(
        cls,
        lengths: Sequence[int],
        prefixes: tuple[Tensor, Tensor],
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        how: str | None = None,
        with_slots: bool = True,
        with_pieces: bool = True,
    ) -> TrieSegments:
        """Make those of a rank, on the CPU. how: one of `cp_comm_type`, which alone can be computed; None: all.
        prefixes, with_slots, with_pieces: see `Segments.on_host`; every column of a prefix has neighbours for readers,
        as in a trie.
        """
        counts, before = prefixes
        whole = Segments.on_host(lengths, prefixes, with_slots and how in (None, A2A), with_pieces)
        num_columns = sum(lengths)
        columns = torch.cat([torch.arange(*span) for span in chunk_ranges(num_columns, size, rank)])
        assert whole.positions is not None
        longest = {"max_seqlen_q": whole.max_seqlen_q, "max_seqlen_kv": whole.max_seqlen_kv}
        mine = cls(positions=whole.positions[columns], size=size, group=group, **longest)
        if how in (None, A2A):
            if size > 1:  # one rank has all columns in order, of any number
                mine.order = torch.cat([zigzag_columns((num_columns,), size, other) for other in range(size)])
                mine.back = mine.order.argsort()
            mine.shapes, mine.pieces = whole.shapes, whole.pieces
            mine.token_of_slot, mine.slot_of_token = whole.token_of_slot, whole.slot_of_token
            mine.prefix_slots, mine.prefix_tokens = whole.prefix_slots, whole.prefix_tokens
        if how != A2A:
            padded = torch.nn.functional.pad(counts, (0, len(lengths) - len(counts)))
            pieces, nodes = cut_prefixes(SlotPlan(lengths, padded, before), lambda piece: True)
            assert not len(nodes.before)
            mine.depths = tuple(
                whole.positions[torch.cat([torch.arange(*span) for span in chunk_ranges(num_columns, size, other)])]
                for other in range(size)
            )
            trie, spans = rectangles(nodes.lengths, pieces), [chunk_ranges(num_columns, size, x) for x in range(size)]
            mine.levels = tuple(levels_of(part_of(trie, spans[rank], spans[source])) for source in range(size))
        return mine

    def _places(self, rank: int) -> Tensor:
        return self.depths[rank]

    def blocks(self, rank: int, source: int, device: torch.device) -> list[KeyBlock]:
        """See `ContextSegments.blocks`; one for every level."""
        key = (source, device)
        if key not in self.made:
            self.made[key] = [_key_block(level, device) for level in self.levels[source]]
        return self.made[key]


def _key_block(level: list[Rectangle], device: torch.device) -> KeyBlock:
    queries, q_columns = _pieces([rectangle.queries for rectangle in level], device)
    keys, k_columns = _pieces([rectangle.keys for rectangle in level], device)
    return KeyBlock(Facing(queries, keys, level[0].causal), q_columns, k_columns)


def _pieces(spans: list[Span], device: torch.device) -> tuple[Pieces, Tensor]:
    """(the spans end to end, int64 their columns)."""
    columns = torch.cat([torch.arange(*span) for span in spans]).to(device)
    return Pieces.of(tuple(end - first for first, end in spans), device), columns
