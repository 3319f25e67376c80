"""Log-probabilities and entropy from logits split over TP ranks by vocabulary.

Legend: N tokens, V rows of the padded vocabulary, v = V / tp_size rows of this rank.
With z = logits and Z = sum(exp z):  log p = z_target - log Z,  H = log Z - sum(p * z).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class VocabParallelLogProb(torch.autograd.Function):
    """(log-prob of the target [N], entropy [N]) in float32 from this rank's logits [N, v]; all TP ranks must call."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, vocab_size: int, tp_group: dist.ProcessGroup):
        shifted = logits.float()
        first_row = tp_group.rank() * logits.shape[-1]
        num_real_rows = min(max(vocab_size - first_row, 0), logits.shape[-1])
        # Padding rows are no tokens: vLLM drops them, so they must get no probability here either.
        if num_real_rows < logits.shape[-1]:
            shifted = shifted.clone()
            shifted[:, num_real_rows:] = -torch.inf
        largest = shifted.amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp_group)
        shifted = shifted - largest

        local = targets - first_row
        is_here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        exp = shifted.exp()
        target_logit = torch.where(is_here, shifted.gather(-1, local[:, None])[:, 0], 0.0)
        exp_times_logit = torch.where(exp > 0, exp * shifted, 0.0).sum(-1)
        sums = torch.stack([exp.sum(-1), target_logit, exp_times_logit])
        dist.all_reduce(sums, group=tp_group)

        log_z = sums[0].log()
        log_prob = sums[1] - log_z
        entropy = log_z - sums[2] / sums[0]
        ctx.save_for_backward(shifted.sub_(log_z[:, None]), local, is_here, entropy)
        ctx.dtype = logits.dtype
        return log_prob, entropy

    @staticmethod
    def backward(ctx, grad_log_prob: Tensor, grad_entropy: Tensor):
        """d log p / d z_j = 1[j = target] - p_j;   d H / d z_j = -p_j (log p_j + H)."""
        all_log_probs, local, is_here, entropy = ctx.saved_tensors
        probs = all_log_probs.exp()
        grad = torch.where(probs > 0, all_log_probs + entropy[:, None], 0.0)
        grad.mul_(-grad_entropy[:, None]).sub_(grad_log_prob[:, None]).mul_(probs)
        grad.scatter_add_(-1, local[:, None], (grad_log_prob * is_here)[:, None])
        return grad.to(ctx.dtype), None, None, None


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, vocab_size: int, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, both float32 [N] and the same on every TP rank.

    logits [N, v] of this rank's vocabulary rows; targets int64 [N] < vocab_size. All ranks of `tp_group` must call.
    """
    return VocabParallelLogProb.apply(logits, targets, vocab_size, tp_group)
