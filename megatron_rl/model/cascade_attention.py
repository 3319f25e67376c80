"""Attention of a packed row whose segments share prefixes: shared keys are met once (`shared_pieces.py`).

A segment's queries see what its slots hold, causally, and whole pieces that it shares. Each part gives an output and
the logarithm of its sum of exponentials, which are merged, as blocks of context parallelism are.

Legend: T tokens of the row, N query heads, K key/value heads, D head size, W slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.segments import Segments
from megatron_rl.model.shared_pieces import SharedPiece


class CascadeAttention(torch.autograd.Function):
    """query [T, N, D], key and value [T, K, D] -> [T, N, D]. Only these and the sums are kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        out, log_sum = _slots_forward(query, key, value, segments)
        out = out.to(log_sum.dtype)
        for piece in segments.pieces:
            queries, keys = _columns(piece)
            more, sums = (part[0] for part in flash_forward(query[None, queries], key[None, keys], value[None, keys]))
            merge(out[queries], log_sum[queries], more, sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        d_query, d_key, d_value = _slots_backward(grad, query, key, value, out, log_sum, ctx.segments)
        for piece in ctx.segments.pieces:
            queries, keys = _columns(piece)
            mine = (grad[None, queries], query[None, queries], key[None, keys], value[None, keys])
            found = flash_backward(*mine, out[None, queries], log_sum[None, queries])
            for total, part in zip((d_query[queries], d_key[keys], d_value[keys]), found, strict=True):
                total.add_(part[0])
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None


def merge(out: Tensor, log_sum: Tensor, more: Tensor, sums: Tensor) -> None:
    """Add the output [t, N, D] and log-sums [t, N] of further keys to those so far, in place.

    With weights e^a and e^b the mean of two outputs is the first plus sigmoid(b - a) of their difference.
    """
    out.lerp_(more.to(out.dtype), (sums - log_sum).sigmoid_()[..., None])
    torch.logaddexp(log_sum, sums, out=log_sum)


def _columns(piece: SharedPiece) -> tuple[slice, slice]:
    return slice(*piece.queries), slice(*piece.keys)


# torch's flash attention on the CPU, for rows of one length: b rows of s queries and w keys


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """query [b, s, N, D], key and value [b, w, K, D] -> (output [b, s, N, D], log of the sum of exponentials [b, s, N]
    in float32, or float64 for such inputs).
    """
    rows = (x.transpose(1, 2) for x in (query, key, value))
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, causal)
    return out.transpose(1, 2), log_sum.transpose(1, 2)


def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, *, causal: bool = False
) -> list[Tensor]:
    """Gradients of (query, key, value), of their shapes. out and log_sum are those of all keys of a query."""
    rows = (x.transpose(1, 2) for x in (grad, query, key, value, out, log_sum))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, 0.0, causal)
    return [x.transpose(1, 2) for x in found]


def _buckets(segments: Segments) -> Iterator[tuple[slice, tuple[int, int]]]:
    """(slots of a bucket, (its segments, slots of each))."""
    first = 0
    for count, width in segments.shapes:
        yield slice(first, first + count * width), (count, width)
        first += count * width


def _slots_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """(output [T, N, D], log of the sum of exponentials [T, N]) of every token with the keys of its segment's slots."""
    assert segments.token_of_slot is not None and segments.slot_of_token is not None
    slots = [x.index_select(0, segments.token_of_slot) for x in (query, key, value)]
    found = [
        flash_forward(*(x[part].unflatten(0, shape) for x in slots), causal=True) for part, shape in _buckets(segments)
    ]
    out, log_sum = (torch.cat([part.flatten(0, 1) for part in of]) for of in zip(*found, strict=True))
    return out.index_select(0, segments.slot_of_token), log_sum.index_select(0, segments.slot_of_token)


def _slots_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, segments: Segments
) -> tuple[Tensor, ...]:
    """Gradients of (query, key, value) through the slots, as precise as `log_sum`."""
    assert segments.token_of_slot is not None and segments.slot_of_token is not None
    slots = [x.index_select(0, segments.token_of_slot) for x in (query, key, value, out, log_sum)]
    # Filler, and the queries of prefixes, have no gradient of their own.
    d_out = grad.new_zeros(len(slots[0]), *grad.shape[1:]).index_copy_(0, segments.slot_of_token, grad)
    found = [
        flash_backward(*(x[part].unflatten(0, shape) for x in (d_out, *slots)), causal=True)
        for part, shape in _buckets(segments)
    ]
    totals = []
    for of in zip(*found, strict=True):
        of_slots = torch.cat([part.flatten(0, 1) for part in of])
        total = of_slots.index_select(0, segments.slot_of_token).to(log_sum.dtype)
        if segments.prefix_slots is not None and segments.prefix_tokens is not None:
            of_prefixes = of_slots.index_select(0, segments.prefix_slots)
            total.index_add_(0, segments.prefix_tokens, of_prefixes.to(log_sum.dtype))
        totals.append(total)
    return tuple(totals)
