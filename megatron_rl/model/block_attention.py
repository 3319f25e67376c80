"""Attention of some queries to one block of keys, in a form that can be merged with other blocks.

The softmax over all keys is merged from softmaxes over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867). A
block gives its output and the logarithm of its sum of exponentials, and these logarithms weight the blocks. Backward
needs only the final output and logarithm: every block's gradients follow from them alone.

Legend: t queries with N heads, u keys and values with K heads of which each serves N / K query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.device import has_varlen_attention, in_one_copy
from megatron_rl.model.eager_attention import by_group, by_head, by_token

LOWEST = torch.finfo(torch.float32).min
SMALLEST_TILE = 1 << 16
"""Number of scores that may exist at once in the code without a kernel, however few queries there are."""


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention. soft_cap, window: as in `EagerAttention`."""

    soft_cap: float | None = None
    window: int | None = None

    @property
    def has_kernel(self) -> bool:
        """Whether CUDA has a kernel for blocks of it."""
        return self.soft_cap is None and self.window is None


PLAIN = AttentionKind()


class Places(NamedTuple):
    """Positions in their sequences of the queries [t] and of the keys [u] of a block, int64, for windows."""

    queries: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Pieces:
    """Tokens end to end in pieces of these lengths. Each piece belongs to another segment. boundaries: see
    `boundaries_of`, on the device of the tokens.
    """

    lengths: tuple[int, ...]
    boundaries: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Pieces:
        return cls(lengths, boundaries_of(lengths).to(device))

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def rows(self, which: Sequence[int]) -> Tensor:
        """int64 [pieces, length]: positions of the tokens of some pieces, all of one length."""
        starts = torch.tensor((0, *self.lengths)).cumsum(0)[torch.tensor(which)]
        rows = starts[:, None] + torch.arange(self.lengths[which[0]])[None]
        return in_one_copy([{"rows": rows}], self.boundaries.device)[0]["rows"]


def boundaries_of(lengths: Sequence[int]) -> Tensor:
    """Return where pieces of these lengths begin and end: int32 [pieces + 1], from 0 on, on the CPU."""
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Facing:
    """Pieces of queries, and the piece of keys that each attends to. causal: both are the same tokens, and a query
    attends to the keys that are not later.
    """

    queries: Pieces
    keys: Pieces
    causal: bool

    @cached_property
    def alike(self) -> list[tuple[Tensor, Tensor]]:
        """(rows of queries, rows of keys) of all pieces with the same lengths."""
        by_lengths: dict[tuple[int, int], list[int]] = {}
        for number, lengths in enumerate(zip(self.queries.lengths, self.keys.lengths, strict=True)):
            by_lengths.setdefault(lengths, []).append(number)
        return [(self.queries.rows(which), self.keys.rows(which)) for which in by_lengths.values()]


def block_forward(
    query: Tensor, key: Tensor, value: Tensor, facing: Facing, kind: AttentionKind = PLAIN, places: Places | None = None
) -> tuple[Tensor, Tensor]:
    """query [t, N, D], key and value [u, K, D] -> (output [t, N, D], log of the sum of exponentials [t, N] float32).

    places: needed with a window. A query that sees no key of the block has output 0 and -inf.
    """
    if has_varlen_attention(query) and kind.has_kernel:
        return flash_forward(query, key, value, facing)
    return plain_forward(query, key, value, facing, kind, places)


def block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    facing: Facing,
    kind: AttentionKind = PLAIN,
    places: Places | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (query, key, value) through one block. out and log_sum are those of all blocks together."""
    if has_varlen_attention(query) and kind.has_kernel:
        return flash_backward(grad, query, key, value, out, log_sum, facing)
    return plain_backward(grad, query, key, value, out, log_sum, facing, kind, places)


class Merged:
    """The merged output of the blocks so far: out [t, N, D] and log_sum [t, N], both float32."""

    def __init__(self, query: Tensor) -> None:
        self.out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        self.log_sum = self.out.new_full(query.shape[:2], -torch.inf)

    def add(self, out: Tensor, log_sum: Tensor, rows: Tensor | None = None) -> None:
        """Merge one more block, for all queries or for those in `rows`, int64."""
        before = (self.out, self.log_sum) if rows is None else (self.out[rows], self.log_sum[rows])
        total = torch.logaddexp(before[1], log_sum).clamp_(min=LOWEST)  # not -inf, of which differences are nan
        kept, added = ((part - total).exp()[..., None] for part in (before[1], log_sum))
        merged = before[0] * kept + out * added
        if rows is None:
            self.out, self.log_sum = merged, total
        else:
            self.out[rows], self.log_sum[rows] = merged, total

    def join(self, sinks: Tensor) -> None:
        """Merge the sinks [N], logits of keys that every query of a head sees and whose value is 0."""
        total = torch.logaddexp(self.log_sum, sinks.float())
        self.out.mul_((self.log_sum - total).exp_()[..., None])
        self.log_sum = total


# With matrix products: on any device, in float32


def plain_forward(
    query: Tensor, key: Tensor, value: Tensor, facing: Facing, kind: AttentionKind = PLAIN, places: Places | None = None
) -> tuple[Tensor, Tensor]:
    """See `block_forward`."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    log_sum = out.new_full(query.shape[:2], -torch.inf)
    for tile in tiles(query, key, facing, kind, places):
        scores = tile.scores(query, key)
        sums = scores.logsumexp(-1)
        mixed = (scores - sums[..., None].clamp(min=LOWEST)).exp() @ by_head(value[tile.keys])
        out[tile.queries] = by_token(mixed)
        log_sum[tile.queries] = sums.permute(0, 3, 1, 2).flatten(2)
    return out, log_sum


def plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    facing: Facing,
    kind: AttentionKind = PLAIN,
    places: Places | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `block_backward`; gradients in float32."""
    d_query, d_key, d_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (query, key, value))
    num_kv, scale = key.shape[1], query.shape[-1] ** -0.5
    for tile in tiles(query, key, facing, kind, places):
        of_rows = by_group(log_sum[tile.queries][..., None], num_kv)
        scores = tile.scores(query, key)
        probs = (scores - of_rows).exp()
        d_out, o = (by_group(x[tile.queries].float(), num_kv) for x in (grad, out))
        k, v = by_head(key[tile.keys]), by_head(value[tile.keys])
        d_scores = probs * (d_out @ v.transpose(-1, -2) - (d_out * o).sum(-1, keepdim=True)) * scale
        if kind.soft_cap is not None:  # d c tanh(x / c) / dx = 1 - tanh(x / c)^2; 0 for keys that are not seen
            d_scores.mul_((1 - (scores / kind.soft_cap).square_()).clamp_(min=0.0))
        q = by_group(query[tile.queries].float(), num_kv)
        d_query[tile.queries] = by_token(d_scores @ k)
        # Tiles of the same piece share its keys.
        for of, through, mixed in ((d_key, d_scores, q), (d_value, probs, d_out)):
            of[tile.keys] += (through.transpose(-1, -2) @ mixed).sum(2).transpose(1, 2)
    return d_query, d_key, d_value


@dataclass(frozen=True)
class Tile:
    """Some queries of pieces of one length, and all of their keys. Legend: b pieces, s queries and w keys of each.

    queries: int64 [b, s]; keys: int64 [b, w]; first: position of the first query in its piece. soft_cap: bound of
    the scores. outside: bool [b, s, w], which keys are before a query's window; None: there is no window.
    """

    queries: Tensor
    keys: Tensor
    first: int
    causal: bool
    soft_cap: float | None = None
    outside: Tensor | None = None

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Float32 [b, K, N / K, s, w], -inf where a key may not be seen."""
        q = by_group(query[self.queries].float(), key.shape[1]) * query.shape[-1] ** -0.5
        scores: Tensor = q @ by_head(key[self.keys]).transpose(-1, -2)
        if self.soft_cap is not None:
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.causal:
            at, of = (torch.arange(x.shape[1], device=query.device) for x in (self.queries, self.keys))
            scores.masked_fill_(of[None] > self.first + at[:, None], -torch.inf)
        if self.outside is not None:
            scores.masked_fill_(self.outside[:, None, None], -torch.inf)
        return scores


def tiles(query: Tensor, key: Tensor, facing: Facing, kind: AttentionKind, places: Places | None) -> Iterator[Tile]:
    """Split the queries of a block so that the scores of a tile are no larger than the queries, or one query each.

    Tiles whose queries see no key are left out.
    """
    largest = max(SMALLEST_TILE, query.numel())
    for queries, keys in facing.alike:
        step = max(1, largest // (len(queries) * query.shape[1] * keys.shape[1]))
        for first in range(0, queries.shape[1], step):
            rows, outside = queries[:, first : first + step], None
            if kind.window is not None and places is not None:
                outside = places.keys[keys][:, None] <= places.queries[rows][..., None] - kind.window
                if outside.all():
                    continue
            yield Tile(rows, keys, first, facing.causal, kind.soft_cap, outside)


# On torch's flash attention, which CUDA has for half precision


def flash_forward(query: Tensor, key: Tensor, value: Tensor, facing: Facing) -> tuple[Tensor, Tensor]:
    """See `block_forward`."""
    queries, keys = facing.queries, facing.keys
    boundaries = (queries.boundaries, keys.boundaries, queries.longest, keys.longest)
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *boundaries, 0.0, facing.causal, return_debug_mask=False
    )
    return out, log_sum.transpose(0, 1)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, facing: Facing
) -> tuple[Tensor, Tensor, Tensor]:
    """See `block_backward`."""
    queries, keys = facing.queries, facing.keys
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of dropout, which is off
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out.to(query.dtype),
        log_sum.transpose(0, 1).contiguous(),
        queries.boundaries,
        keys.boundaries,
        queries.longest,
        keys.longest,
        0.0,
        facing.causal,
        unused,
        unused[:0],
    )
    return gradients
