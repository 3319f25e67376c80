"""Who sees whom where sequences or tries are cut over context-parallel ranks, as blocks of queries and keys.

Every rank has two chunks of every segment (`parallel/zigzag.py`) and gets a block of keys from each rank j. Rank r
computes
    j = r   both chunks of queries with both chunks of keys, causal
    j < r   both chunks of queries with the whole first chunk of keys; the second chunk is later than they are
    j > r   the second chunk of queries with both whole chunks of keys; the first is earlier than they are
which is the same work for all ranks, except with j = r. With a window, and in a trie, blocks are lists of rectangles
(`rectangles.py`), of which those beyond the window are left out. A trie is so computed on one GPU, too, without slots.

Legend: t tokens of this rank, C ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.device import in_one_copy
from megatron_rl.model.block_attention import Facing, Pieces
from megatron_rl.model.cascade_plan import SlotPlan, cut_prefixes
from megatron_rl.model.joined_attention import KeyBlock
from megatron_rl.model.rectangles import (
    Rectangle,
    Span,
    by_position,
    levels_of,
    of_chunks,
    of_trie,
    part_of,
    within,
)
from megatron_rl.model.segments import Segments
from megatron_rl.parallel.zigzag import chunk_ranges, zigzag_columns
from megatron_rl.records import places_in_rows

P2P, ALL_GATHER, A2A = "p2p", "all_gather", "a2a"


@dataclass
class ContextSegments(Segments):
    """The segments that Megatron passes to every layer if sequences are split over context-parallel ranks.

    lengths: those of all segments, row after row; padded rows are segments of one length. positions: int64 [S / C], of
    the columns of a row that this rank reads. Megatron's own `cp_group` stays unset; with it Megatron would split the
    rotary angles.

    made, made_reads: results of `blocks` and `read`, once they were asked for. For heads: the tensors of `Segments`, of
    the whole segments; order: int64 [C * t], positions in the whole segments of the tokens of all ranks, rank after
    rank; back: its inverse.
    """

    lengths: tuple[int, ...] = ()
    size: int = 1
    group: dist.ProcessGroup | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    made: dict[tuple[int, int, int | None], list[KeyBlock]] = field(default_factory=dict)
    made_reads: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def cut(
        cls,
        lengths: tuple[int, ...],
        num_rows: int,
        columns: Tensor,
        size: int,
        group: dist.ProcessGroup | None = None,
        how: str | None = None,
        with_slots: bool = True,
    ) -> ContextSegments:
        """lengths: those of one row's segments, each a multiple of 2 * C. columns: `zigzag_columns` of this rank, on
        the device that tensors are wanted on. size: C. group: the group of attention. how: one of `cp_comm_type`, which
        alone can be computed; None: all. with_slots: see `Segments.on_host`.
        """
        positions = places_in_rows(torch.tensor(lengths))
        segments = cls(
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            positions=positions[columns.cpu()],
            lengths=lengths * num_rows,
            size=size,
            group=group,
        )
        if how in (None, A2A):
            segments = segments._with_whole(with_slots)
        return segments.with_tensors({name: x.to(columns.device) for name, x in segments.tensors().items()})

    # Blocks of keys

    def blocks(self, rank: int, source: int, device: torch.device, window: int | None = None) -> list[KeyBlock]:
        """Return what `rank` computes with the keys from rank `source`: a block for every level of rectangles.

        device: where the tensors are.
        """
        key = (rank, source, window)
        if key not in self.made:
            levels = levels_of(self.rectangles(rank, source, window))
            self.made[key] = [key_block(level, device, window is not None) for level in levels]
        return self.made[key]

    def rectangles(self, rank: int, source: int, window: int | None) -> list[Rectangle]:
        """Return the rectangles of queries of `rank` and keys of rank `source`, in the columns that each has."""
        return of_chunks(self.lengths, self.size, rank, source, window)

    def read(self, rank: int, source: int, device: torch.device, window: int | None) -> Tensor:
        """int64: which tokens of rank `source` are seen by some of `rank`, in order."""
        key = (rank, source, window)
        if key not in self.made_reads:
            columns = columns_of(one.keys for one in self.rectangles(rank, source, window)).unique()
            self.made_reads[key] = in_one_copy([{"columns": columns}], device)[0]["columns"]
        return self.made_reads[key]

    # Whole segments, to which each rank attends with some of the heads

    def _with_whole(self, with_slots: bool) -> Self:
        whole = Segments.on_host(self.lengths, with_slots=with_slots)
        order = torch.cat([zigzag_columns(self.lengths, self.size, rank) for rank in range(self.size)])
        of_whole = {name: x for name, x in whole.tensors().items() if name != "positions"}
        return replace(self, shapes=whole.shapes, order=order, back=order.argsort()).with_tensors(of_whole)


@dataclass
class TrieSegments(ContextSegments):
    """The segments of a trie that a rank reads a part of, or all where `size` is 1.

    trie: the rectangles of all columns, of which positions follow each other if `by_position` cut them: trie_in_rows.
    spans: the columns of every rank. For heads (`a2a`) the tensors are those of `ContextSegments`, of the whole trie;
    where it has no slots, alone: the whole trie for one rank.
    """

    trie: tuple[Rectangle, ...] = ()
    trie_in_rows: tuple[Rectangle, ...] = ()
    spans: tuple[tuple[Span, ...], ...] = ()
    alone: TrieSegments | None = None

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
        spans = tuple(chunk_ranges(num_columns, size, other) for other in range(size))
        assert whole.positions is not None
        longest = {"max_seqlen_q": whole.max_seqlen_q, "max_seqlen_kv": whole.max_seqlen_kv}
        mine = cls(positions=whole.positions[columns_of(spans[rank])], size=size, group=group, **longest)
        if how in (None, A2A):
            if size > 1:  # one rank has all columns in order, of any number
                mine.order = torch.cat([zigzag_columns((num_columns,), size, other) for other in range(size)])
                mine.back = mine.order.argsort()
            mine.shapes, mine.pieces = whole.shapes, whole.pieces
            mine.token_of_slot, mine.slot_of_token = whole.token_of_slot, whole.slot_of_token
            mine.prefix_slots, mine.prefix_tokens = whole.prefix_slots, whole.prefix_tokens
            if size > 1 and not with_slots:
                mine.alone = cls.share_of(lengths, prefixes, how=ALL_GATHER)
        if how != A2A:
            padded = torch.nn.functional.pad(counts, (0, len(lengths) - len(counts)))
            pieces, nodes = cut_prefixes(SlotPlan(lengths, padded, before), lambda piece: True)
            assert not len(nodes.before)
            mine.trie, mine.spans = tuple(of_trie(nodes.lengths, pieces)), spans
            mine.trie_in_rows = tuple(by_position(mine.trie, whole.positions))
        return mine

    def rectangles(self, rank: int, source: int, window: int | None) -> list[Rectangle]:
        """See `ContextSegments.rectangles`."""
        if window is None:
            return part_of(self.trie, self.spans[rank], self.spans[source])
        return within(part_of(within(self.trie_in_rows, window), self.spans[rank], self.spans[source]), window)


def key_block(level: list[Rectangle], device: torch.device, has_window: bool) -> KeyBlock:
    """Return the block of a level's rectangles. has_window: positions matter."""
    spans = {"queries": [one.queries for one in level], "keys": [one.keys for one in level]}
    queries, keys = (Pieces(tuple(end - first for first, end in some), device) for some in spans.values())
    ahead = tuple(rectangle.ahead for rectangle in level) if has_window else ()
    side_by_side = {
        name: slice(some[0][0], some[-1][1])
        for name, some in spans.items()
        if all(one[1] == other[0] for one, other in pairwise(some))
    }
    apart = {name: columns_of(some) for name, some in spans.items() if name not in side_by_side}
    columns: dict[str, Tensor | slice] = {**side_by_side, **in_one_copy([apart], device)[0]}
    return KeyBlock(Facing(queries, keys, level[0].causal, ahead), columns["queries"], columns["keys"])


def columns_of(spans: Iterable[Span]) -> Tensor:
    """int64, the columns of spans, end to end."""
    return torch.cat([torch.arange(0), *(torch.arange(*span) for span in spans)])
