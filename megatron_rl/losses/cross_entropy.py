"""The loss of supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(log_probs: Tensor, counted: Tensor, total: Tensor | float) -> Tensor:
    """-(sum of log p over tokens that count) / total, a scalar; log_probs, counted (0 or 1) [T].

    total: tokens that count in the whole mini-batch, over all ranks and micro-batches, so that the sum of this over
    them is the mean over tokens, whatever the mini-batch is cut into; where it is 0 the loss is 0. What does not count
    may be anything, infinities and NaN too.
    """
    summed = torch.where(counted.bool(), log_probs, 0.0).sum()
    if not isinstance(total, Tensor):
        return -summed / max(total, 1)
    return -summed / total.clamp(min=1)
