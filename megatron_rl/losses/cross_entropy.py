"""The loss of supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(log_probs: Tensor, total: int) -> Tensor:
    """-(sum of log p) / total, a scalar; log_probs [T].

    total: tokens of the whole mini-batch, over all ranks and micro-batches, so that the sum of this over them is the
    mean over tokens, whatever the mini-batch is cut into; where it is 0 the loss is 0.
    """
    return -log_probs.sum() / max(total, 1)
