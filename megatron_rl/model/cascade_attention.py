"""Attention of a packed row whose segments share prefixes: shared keys are met once (`cascade_plan.py`).

A segment's queries see what its slots hold, causally, and whole pieces that it shares. Each part gives an output and
the logarithm of its sum of exponentials, which are merged, as blocks of context parallelism are.

Legend: T tokens of the row, N query heads, K key/value heads, D head size, W slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.cascade_plan import SharedPiece
from megatron_rl.model.segments import Segments, by_bucket, to_slots, to_tokens


class CascadeAttention(torch.autograd.Function):
    """query [T, N, D], key and value [T, K, D] -> [T, N, D]. Only these and the sums are kept."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        out, log_sum = _slots_forward(query, key, value, segments)
        out = out.to(log_sum.dtype)
        for piece in segments.pieces:
            queries, keys = _columns(piece)
            more, sums = (
                part[0] for part in cpu_flash_forward(query[None, queries], key[None, keys], value[None, keys])
            )
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
            gradients = cpu_flash_backward(*mine, out[None, queries], log_sum[None, queries])
            for total, part in zip((d_query[queries], d_key[keys], d_value[keys]), gradients, strict=True):
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


def _slots_forward(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """(output [T, N, D], log of the sum of exponentials [T, N]) of every token with the keys of its segment's slots."""
    buckets = zip(*(to_slots(x, segments) for x in (query, key, value)), strict=True)
    outputs, log_sums = zip(*(cpu_flash_forward(*bucket, causal=True) for bucket in buckets), strict=True)
    return to_tokens(outputs, segments), to_tokens(log_sums, segments)


def _slots_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, segments: Segments
) -> tuple[Tensor, ...]:
    """Gradients of (query, key, value) through the slots, as precise as `log_sum`."""
    assert segments.token_of_slot is not None and segments.slot_of_token is not None
    # Filler, and the queries of prefixes, have no gradient of their own.
    d_out = grad.new_zeros(len(segments.token_of_slot), *grad.shape[1:]).index_copy_(0, segments.slot_of_token, grad)
    kept = (to_slots(x, segments) for x in (query, key, value, out, log_sum))
    buckets = zip(by_bucket(d_out, segments), *kept, strict=True)
    of_buckets = [cpu_flash_backward(*bucket, causal=True) for bucket in buckets]
    totals = []
    for parts in zip(*of_buckets, strict=True):
        of_slots = torch.cat([part.flatten(0, 1) for part in parts])
        total = of_slots.index_select(0, segments.slot_of_token).to(log_sum.dtype)
        if segments.prefix_slots is not None and segments.prefix_tokens is not None:
            of_prefixes = of_slots.index_select(0, segments.prefix_slots)
            total.index_add_(0, segments.prefix_tokens, of_prefixes.to(log_sum.dtype))
        totals.append(total)
    return tuple(totals)
