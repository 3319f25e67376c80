"""Attention joined from blocks: who sees whom is a list of blocks, and one code joins their outputs.

The softmax over all keys is merged from softmaxes over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867), each
weighted by its sum of exponentials. Backward keeps the inputs, the output and the logarithms of the sums.

Legend: t tokens with N query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rl.model.block_attention import LOWEST, PLAIN, AttentionKind
from megatron_rl.model.key_exchange import Alone, KeyExchange, Pair

Which = Tensor | slice | None
"""Which rows: int64, or a slice; None: all."""


class Faces(Protocol):
    """The computation of a block: `Facing`, or the slots of segments."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind) -> tuple[Tensor, Tensor]:
        """See `Facing.forward`."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, kind: AttentionKind
    ) -> Sequence[Tensor]:
        """See `Facing.backward`."""


class KeyBlock(NamedTuple):
    """Which queries attend to which keys, and the tokens of both that take part."""

    facing: Faces
    queries: Which = None
    keys: Which = None


def joined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks_of: Callable[[int], Sequence[KeyBlock]],
    kind: AttentionKind = PLAIN,
    sinks: Tensor | None = None,
    exchange: KeyExchange | None = None,
) -> Tensor:
    """query [t, N, D], key and value [t, K, D] -> [t, N, D].

    blocks_of: rank -> the blocks that this rank computes with that rank's keys. sinks [N]: a logit of each head that
    joins its softmax next to those of the keys, with a value of 0 (Agarwal et al., arXiv:2508.10925). exchange: brings
    the keys of other ranks, all of which must call; None: this rank has all keys.
    """
    out: Tensor = JoinedAttention.apply(query, key, value, sinks, blocks_of, kind, exchange or Alone())
    return out


class Merged:
    """The merged output of the blocks so far: out [t, N, D] and log_sum [t, N], as precise as the first block's sums.

    query: gives the shape.
    """

    def __init__(self, query: Tensor) -> None:
        self.shape, self.is_empty = query.shape, True
        self.out, self.log_sum = query, query  # until a block is added

    def add(self, out: Tensor, log_sum: Tensor, rows: Which = None) -> None:
        """Merge one more block, for all queries or some. With weights e^a and e^b the mean of two outputs is the first
        plus e^b / (e^a + e^b) of their difference.
        """
        if self.is_empty:
            self.is_empty = False
            if rows is None:
                self.out, self.log_sum = out.to(log_sum.dtype), log_sum
                return
            self.out = torch.zeros(self.shape, dtype=log_sum.dtype, device=out.device)
            self.log_sum = self.out.new_full(self.shape[:2], -torch.inf)
        mine, sums = taken(self.out, rows), taken(self.log_sum, rows)
        total = torch.logaddexp(sums, log_sum).clamp_(min=LOWEST)  # not -inf, of which differences are nan
        merged = mine.lerp_(out.to(mine.dtype), (log_sum - total).exp_()[..., None])
        if isinstance(rows, Tensor):
            self.out[rows], self.log_sum[rows] = merged, total
        else:
            sums.copy_(total)

    def join(self, sinks: Tensor) -> None:
        """Merge the sinks [N], logits of keys that every query of a head sees and whose value is 0."""
        total = torch.logaddexp(self.log_sum, sinks.float())
        self.out.mul_((self.log_sum - total).exp_()[..., None])
        self.log_sum = total


class JoinedAttention(torch.autograd.Function):
    """See `joined`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks_of: Callable[[int], Sequence[KeyBlock]],
        kind: AttentionKind,
        exchange: KeyExchange,
    ) -> Tensor:
        merged = Merged(query)
        for source, pair in exchange.blocks(key, value):
            for facing, queries, keys in blocks_of(source):
                k, v = (taken(x, keys) for x in pair)
                merged.add(*facing.forward(taken(query, queries), k, v, kind), queries)
        if sinks is not None:
            merged.join(sinks)
        out = merged.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, merged.log_sum, sinks)
        ctx.blocks_of, ctx.kind, ctx.exchange = blocks_of, kind, exchange
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, sinks = ctx.saved_tensors
        d_query = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)

        def gradients(source: int, pair: Pair) -> Tensor:
            d_pair = torch.zeros((2, *key.shape), dtype=log_sum.dtype, device=key.device)
            for facing, queries, keys in ctx.blocks_of(source):
                d_out, q, o, sums = (taken(x, queries) for x in (grad, query, out, log_sum))
                k, v = (taken(x, keys) for x in pair)
                parts = facing.backward(d_out, q, k, v, o, sums, ctx.kind)
                for total, of, part in zip((d_query, *d_pair), (queries, keys, keys), parts, strict=True):
                    _add(total, of, part)
            return d_pair

        d_key, d_value = ctx.exchange.returned(key, value, gradients).to(key.dtype)
        has_sinks = sinks is not None and ctx.needs_input_grad[3]
        d_sinks = sink_gradient(grad, out, log_sum, sinks) if has_sinks else None
        return d_query.to(query.dtype), d_key, d_value, d_sinks, None, None, None


def sink_gradient(grad: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [N]: one has probability p and value 0, so its logit's is -p (grad . out).

    grad, out: [t, N, D]. log_sum: [t, N], over all keys and the sinks.
    """
    share = (sinks.float() - log_sum).exp_().mul_((grad * out).sum(-1, dtype=torch.float32))
    return share.sum(0).neg_().to(sinks.dtype)


def taken(x: Tensor, rows: Which) -> Tensor:
    """Some rows of x; a view where they are a slice."""
    if rows is None:
        return x
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(total: Tensor, rows: Which, part: Tensor) -> None:
    """Add a part to some rows, of which one may come twice."""
    if isinstance(rows, Tensor):
        total.index_add_(0, rows, part.to(total.dtype))
    else:
        taken(total, rows).add_(part)
