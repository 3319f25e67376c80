"""Log-probabilities and entropy straight from hidden states, a few tokens at a time.

Legend: N tokens, H hidden size, V rows of the padded vocabulary, v = V / tp_size rows of this rank.
With z = W h / temperature and Z = sum(exp z):  log p = z_target - log Z,  E = log Z - sum(p * z).
No tensor of N x v elements exists, forward or backward: logits are made for a chunk of tokens, reduced to five numbers
a token, and made again when gradients are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.chunks import chunk_tokens


class HeadLogProb(torch.autograd.Function):
    """(log-prob of the target [N], entropy [N]) in float32 from hidden [N, H] and this rank's weight [v, H]."""

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
    ) -> tuple[Tensor, Tensor]:
        """See `head_log_probs`."""
        rows = LocalRows(weight, vocab_size, temperature, tp_group.rank(), soft_cap)
        log_z, log_prob, entropy, _ = combine(*local_sums(hidden, rows, targets), tp_group)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.rows = (vocab_size, temperature, tp_group.rank(), soft_cap)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """d log p / d z_j = 1[j = target] - p_j;   d E / d z_j = -p_j (log p_j + E).

        Of the gradient of `hidden` this is the part that goes through this rank's rows.
        """
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        rows = LocalRows(weight, *ctx.rows)
        grad_hidden = torch.empty_like(hidden)
        # 16 bits would lose most of what the later chunks add.
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for chunk in chunks(len(hidden), hidden.shape[1], len(weight)):
            logits = rows.logits(hidden[chunk])
            slope = rows.slope(logits)
            log_probs = logits.sub_(log_z[chunk, None])
            probs = log_probs.exp()
            grad = log_probs.clamp_(min=-1e30).add_(entropy[chunk, None])
            grad.mul_(-grad_entropy[chunk, None]).sub_(grad_log_prob[chunk, None]).mul_(probs)
            rows.add(grad, targets[chunk], grad_log_prob[chunk])
            grad = grad if slope is None else grad.mul_(slope)
            grad = grad.div_(rows.temperature).to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.t(), hidden[chunk])
            else:
                grad_weight.add_(torch.mm(grad.t(), hidden[chunk]))
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def local_sums(hidden: Tensor, rows: LocalRows, targets: Tensor, squares: bool = False) -> tuple[Tensor, Tensor]:
    """What `combine` needs of this rank's rows, from hidden [N, H] and targets [N], a chunk of tokens at a time."""
    largest = hidden.new_empty(len(hidden), dtype=torch.float32)
    sums = hidden.new_empty(4 if squares else 3, len(hidden), dtype=torch.float32)
    for chunk in chunks(len(hidden), hidden.shape[1], len(rows.weight)):
        logits = rows.logits(hidden[chunk])
        # A shard of padding alone has no largest logit; any finite number gives it the sum 0.
        largest[chunk] = logits.amax(-1).clamp(min=torch.finfo(torch.float32).min / 4)
        target_logit = rows.take(logits, targets[chunk])
        shifted = logits.sub_(largest[chunk, None])
        exp = shifted.exp()
        sums[0, chunk] = exp.sum(-1)
        if squares:
            sums[3, chunk] = exp.square().sum(-1)
        # exp is 0 where the logit is -inf, and 0 * -inf is NaN.
        sums[1, chunk] = exp.mul_(shifted.clamp_(min=-1e30)).sum(-1)
        sums[2, chunk] = target_logit
    return largest, sums


class LocalRows:
    """The rows of the vocabulary that one rank holds; the last ones may only pad it. soft_cap: c of logits that are
    c tanh(W h / c); None: they are W h.
    """

    def __init__(
        self, weight: Tensor, vocab_size: int, temperature: float, tp_rank: int, soft_cap: float | None = None
    ) -> None:
        self.weight = weight
        self.temperature, self.soft_cap = temperature, soft_cap
        self.first = tp_rank * len(weight)
        self.num_real = min(max(vocab_size - self.first, 0), len(weight))

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, v] of hidden [n, H]; padding, which vLLM drops, is -inf."""
        logits = capped_logits(torch.mm(hidden, self.weight.t()).float(), self.soft_cap)
        if self.temperature != 1.0:
            logits = logits.div_(self.temperature)
        logits[:, self.num_real :] = -torch.inf
        return logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """Of soft caps, d c tanh(x / c) / dx = 1 - tanh(x / c)^2 [n, v] from the logits of `logits`; None without."""
        if self.soft_cap is None:
            return None
        slope = (logits * (self.temperature / self.soft_cap)).square_().neg_().add_(1.0)
        slope[:, self.num_real :] = 0.0
        return slope

    def take(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The targets' logits [n]; 0 for a target of another rank."""
        local, is_here = self._local(targets)
        return torch.where(is_here, logits.gather(-1, local[:, None])[:, 0], 0.0)

    def add(self, grad: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values [n] to the targets' columns of grad [n, v], where they are this rank's."""
        local, is_here = self._local(targets)
        grad.scatter_add_(-1, local[:, None], (values * is_here)[:, None])

    def _local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        local = targets - self.first
        return local.clamp(0, len(self.weight) - 1), (local >= 0) & (local < len(self.weight))


def capped_logits(logits: Tensor, soft_cap: float | None) -> Tensor:
    """c tanh(x / c) in the place of x, for a cap c."""
    return logits if soft_cap is None else logits.div_(soft_cap).tanh_().mul_(soft_cap)


def chunks(num_tokens: int, hidden_size: int, num_rows: int) -> Iterator[slice]:
    """All tokens, a chunk at a time."""
    size = chunk_tokens(hidden_size, num_rows)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def combine(largest: Tensor, sums: Tensor, tp_group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(log Z, log-prob of the target, entropy, sum of p^2 or None), each [N], from what every rank found in its rows.

    largest m [N]; sums [3 or 4, N]: of exp(z - m), of exp(z - m) (z - m), the target's logit or 0, and, where sums of
    p^2 are wanted, of exp(z - m)^2.
    """
    top = largest.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=tp_group)
    below = largest - top
    scale = below.exp()
    exp, exp_times_logit, target_logit, *squares = sums
    mine = [scale * exp, scale * (exp_times_logit + below.clamp(min=-1e30) * exp), target_logit]
    total = torch.stack([*mine, *(scale.square() * square for square in squares)])
    dist.all_reduce(total, group=tp_group)
    log_sum = total[0].log()
    log_prob = (total[2] - top - log_sum).clamp(max=0.0)
    sum_pi_squared = total[3] / total[0].square() if squares else None
    return top + log_sum, log_prob, log_sum - total[1] / total[0], sum_pi_squared


def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, both float32 [N] and the same on every TP rank.

    hidden [N, H], the same on every TP rank, which must have passed Megatron's copy into the TP region, whose backward
    adds up the ranks' gradients; weight [v, H], this rank's rows; targets int64 [N] < vocab_size. temperature: logits
    are divided by it. soft_cap: see `LocalRows`. All ranks of `tp_group` must call.
    """
    found: tuple[Tensor, Tensor] = HeadLogProb.apply(
        hidden, weight, targets, vocab_size, temperature, tp_group, soft_cap
    )
    return found


@torch.no_grad()
def head_log_probs_and_squares(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the sum over the vocabulary of p^2, both float32 [N]; without gradients.

    Arguments as of `head_log_probs`. All ranks of `tp_group` must call.
    """
    rows = LocalRows(weight, vocab_size, temperature, tp_group.rank(), soft_cap)
    _, log_prob, _, sum_pi_squared = combine(*local_sums(hidden, rows, targets, squares=True), tp_group)
    if sum_pi_squared is None:
        raise RuntimeError("sums of squares were asked for and not computed")
    return log_prob, sum_pi_squared
