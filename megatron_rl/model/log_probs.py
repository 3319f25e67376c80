"""Log-probabilities, with or without entropy, straight from hidden states, a few tokens at a time.

Legend: N tokens, H hidden size, V rows of the padded vocabulary, v = V / tp_size rows of this rank.
With z = W h / temperature and Z = sum(exp z):  log p = z_target - log Z,  E = log Z - sum(p * z).
No tensor of N x v elements exists, forward or backward: logits are made for a chunk of tokens, reduced to a few numbers
a token, and made again when gradients are asked for. Without entropy a chunk is walked through less often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.chunks import chunk_tokens


class HeadLogProb(torch.autograd.Function):
    """(log-prob of the target [N], entropy [N] or None) in float32 from hidden [N, H] and this rank's weight [v, H]."""

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
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `head_log_probs`, and without entropy `head_log_probs_alone`."""
        rows = LocalRows(weight, vocab_size, temperature, tp_group.rank(), soft_cap)
        found = combine(local_sums(hidden, rows, targets, with_entropy), tp_group)
        ctx.save_for_backward(hidden, weight, targets, found.log_z, found.entropy)
        ctx.rows = (vocab_size, temperature, tp_group.rank(), soft_cap)
        return found.log_prob, found.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
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
            if entropy is None or grad_entropy is None:
                grad = log_probs.exp_().mul_(-grad_log_prob[chunk, None])
            else:
                probs = log_probs.exp()
                grad = log_probs.clamp_(min=-1e30).add_(entropy[chunk, None])
                grad.mul_(-grad_entropy[chunk, None]).sub_(grad_log_prob[chunk, None]).mul_(probs)
            rows.add(grad, targets[chunk], grad_log_prob[chunk])
            rows.add_product(grad, slope, hidden[chunk], grad_hidden[chunk], grad_weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None


@dataclass(frozen=True)
class LocalSums:
    """What one rank finds in its rows v, each float32 [N]. With m = max z over them:

    largest: m. exp: sum exp(z - m). target_logit: the target's z, 0 where another rank has it. Where they are wanted:
    exp_times_logit: sum exp(z - m) (z - m), for the entropy; squares: sum exp(z - m)^2.
    """

    largest: Tensor
    exp: Tensor
    target_logit: Tensor
    exp_times_logit: Tensor | None = None
    squares: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[LocalSums]) -> LocalSums:
        """Of chunks of tokens, at least one, one after the other."""

        def column(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values)

        return cls(*(column(field.name) for field in fields(cls)))


@dataclass(frozen=True)
class Combined:
    """What the ranks find together, each float32 [N] and the same on all: log Z, log-prob of the target, and where they
    are wanted entropy and sum of p^2."""

    log_z: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def local_sums(
    hidden: Tensor, rows: LocalRows, targets: Tensor, entropy: bool = False, squares: bool = False
) -> LocalSums:
    """Of hidden [N, H] and targets [N], a chunk of tokens at a time. entropy, squares: what else is wanted."""
    cut = list(chunks(len(hidden), hidden.shape[1], len(rows.weight))) or [slice(0, 0)]
    return LocalSums.joined(
        [sums_of_logits(rows.logits(hidden[chunk]), rows, targets[chunk], entropy, squares) for chunk in cut]
    )


def sums_of_logits(
    logits: Tensor, rows: LocalRows, targets: Tensor, entropy: bool = False, squares: bool = False
) -> LocalSums:
    """Of one chunk's logits [n, v], which become exp(z - m), or something else where the entropy is wanted."""
    # A shard of padding alone has no largest logit; any finite number gives it the sum 0.
    largest = logits.amax(-1).clamp(min=torch.finfo(torch.float32).min / 4)
    target_logit = rows.take(logits, targets)
    shifted = logits.sub_(largest[:, None])
    exp = shifted.exp() if entropy else shifted.exp_()
    exp_sum, square_sum = exp.sum(-1), exp.square().sum(-1) if squares else None
    # exp is 0 where the logit is -inf, and 0 * -inf is NaN.
    exp_times_logit = exp.mul_(shifted.clamp_(min=-1e30)).sum(-1) if entropy else None
    return LocalSums(largest, exp_sum, target_logit, exp_times_logit, square_sum)


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

    def add_product(
        self, grad: Tensor, slope: Tensor | None, hidden: Tensor, grad_hidden: Tensor, grad_weight: Tensor
    ) -> None:
        """From the gradient [n, v] of a chunk's logits, which is used up: fill grad_hidden [n, H], and add to
        grad_weight [v, H], float32 or more. slope: what `slope` says of these logits; hidden: [n, H].
        """
        grad = grad if slope is None else grad.mul_(slope)
        grad = grad if self.temperature == 1.0 else grad.div_(self.temperature)
        grad = grad.to(self.weight.dtype)
        torch.mm(grad, self.weight, out=grad_hidden)
        if grad.dtype == grad_weight.dtype:
            grad_weight.addmm_(grad.t(), hidden)
        else:
            grad_weight.add_(torch.mm(grad.t(), hidden))

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


def combine(mine: LocalSums, tp_group: dist.ProcessGroup) -> Combined:
    """From what every rank found in its rows; all ranks must call."""
    top = mine.largest.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=tp_group)
    below = mine.largest - top
    scale = below.exp()
    parts = [scale * mine.exp, mine.target_logit]
    if mine.exp_times_logit is not None:
        parts.append(scale * (mine.exp_times_logit + below.clamp(min=-1e30) * mine.exp))
    if mine.squares is not None:
        parts.append(scale.square() * mine.squares)
    total = torch.stack(parts)
    dist.all_reduce(total, group=tp_group)
    log_sum = total[0].log()
    return Combined(
        top + log_sum,
        (total[1] - top - log_sum).clamp(max=0.0),
        None if mine.exp_times_logit is None else log_sum - total[2] / total[0],
        None if mine.squares is None else total[-1] / total[0].square(),
    )


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
        hidden, weight, targets, vocab_size, temperature, tp_group, soft_cap, True
    )
    return found


def head_log_probs_alone(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup,
    soft_cap: float | None = None,
) -> Tensor:
    """The log-probs of `head_log_probs`, bit for bit, without the entropy's work."""
    log_prob: Tensor
    log_prob, _ = HeadLogProb.apply(hidden, weight, targets, vocab_size, temperature, tp_group, soft_cap, False)
    return log_prob


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
    found = combine(local_sums(hidden, rows, targets, squares=True), tp_group)
    if found.sum_pi_squared is None:
        raise RuntimeError("sums of squares were asked for and not computed")
    return found.log_prob, found.sum_pi_squared
