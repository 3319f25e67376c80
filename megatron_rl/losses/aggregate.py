"""From terms of tokens to one loss of a mini-batch, independent of micro-batches and ranks.

Every mode is a weighted sum over tokens. The weights need only two numbers of the whole mini-batch, over all ranks, so
the gradient of the sum does not depend on how the mini-batch is split. Names of the modes are verl's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.losses.rows import spread, sum_rows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BatchTotals:
    """Counts over a whole mini-batch, all ranks and micro-batches: tokens that count, rows with one such or more."""

    tokens: int
    rows: int


def counted(kept: Tensor, lengths: Tensor) -> Tensor:
    """[2] (tokens, rows) to add up to `BatchTotals`; `kept` [N] is 1 where a token counts, `lengths` int64 [b]."""
    import torch

    return torch.stack([kept.sum(), (sum_rows(kept, lengths) > 0).sum()]).long()


def token_weights(kept: Tensor, lengths: Tensor, totals: BatchTotals, mode: str, scale: int) -> Tensor:
    """Weight [N] of each token, 0 where `kept` [N] is 0. With n tokens that count in a row, of `lengths` int64 [b]:

    token-mean               1 / tokens
    token-sum                1: the longer the responses of a mini-batch and the more of them, the larger the step
    seq-mean-token-sum       1 / rows
    seq-mean-token-mean      1 / (rows * n)
    seq-mean-token-sum-norm  1 / (rows * scale): Dr.GRPO's (Liu et al., arXiv:2503.20783), `scale` constant in a run

    Raises ValueError for another mode.
    """
    tokens, rows = max(totals.tokens, 1), max(totals.rows, 1)
    if mode == "token-mean":
        return kept / tokens
    if mode == "token-sum":
        return kept
    if mode == "seq-mean-token-sum":
        return kept / rows
    if mode == "seq-mean-token-mean":
        return kept / (rows * spread(sum_rows(kept, lengths), lengths, len(kept)).clamp(min=1))
    if mode == "seq-mean-token-sum-norm":
        return kept / (rows * scale)
    raise ValueError(f"{mode} is no way to aggregate a loss")
