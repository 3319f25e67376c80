"""Causal attention for context parallelism.

Megatron's names for `cp_comm_type`:
    p2p         keys and values are passed around a ring (ring attention, Liu et al., arXiv:2310.01889)
    all_gather  all ranks' keys and values are gathered for one layer at a time
    a2a         ranks exchange tokens for heads and back (Ulysses, Jacobs et al., arXiv:2309.14509)

The first two compute the same blocks (`context_segments.py`). With a window p2p sends each rank the keys alone
that are seen there. Backward keeps only this rank's own tensors.

Legend: t tokens of this rank, N query heads and K key/value heads of this TP rank, D head size, C ranks, b rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rl.device import has_varlen_attention
from megatron_rl.model.attention import CausalAttention, bucketed, varlen
from megatron_rl.model.block_attention import PLAIN, AttentionKind
from megatron_rl.model.context_segments import A2A, ALL_GATHER, P2P, ContextSegments, TrieSegments
from megatron_rl.model.joined_attention import joined
from megatron_rl.model.key_exchange import Alone, Gathered, KeyExchange, Nearby, Ring, to_heads, to_own_tokens
from megatron_rl.model.segments import Segments


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
        out = context_attention(q, k, v, packed_seq_params, self.config.cp_comm_type, self.kind, self.sinks)
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
    """query [t, N, D], key and value [t, K, D] -> [t, N, D]; how: one of `cp_comm_type`. sinks: see `joined`. All ranks
    must call.
    """
    group, window = segments.group, kind.window
    if how == A2A and group is not None:
        return head_wise(query, key, value, segments, kind, sinks)
    exchange: KeyExchange = Alone()
    if group is not None:
        exchange = {P2P: Ring, ALL_GATHER: Gathered}[how](group)
        if how == P2P and window is not None:
            exchange = Nearby(group, partial(segments.read, device=query.device, window=window))
    blocks = partial(segments.blocks, 0 if group is None else group.rank(), device=query.device, window=window)
    return joined(query, key, value, blocks, kind, sinks, exchange)


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
    is_trie = isinstance(segments, TrieSegments)
    if isinstance(segments, TrieSegments) and segments.alone is not None:
        out = context_attention(q, k, v, segments.alone, ALL_GATHER, kind, rank_sinks)
    elif has_varlen_attention(query) and kind.soft_cap is None and rank_sinks is None and not is_trie:
        out = varlen(q, k, v, segments, kind.window)
    else:
        out = bucketed(q, k, v, segments, kind, rank_sinks)
    return to_own_tokens(out, order, group)
