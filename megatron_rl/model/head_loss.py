"""Cross-entropy straight from hidden states: loss and gradients in one walk over the tokens, a few at a time.

Legend: n tokens, H hidden size, v rows of the padded vocabulary on this rank.
A sum of log-probs weighs all tokens alike, so its gradient is known as soon as a chunk's logits are, and they are made
once; `log_probs.HeadLogProb`, which is told the gradient later, makes them twice. So there are three products with the
vocabulary instead of four. The price: gradients of hidden states and weight exist from forward to backward, so the two
must follow each other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.log_probs import LocalRows, chunks, combine, sums_of_logits


class HeadCrossEntropy(torch.autograd.Function):
    """-(sum of the targets' log-probs), a float32 scalar, from hidden [n, H] and this rank's weight [v, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        tp_group: dist.ProcessGroup,
        soft_cap: float | None,
    ) -> Tensor:
        """See `head_cross_entropy`. d(-log p) / d z_j = p_j - 1[j = target]."""
        rows = LocalRows(weight, vocab_size, temperature, tp_group.rank(), soft_cap)
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        # 16 bits would lose most of what the later chunks add.
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for chunk in chunks(len(hidden), hidden.shape[1], len(weight)):
            logits = rows.logits(hidden[chunk])
            slope = rows.slope(logits)
            mine = sums_of_logits(logits, rows, targets[chunk])
            found = combine(mine, tp_group)
            total -= found.log_prob.sum()
            # What is left of the logits is exp(z - m).
            grad = logits.mul_((mine.largest - found.log_z).exp()[:, None])
            rows.add(grad, targets[chunk], torch.full_like(found.log_prob, -1.0))
            rows.add_product(grad, slope, hidden[chunk], grad_hidden[chunk], grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """In place: both are needed once. Of the gradient of `hidden` this is the part through this rank's rows."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None, None, None, None


def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup,
    soft_cap: float | None = None,
) -> Tensor:
    """-(sum over n tokens of the targets' log-probs), the same on every TP rank; backward may be called once.

    Arguments as of `log_probs.head_log_probs`. All ranks of `tp_group` must call, and wait for each other at every
    chunk.
    """
    total: Tensor = HeadCrossEntropy.apply(hidden, weight, targets, vocab_size, temperature, tp_group, soft_cap)
    return total
