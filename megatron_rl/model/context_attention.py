"""Causal attention for context parallelism: every rank has two chunks of every segment (`parallel/zigzag.py`).

Megatron's names for `cp_comm_type`:
    p2p         keys and values are passed around a ring (ring attention, Liu et al., arXiv:2310.01889)
    all_gather  all ranks' keys and values are gathered for one layer at a time
    a2a         ranks exchange tokens for heads and back (Ulysses, Jacobs et al., arXiv:2309.14509)

The first two compute the same: rank r gets a block of keys from each rank j.
    j = r   both chunks of queries attend to both chunks of keys, causal
    j < r   both chunks of queries attend to the whole first chunk of keys; the second chunk is later than they are
    j > r   the second chunk of queries attends to both whole chunks of keys; the first is earlier than they are
Every step is the same work for all ranks, except the step with j = r. Backward keeps only this rank's own tensors.

Legend: t tokens of this rank, N query heads and K key/value heads of this TP rank, D head size, C ranks, b rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.device import has_varlen_attention
from megatron_rl.model.attention import CausalAttention, bucketed, varlen
from megatron_rl.model.block_attention import (
    PLAIN,
    AttentionKind,
    Facing,
    Merged,
    Pieces,
    Places,
    block_backward,
    block_forward,
    boundaries_of,
)
from megatron_rl.model.eager_attention import sink_gradient
from megatron_rl.model.key_exchange import Alone, Gathered, KeyExchange, Ring, to_heads, to_own_tokens
from megatron_rl.model.segments import Segments
from megatron_rl.parallel.zigzag import zigzag_columns
from megatron_rl.records import places_in_rows

P2P, ALL_GATHER, A2A = "p2p", "all_gather", "a2a"


class KeyBlock(NamedTuple):
    """Which queries attend to which keys, and the tokens of both that take part, int64; None: all of them."""

    facing: Facing
    queries: Tensor | None
    keys: Tensor | None


@dataclass
class ContextSegments(Segments):
    """The segments that Megatron passes to every layer if sequences are split over context-parallel ranks.

    lengths: of all segments, row after row; padded rows are segments of one length. positions: int64 [S / C], of the
    columns of a row that this rank reads. Megatron's own `cp_group` stays unset; with it Megatron would split the
    rotary angles.

    For blocks of keys: own_boundaries and chunk_boundaries, int32 [segments + 1], of this rank's parts of the segments
    and of their first chunks, or second ones, alone; first_chunks, second_chunks: int64 [t / 2], the tokens of these.
    For heads: the tensors of `Segments`, of the whole segments; order: int64 [C * t], positions in the whole segments
    of the tokens of all ranks, rank after rank; back: its inverse.

    For windows: made_places, the positions of each rank's tokens on a device, as soon as they were asked for.
    """

    lengths: tuple[int, ...] = ()
    size: int = 1
    group: dist.ProcessGroup | None = None
    own_boundaries: Tensor | None = None
    chunk_boundaries: Tensor | None = None
    first_chunks: Tensor | None = None
    second_chunks: Tensor | None = None
    order: Tensor | None = None
    back: Tensor | None = None
    made_places: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

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
        """lengths: of the segments of one row, each a multiple of 2 * C. columns: `zigzag_columns` of this rank, on the
        device that tensors are wanted on. size: C. group: the group of attention. how: one of `cp_comm_type`, which
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
        if how != A2A:
            segments = segments._with_chunks()
        if how is None or how == A2A:
            segments = segments._with_whole(with_slots)
        return segments.with_tensors({name: x.to(columns.device) for name, x in segments.tensors().items()})

    # Blocks of keys

    def blocks(self, rank: int, source: int, device: torch.device) -> list[KeyBlock]:
        """Return what `rank` computes with the keys from rank `source`, for tensors on a device."""
        if source == rank:
            return [KeyBlock(self._same, None, None)]
        if source < rank:
            return [KeyBlock(self._earlier, None, self.first_chunks)]
        return [KeyBlock(self._later, self.second_chunks, None)]

    def places_of(
        self, block: KeyBlock, kind: AttentionKind, rank: int, source: int, device: torch.device
    ) -> Places | None:
        """Return the positions of a block's queries on `rank` and of its keys from rank `source`, on a device; None for
        attention that needs none.
        """
        if kind.window is None:
            return None
        of_queries, of_keys = self._places_on(rank, device), self._places_on(source, device)
        return Places(taken(of_queries, block.queries), taken(of_keys, block.keys))

    def _places_on(self, rank: int, device: torch.device) -> Tensor:
        if (rank, device) not in self.made_places:
            self.made_places[rank, device] = self._places(rank).to(device)
        return self.made_places[rank, device]

    def _places(self, rank: int) -> Tensor:
        """Positions in their sequences of the tokens of a rank, of all rows, int64."""
        return places_in_rows(torch.tensor(self.lengths))[zigzag_columns(self.lengths, self.size, rank)]

    def _with_chunks(self) -> Self:
        chunks = torch.tensor(self._lengths_over(2 * self.size))
        is_second = torch.tensor([False, True]).repeat(len(chunks)).repeat_interleave(chunks.repeat_interleave(2))
        return replace(
            self,
            own_boundaries=boundaries_of(self._lengths_over(self.size)),
            chunk_boundaries=boundaries_of(self._lengths_over(2 * self.size)),
            first_chunks=torch.nonzero(~is_second)[:, 0],
            second_chunks=torch.nonzero(is_second)[:, 0],
        )

    def _lengths_over(self, parts: int) -> tuple[int, ...]:
        return tuple(length // parts for length in self.lengths)

    @cached_property
    def _own(self) -> Pieces:
        assert self.own_boundaries is not None  # only those that were cut for heads have none
        return Pieces(self._lengths_over(self.size), self.own_boundaries)

    @cached_property
    def _chunks(self) -> Pieces:
        assert self.chunk_boundaries is not None
        return Pieces(self._lengths_over(2 * self.size), self.chunk_boundaries)

    @cached_property
    def _same(self) -> Facing:
        return Facing(self._own, self._own, causal=True)

    @cached_property
    def _earlier(self) -> Facing:
        return Facing(self._own, self._chunks, causal=False)

    @cached_property
    def _later(self) -> Facing:
        return Facing(self._chunks, self._own, causal=False)

    # Whole segments, to which each rank attends with some of the heads

    def _with_whole(self, with_slots: bool) -> Self:
        whole = Segments.on_host(self.lengths, with_slots=with_slots)
        order = torch.cat([zigzag_columns(self.lengths, self.size, rank) for rank in range(self.size)])
        of_whole = {name: x for name, x in whole.tensors().items() if name != "positions"}
        return replace(self, shapes=whole.shapes, order=order, back=order.argsort()).with_tensors(of_whole)


class ContextAttention(CausalAttention):
    """Core attention of a model whose sequences are split over context-parallel ranks, all of which must call.

    The segments name the ranks. Segments that are not split are computed by this rank alone.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Segments | None = None,
        **unused: Any,
    ) -> Tensor:
        """query [S / C, b, N, D], key and value [S / C, b, K, D] -> [S / C, b, N * D]."""
        if not isinstance(packed_seq_params, ContextSegments):
            return super().forward(query, key, value, attention_mask, packed_seq_params, **unused)
        query = query if self.growth == 1.0 else query * self.growth
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        kind = AttentionKind(self.soft_cap, self.window)
        out = context_attention(q, k, v, packed_seq_params, self.config.cp_comm_type, kind, self.sinks)
        rows: Tensor = out.unflatten(0, (query.shape[1], query.shape[0]))
        return rows.transpose(0, 1).flatten(2)


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: ContextSegments,
    how: str,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [t, N, D], key and value [t, K, D] -> [t, N, D]; how: one of `cp_comm_type`. sinks: see `EagerAttention`.
    All ranks must call.
    """
    if how == A2A and segments.group is not None:
        return head_wise(query, key, value, segments, kind, sinks)
    exchange = Alone() if segments.group is None else {P2P: Ring, ALL_GATHER: Gathered}[how](segments.group)
    out: Tensor = BlockWise.apply(query, key, value, sinks, segments, exchange, kind)
    return out


class BlockWise(torch.autograd.Function):
    """Attention to the keys of one rank after another."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        segments: ContextSegments,
        exchange: KeyExchange,
        kind: AttentionKind,
    ) -> Tensor:
        """See `context_attention`."""
        merged, rank = Merged(query), 0 if segments.group is None else segments.group.rank()
        for source, pair in exchange.blocks(torch.stack([key, value])):
            for block in segments.blocks(rank, source, query.device):
                k, v = (taken(x, block.keys) for x in pair)
                places = segments.places_of(block, kind, rank, source, query.device)
                merged.add(*block_forward(taken(query, block.queries), k, v, block.facing, kind, places), block.queries)
        if sinks is not None:
            merged.join(sinks)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.log_sum, sinks)
        ctx.segments, ctx.exchange, ctx.rank, ctx.kind = segments, exchange, rank, kind
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, sinks = ctx.saved_tensors
        d_query = torch.zeros(query.shape, dtype=torch.float32, device=query.device)

        def gradients(source: int, pair: Tensor) -> Tensor:
            d_block = torch.zeros(pair.shape, dtype=torch.float32, device=pair.device)
            for block in ctx.segments.blocks(ctx.rank, source, query.device):
                facing, queries, keys = block
                q, o, sums, d_out = (taken(x, queries) for x in (query, out, log_sum, grad))
                k, v = (taken(x, keys) for x in pair)
                places = ctx.segments.places_of(block, ctx.kind, ctx.rank, source, query.device)
                of_query, *of_pair = block_backward(d_out, q, k, v, o, sums, facing, ctx.kind, places)
                for total, of, part in zip(
                    (d_query, *d_block), (queries, keys, keys), (of_query, *of_pair), strict=True
                ):
                    _add(total, of, part)
            return d_block

        d_pair = ctx.exchange.returned(torch.stack([key, value]), gradients)
        d_key, d_value = d_pair.to(key.dtype)
        has_sinks = sinks is not None and ctx.needs_input_grad[3]
        d_sinks = sink_gradient(grad, out, log_sum, sinks) if has_sinks else None
        return d_query.to(query.dtype), d_key, d_value, d_sinks, None, None, None


def _add(total: Tensor, rows: Tensor | None, part: Tensor) -> None:
    """Add a part to some rows, of which one may come twice; None: to all."""
    if rows is None:
        total.add_(part)
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """Some rows of x; None: all."""
    return x if rows is None else x.index_select(0, rows)


# Ulysses


def head_wise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: ContextSegments,
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention to whole segments with N / C of the heads. See `context_attention`; C must divide N.

    If there are fewer key/value heads than ranks, several ranks get the same head.
    """
    order, back = segments.order, segments.back
    assert segments.group is not None and order is not None and back is not None  # only of one process, or of blocks
    group, size = segments.group, segments.group.size()
    copies = math.lcm(key.shape[1], size) // key.shape[1]
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    heads = to_heads((query, key, value), back, group).unflatten(1, (-1, query.shape[2]))
    q, k, v = heads.split([x.shape[1] // size for x in (query, key, value)], 1)
    rank_sinks = None if sinks is None else sinks.chunk(size)[group.rank()]
    if has_varlen_attention(query) and kind.soft_cap is None and rank_sinks is None:
        out = varlen(q, k, v, segments, kind.window)
    else:
        out = bucketed(q, k, v, segments, kind.soft_cap, kind.window, rank_sinks)
    return to_own_tokens(out, order, group)
