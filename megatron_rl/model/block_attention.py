"""Attention of some queries to one block of keys, in a form that can be joined with other blocks.

A block gives its output and the logarithm of its sum of exponentials, and `joined_attention.py` weighs blocks with
these. Backward needs only the output and logarithm of all blocks together: every block's gradients follow from them.
Nothing of queries x keys is kept. Three kernels compute a block: torch's flash attention (Dao et al., arXiv:2205.14135)
on CUDA and on CPUs, and matrix products for the kinds of attention that it does not have.

Legend: t queries with N heads, u keys and values with K heads of which each serves G = N / K query heads, D head size;
b pieces of one length with s queries and w keys each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rl.device import has_varlen_attention, in_one_copy
from megatron_rl.model.parts.grouped_attention import LARGEST_TILE
from megatron_rl.model.soft_cap import cap_slope, capped

LOWEST = torch.finfo(torch.float32).min
FEWEST_QUERIES = 64
"""Fewer queries of a window are not multiplied alone. Larger tiles have more keys that only some of them see."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True)
class AttentionKind:
    """A kind of attention. soft_cap: c; products x become c tanh(x / c); None: no bound. window: number of positions
    that a token sees, including its own; None: all before it.
    """

    soft_cap: float | None = None
    window: int | None = None

    @property
    def has_kernel(self) -> bool:
        """Whether torch has a kernel for blocks of it."""
        return self.soft_cap is None and self.window is None


PLAIN = AttentionKind()


class Rows(NamedTuple):
    """Tokens of `number` pieces of one length: int64 [number, length], or None: all from `start` on, end to end."""

    number: int
    length: int
    start: int
    tokens: Tensor | None

    def of(self, x: Tensor, span: slice) -> Tensor:
        """x [t, ...] -> [number, length of the span, ...], of a span of each piece."""
        return self._in_place(x)[:, span] if self.tokens is None else x[self.tokens[:, span]]

    def put(self, x: Tensor, span: slice, part: Tensor) -> None:
        """Write the tokens that `of` reads."""
        if self.tokens is None:
            self._in_place(x)[:, span] = part
        else:
            x[self.tokens[:, span]] = part.to(x.dtype)

    def add(self, x: Tensor, span: slice, part: Tensor) -> None:
        """Add to the tokens that `of` reads. A token is in one piece."""
        if self.tokens is None:
            self._in_place(x)[:, span] += part
        else:
            x[self.tokens[:, span]] += part

    def _in_place(self, x: Tensor) -> Tensor:
        return x[self.start : self.start + self.number * self.length].view(self.number, self.length, *x.shape[1:])


@dataclass(frozen=True)
class Pieces:
    """Tokens end to end in pieces of these lengths, on a device. Each piece belongs to another segment."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def boundaries(self) -> Tensor:
        """Where pieces begin and end: int32 [pieces + 1], from 0 on, on the device."""
        ends = torch.tensor((0, *self.lengths)).cumsum(0).to(torch.int32)
        return in_one_copy([{"ends": ends}], self.device)[0]["ends"]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def rows(self, which: Sequence[int]) -> Rows:
        """Tokens of some pieces, all of one length."""
        length, start = self.lengths[which[0]], self.starts[which[0]]
        if all(second == first + 1 for first, second in pairwise(which)):
            return Rows(len(which), length, start, None)
        starts = torch.tensor([self.starts[number] for number in which])
        rows = starts[:, None] + torch.arange(length)[None]
        return Rows(len(which), length, start, in_one_copy([{"rows": rows}], self.device)[0]["rows"])


@dataclass(frozen=True)
class Facing:
    """Pieces of queries, and the piece of keys that each attends to.

    causal: both are the same tokens, and a query attends to the keys that are not later. ahead: needed for windows,
    for each piece: how many positions its first query is after its first key; (): none.
    """

    queries: Pieces
    keys: Pieces
    causal: bool
    ahead: tuple[int, ...] = ()

    @classmethod
    def within(cls, lengths: tuple[int, ...], device: torch.device) -> Facing:
        """Every piece attends to itself."""
        pieces = Pieces(lengths, device)
        return cls(pieces, pieces, causal=True)

    @cached_property
    def alike(self) -> list[tuple[Rows, Rows, int]]:
        """(rows of queries, rows of keys, how far the queries are ahead) of all pieces that agree in these lengths."""
        by_shape: dict[tuple[int, int, int], list[int]] = {}
        ahead = self.ahead or (0,) * len(self.queries.lengths)
        for number, shape in enumerate(zip(self.queries.lengths, self.keys.lengths, ahead, strict=True)):
            by_shape.setdefault(shape, []).append(number)
        return [
            (self.queries.rows(which), self.keys.rows(which), distance) for (_, _, distance), which in by_shape.items()
        ]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
        """query [t, N, D], key and value [u, K, D] -> (output [t, N, D], log of the sum of exponentials [t, N], float32
        or more precise). A query that sees no key of the block has output 0 and -inf.
        """
        if not kind.has_kernel or query.is_cuda != has_varlen_attention(query):
            return products_forward(query, key, value, self, kind)
        if query.is_cuda:
            return cuda_flash_forward(query, key, value, self)
        return flash_rows_forward(query, key, value, self)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, kind: AttentionKind
    ) -> Gradients:
        """Return the gradients through this block. out and log_sum are those of all blocks together."""
        given = (grad, query, key, value, out, log_sum)
        if not kind.has_kernel or query.is_cuda != has_varlen_attention(query):
            return products_backward(*given, self, kind)
        return cuda_flash_backward(*given, self) if query.is_cuda else flash_rows_backward(*given, self)


# With matrix products: on any device, in float32


def products_forward(
    query: Tensor, key: Tensor, value: Tensor, facing: Facing, kind: AttentionKind
) -> tuple[Tensor, Tensor]:
    """See `Facing.forward`."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    log_sum = out.new_full(query.shape[:2], -torch.inf)
    for tile in tiles(query, key, facing, kind):
        scores = tile.scores(query, key, kind)
        sums = scores.logsumexp(-1)
        probs = scores.sub_(sums[..., None].clamp(min=LOWEST)).exp_()  # not -inf, of which differences are nan
        tile.queries.put(out, tile.at, by_token(probs @ by_head(tile.keys.of(value, tile.of))))
        tile.queries.put(log_sum, tile.at, by_token(sums[..., None])[..., 0])
    return out, log_sum


def products_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    facing: Facing,
    kind: AttentionKind,
) -> Gradients:
    """See `Facing.backward`; gradients in float32."""
    d_query, d_key, d_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (query, key, value))
    num_kv, scale = key.shape[1], query.shape[-1] ** -0.5
    for tile in tiles(query, key, facing, kind):
        rows, at, keys, of = tile.queries, tile.at, tile.keys, tile.of
        scores = tile.scores(query, key, kind)
        slope = None if kind.soft_cap is None else cap_slope(scores, kind.soft_cap)
        probs = scores.sub_(by_group(rows.of(log_sum, at)[..., None], num_kv)).exp_()
        d_out, o = (by_group(rows.of(x, at).float(), num_kv) for x in (grad, out))
        d_scores = d_out @ by_head(keys.of(value, of)).transpose(-1, -2)
        d_scores = d_scores.sub_((d_out * o).sum(-1, keepdim=True)).mul_(probs).mul_(scale)
        d_scores = d_scores if slope is None else d_scores.mul_(slope)
        rows.put(d_query, at, by_token(d_scores @ by_head(keys.of(key, of))))
        q = by_group(rows.of(query, at).float(), num_kv)
        for total, through, mixed in ((d_key, d_scores, q), (d_value, probs, d_out)):
            keys.add(total, of, (through.transpose(-1, -2) @ mixed).sum(2).transpose(1, 2))
    return d_query, d_key, d_value


class Tile(NamedTuple):
    """A span of the queries of pieces of one length, and the span of their keys that any of them sees.

    ahead: see `Facing`.
    """

    queries: Rows
    at: slice
    keys: Rows
    of: slice
    causal: bool
    ahead: int

    def scores(self, query: Tensor, key: Tensor, kind: AttentionKind) -> Tensor:
        """Float32 [b, K, G, s, w], -inf where a key may not be seen."""
        q = by_group(self.queries.of(query, self.at).float(), key.shape[1]) * query.shape[-1] ** -0.5
        scores: Tensor = q @ by_head(self.keys.of(key, self.of)).transpose(-1, -2)
        capped(scores, kind.soft_cap)
        first, last = self.at.start + self.ahead, self.at.stop - 1 + self.ahead
        at = torch.arange(first, last + 1, device=query.device)[:, None]
        of = torch.arange(self.of.start, self.of.stop, device=query.device)[None]
        if self.causal and self.of.stop - 1 > first:
            scores.masked_fill_(of > at, -torch.inf)
        if kind.window is not None and self.of.start <= last - kind.window:
            scores.masked_fill_(of <= at - kind.window, -torch.inf)
        return scores


def tiles(query: Tensor, key: Tensor, facing: Facing, kind: AttentionKind) -> Iterator[Tile]:
    """Split a block into tiles of at most `LARGEST_TILE` scores, or one query of each piece. Every query that sees a
    key is in one.
    """
    for queries, keys, ahead in facing.alike:
        step = max(1, LARGEST_TILE // (queries.number * query.shape[1] * keys.length))
        if kind.window is not None:
            step = min(step, max(kind.window, FEWEST_QUERIES))
        for first in range(0, queries.length, step):
            last = min(first + step, queries.length)
            begin = 0 if kind.window is None else max(0, first + ahead - kind.window + 1)
            end = last if facing.causal else keys.length
            if begin < end:
                yield Tile(queries, slice(first, last), keys, slice(begin, end), facing.causal, ahead)


def by_group(x: Tensor, num_kv: int) -> Tensor:
    """[b, s, N, D] -> [b, K, G, s, D]."""
    grouped: Tensor = x.unflatten(2, (num_kv, -1))
    return grouped.permute(0, 2, 3, 1, 4)


def by_head(x: Tensor) -> Tensor:
    """[b, w, K, D] -> float32 [b, K, 1, w, D]."""
    return x.float().transpose(1, 2).unsqueeze(2)


def by_token(x: Tensor) -> Tensor:
    """[b, K, G, s, D] -> [b, s, N, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


# On torch's flash attention for CPUs, which takes rows of one length


def flash_rows_forward(query: Tensor, key: Tensor, value: Tensor, facing: Facing) -> tuple[Tensor, Tensor]:
    """See `Facing.forward`."""
    outs, sums = query.new_empty(query.shape), None
    for queries, keys, _ in facing.alike:
        q, k, v = queries.of(query, slice(None)), *(keys.of(x, slice(None)) for x in (key, value))
        out, log_sum = cpu_flash_forward(q, k, v, causal=facing.causal)
        if len(facing.alike) == 1 and queries.tokens is None:
            return out.flatten(0, 1), log_sum.flatten(0, 1)
        sums = log_sum.new_empty(query.shape[:2]) if sums is None else sums
        queries.put(outs, slice(None), out)
        queries.put(sums, slice(None), log_sum)
    assert sums is not None  # a block has a piece
    return outs, sums


def flash_rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, facing: Facing
) -> Gradients:
    """See `Facing.backward`."""
    d_query, d_key, d_value = (torch.zeros(x.shape, dtype=log_sum.dtype) for x in (query, key, value))
    for queries, keys, _ in facing.alike:
        d_out, q, o, sums = (queries.of(x, slice(None)) for x in (grad, query, out, log_sum))
        k, v = (keys.of(x, slice(None)) for x in (key, value))
        gradients = cpu_flash_backward(d_out, q, k, v, o, sums, causal=facing.causal)
        if len(facing.alike) == 1 and queries.tokens is None and keys.tokens is None:
            of_query, of_key, of_value = (part.flatten(0, 1) for part in gradients)
            return of_query, of_key, of_value
        for total, rows, part in zip((d_query, d_key, d_value), (queries, keys, keys), gradients, strict=True):
            rows.put(total, slice(None), part)
    return d_query, d_key, d_value


def cpu_flash_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """query [b, s, N, D], key and value [b, w, K, D] -> (output [b, s, N, D], log of the sum of exponentials [b, s, N]
    in float32, or float64 for such inputs).
    """
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, causal)
    return out.transpose(1, 2), log_sum.transpose(1, 2)


def cpu_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, *, causal: bool = False
) -> list[Tensor]:
    """Gradients of (query, key, value), of their shapes. out and log_sum are those of all keys of a query."""
    rows = (x.transpose(1, 2) for x in (grad, query, key, value, out, log_sum))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, 0.0, causal)
    return [gradient.transpose(1, 2) for gradient in gradients]


# On torch's flash attention for CUDA, which has it for half precision


def cuda_flash_forward(query: Tensor, key: Tensor, value: Tensor, facing: Facing) -> tuple[Tensor, Tensor]:
    """See `Facing.forward`."""
    queries, keys = facing.queries, facing.keys
    boundaries = (queries.boundaries, keys.boundaries, queries.longest, keys.longest)
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *boundaries, 0.0, facing.causal, return_debug_mask=False
    )
    return out, log_sum.transpose(0, 1)


def cuda_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, facing: Facing
) -> Gradients:
    """See `Facing.backward`."""
    queries, keys = facing.queries, facing.keys
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of dropout, which is off
    gradients: Gradients = torch.ops.aten._flash_attention_backward(
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
