"""Causal attention with bounded products, a window or sinks, for devices without a kernel for it.

Queries are processed in tiles, each with the keys that they can see; nothing of S x S elements is kept. Backward keeps
the output and the logarithm of the sum of exponentials and computes the products again, as flash attention does (Dao et
al., arXiv:2205.14135).

Legend: B rows of S tokens, N query heads, K key/value heads of which each serves G = N / K query heads, D head size;
s queries of a tile and the w keys that they may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rl.model.parts.grouped_attention import LARGEST_TILE


class EagerAttention(torch.autograd.Function):
    """query [B, S, N, D], key and value [B, S, K, D] -> [B, S, N, D].

    soft_cap: c; products x become c tanh(x / c); None: no bound. window: number of positions that a token sees,
    including its own; None: all before it. sinks [N]: a logit of each head that joins its softmax next to those of the
    keys, with a value of 0 (Agarwal et al., arXiv:2508.10925); None: there are none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        soft_cap: float | None,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:3], dtype=torch.float32)
        for rows, keys in tiles(query, key, window):
            scores = products(query[:, rows], key[:, keys], rows, keys, soft_cap, window)
            sums = scores.logsumexp(-1)
            if sinks is not None:
                sums = torch.logaddexp(sums, sinks.float().view(1, key.shape[2], -1, 1))
            probs = scores.sub_(sums[..., None]).exp_()
            out[:, rows] = by_token(probs @ by_head(value[:, keys])).to(out.dtype)
            log_sum[:, rows] = by_token(sums[..., None])[..., 0]
        ctx.save_for_backward(query, key, value, out, log_sum, sinks)
        ctx.soft_cap, ctx.window = soft_cap, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum, sinks = ctx.saved_tensors
        scale, num_kv = query.shape[-1] ** -0.5, key.shape[2]
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
        for rows, keys in tiles(query, key, ctx.window):
            scores = products(query[:, rows], key[:, keys], rows, keys, ctx.soft_cap, ctx.window)
            # d c tanh(x / c) / dx = 1 - tanh(x / c)^2; a key that is not seen has no gradient.
            slope = None if ctx.soft_cap is None else (scores / ctx.soft_cap).square_().neg_().add_(1.0).clamp_(min=0.0)
            probs = scores.sub_(by_group(log_sum[:, rows, :, None], num_kv)).exp_()
            d_out, o = (by_group(x[:, rows].float(), num_kv) for x in (grad, out))
            d_scores = d_out @ by_head(value[:, keys]).transpose(-1, -2)
            d_scores = d_scores.sub_((d_out * o).sum(-1, keepdim=True)).mul_(probs).mul_(scale)
            d_scores = d_scores if slope is None else d_scores.mul_(slope)
            d_query[:, rows] = by_token(d_scores @ by_head(key[:, keys])).to(query.dtype)
            q = by_group(query[:, rows].float(), num_kv)
            for of, through, mixed in ((d_key, d_scores, q), (d_value, probs, d_out)):
                of[:, keys] += (through.transpose(-1, -2) @ mixed).sum(2).transpose(1, 2)
        has_sinks = sinks is not None and ctx.needs_input_grad[5]
        d_sinks = sink_gradient(grad, out, log_sum, sinks) if has_sinks else None
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None, d_sinks


def sink_gradient(grad: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks [N]: one has probability p and value 0, so its logit's is -p (grad . out).

    grad, out: [..., N, D]. log_sum: [..., N], over all keys and the sinks.
    """
    share = (sinks.float() - log_sum).exp_().mul_((grad * out).sum(-1, dtype=torch.float32))
    return share.flatten(0, -2).sum(0).neg_().to(sinks.dtype)


def tiles(query: Tensor, key: Tensor, window: int | None) -> Iterator[tuple[slice, slice]]:
    """(positions of some queries, positions of the keys that any of them sees); every query once."""
    num_rows, length, heads = query.shape[:3]
    step = max(1, LARGEST_TILE // (num_rows * heads * length))
    if window is not None:
        # Smaller tiles have fewer keys that only some of their queries see.
        step = min(step, max(window, 64))
    for first in range(0, length, step):
        last = min(first + step, length)
        yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)


def products(
    query: Tensor, key: Tensor, rows: slice, keys: slice, soft_cap: float | None, window: int | None
) -> Tensor:
    """Float32 products [B, K, G, s, w], -inf where a key is not seen. query [B, s, N, D] and key [B, w, K, D] are those
    at `rows` and `keys`.
    """
    q = by_group(query.float(), key.shape[2]) * query.shape[-1] ** -0.5
    scores: Tensor = q @ by_head(key).transpose(-1, -2)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    at = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
    of = torch.arange(keys.start, keys.stop, device=query.device)[None]
    unseen = of > at if window is None else (of > at) | (of <= at - window)
    return scores.masked_fill_(unseen, -torch.inf)


def by_group(x: Tensor, num_kv: int) -> Tensor:
    """[B, s, N, D] -> [B, K, G, s, D]."""
    grouped: Tensor = x.unflatten(2, (num_kv, -1))
    return grouped.permute(0, 2, 3, 1, 4)


def by_head(x: Tensor) -> Tensor:
    """[B, w, K, D] -> float32 [B, K, 1, w, D]."""
    return x.float().transpose(1, 2).unsqueeze(2)


def by_token(x: Tensor) -> Tensor:
    """[B, K, G, s, D] -> [B, s, N, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)
