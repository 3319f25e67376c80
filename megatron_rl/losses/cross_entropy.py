"""The loss of supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(log_probs: Tensor, counted: Tensor, total: float) -> Tensor:
    """-(sum of log p over tokens that count) / total, a scalar; log_probs, counted (0 or 1) [T].

    total: tokens that count in the whole mini-batch, over all ranks and micro-batches, so that the sum of this over
    them is the mean over tokens, whatever the mini-batch is cut into; where it is 0 the loss is 0. What does not count
    may be anything, infinities and NaN too.
    """
    return -log_probs.where(counted.bool(), 0.0).sum() / max(total, 1)
