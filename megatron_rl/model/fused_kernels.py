"""Kernels of GPUs for attention that flash attention does not have: sinks, soft caps, and the gated delta rule.

They stand in where a layer attends within rows, so that packed segments go through slots as without them
(`segments.py`), and the host waits for nothing. `attention_kernels=fused` chooses them; none has run on a GPU yet.

FlexAttention (Dong et al., arXiv:2412.05496) bounds the products, skips blocks of keys that no query of a block sees,
and returns the logarithms of its sums. A sink adds exp(s) to a sum exp(l), which scales the output by sigmoid(l - s).
flash-linear-attention computes gated deltas in chunks, in the dtype of the weights with sums in float32.

Legend: B rows of S tokens, N query heads, K heads of keys and values, D head size; others: `delta_rule.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megatron_rl.model.attention import CausalAttention
from megatron_rl.model.block_attention import AttentionKind
from megatron_rl.model.delta_attention import GatedDeltaAttention

BLOCK = 128
"""Queries, and keys, of a block of FlexAttention."""


def use_fused(chunks: Iterable[torch.nn.Module]) -> None:
    """Let all layers of these chunks that have a kernel here compute with it."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, CausalAttention) and module.needs_slots:
            module.rows = flex_rows
        elif isinstance(module, GatedDeltaAttention):
            module.rule = partial(kernel_delta_rule, dtype=module.config.params_dtype)


def flex_rows(query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind, sinks: Tensor | None = None) -> Tensor:
    """`attention.attend`: query [B, S, N, D], key and value [B, S, K, D] -> [B, S, N, D]."""
    length = query.shape[1]
    window = None if kind.window is None or kind.window >= length else kind.window
    rows = (x.transpose(1, 2) for x in (query, key, value))
    attend: Any = compiled_flex() if query.is_cuda else flex_attention
    out, sums = attend(
        *rows,
        score_mod=None if kind.soft_cap is None else capping(kind.soft_cap),
        block_mask=causal_blocks(length, window, query.device),
        enable_gqa=query.shape[2] != key.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        share = torch.sigmoid(sums.lse - sinks.to(sums.lse.dtype)[:, None])
        out = (out * share[..., None]).to(query.dtype)
    joined: Tensor = out.transpose(1, 2)
    return joined


@cache
def compiled_flex() -> Callable[..., Any]:
    """FlexAttention's kernels; compiled once, for rows of any length."""
    made: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return made


@cache
def capping(bound: float) -> Callable[..., Tensor]:
    """The change of a product x to c tanh(x / c)."""

    def capped(score: Tensor, row: Tensor, head: Tensor, at: Tensor, of: Tensor) -> Tensor:
        return bound * torch.tanh(score / bound)

    return capped


@cache
def seen_within(window: int | None) -> Callable[..., Tensor]:
    """Whether a query sees a key: one that is not later, and in its window."""

    def seen(row: Tensor, head: Tensor, at: Tensor, of: Tensor) -> Tensor:
        return of <= at if window is None else (of <= at) & (at - of < window)

    return seen


@lru_cache(maxsize=64)
def causal_blocks(length: int, window: int | None, device: torch.device) -> BlockMask:
    """Which blocks of keys each block of queries sees in part, and which whole.

    Made from the numbers of blocks: torch's own function looks at every pair of tokens.
    """
    number = torch.arange(-(-length // BLOCK), device=device)
    at, of = number[:, None] * BLOCK, number[None] * BLOCK  # the first token of each
    last = BLOCK - 1
    some, whole = of <= at, (of < at) & (at + last < length)
    if window is not None:
        some, whole = some & (at - (of + last) < window), whole & (at + last - of < window)
    return BlockMask.from_kv_blocks(
        *ordered(some & ~whole), *ordered(whole), BLOCK, seen_within(window), seq_lengths=(length, length)
    )


def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [n, n] -> for each row how many are true, and their columns before the others: int32 [1, 1, n (, n)]."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def kernel_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """`delta_rule.chunked_delta_rule`, whose sums begin with queries, keys and values in `dtype`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # an optional package

    rounded = (x.to(dtype) for x in (query, key, value))
    out: Tensor
    out, _ = chunk_gated_delta_rule(*rounded, g=decay, beta=rate, use_qk_l2norm_in_kernel=True)
    return out
