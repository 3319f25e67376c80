"""Log-probs, entropy and cross-entropy of the language model's head, straight from hidden states, in chunks of tokens.

Legend: N tokens, H hidden size, V rows of the padded vocabulary, v = V / tp_size rows of this rank.
With z = W h / temperature and Z = sum(exp z):  log p = z_target - log Z,  E = log Z - sum(p * z).
No tensor of N x v elements exists, forward or backward. Logits are made for a chunk of tokens and reduced to a few
numbers a token. `HeadLogProb` makes them again in backward, when the gradient of each token is known: four products
with the vocabulary. `HeadCrossEntropy` sums all tokens with equal weight, so it knows the gradient at once and makes
logits once: three products. In exchange the gradients of hidden states and weight exist from forward to backward, so
backward must follow before the next forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.chunks import chunk_tokens
from megatron_rl.model.soft_cap import cap_slope, capped


@dataclass(frozen=True)
class VocabSoftmax:
    """The distribution over a vocabulary whose rows are split over the ranks of `tp_group`.

    vocab_size: real rows; later rows are padding. temperature: logits are divided by it. soft_cap: c of logits that are
    c tanh(W h / c); None: logits are W h. unsampled: ids whose probability is 0, as no engine samples them.
    """

    vocab_size: int
    temperature: float
    tp_group: dist.ProcessGroup
    soft_cap: float | None = None
    unsampled: tuple[int, ...] = ()


def head_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, softmax: VocabSoftmax) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, both float32 [N] and equal on every TP rank.

    hidden [N, H], equal on every TP rank, must have passed Megatron's copy into the TP region, whose backward adds up
    the ranks' gradients. weight [v, H]: this rank's rows. targets int64 [N] < vocab_size. All TP ranks must call.
    """
    scores: tuple[Tensor, Tensor] = HeadLogProb.apply(hidden, weight, targets, softmax, True)
    return scores


def head_log_probs_alone(hidden: Tensor, weight: Tensor, targets: Tensor, softmax: VocabSoftmax) -> Tensor:
    """The log-probs of `head_log_probs`, bit for bit, without the cost of the entropy."""
    log_prob: Tensor
    log_prob, _ = HeadLogProb.apply(hidden, weight, targets, softmax, False)
    return log_prob


@torch.no_grad()
def head_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, softmax: VocabSoftmax, columns: Sequence[str]
) -> Combined:
    """Log-prob of each target, and those `columns` of `Combined` that are computed on request; without gradients.

    columns: "entropy" and "sum_pi_squared", or one of them. Other arguments and calls are those of `head_log_probs`.
    """
    requested = ("entropy" in columns, "sum_pi_squared" in columns)
    return combine(local_sums(hidden, LocalRows(weight, softmax), targets, *requested), softmax.tp_group)


def head_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, softmax: VocabSoftmax) -> Tensor:
    """-(sum of the targets' log-probs), a float32 scalar, equal on every TP rank; backward may be called once.

    Arguments are those of `head_log_probs`. All TP ranks must call, and they meet at every chunk.
    """
    total: Tensor = HeadCrossEntropy.apply(hidden, weight, targets, softmax)
    return total


class HeadLogProb(torch.autograd.Function):
    """(log-prob of the target [N], entropy [N] or None) in float32 from hidden [N, H] and this rank's weight [v, H]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softmax: VocabSoftmax, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `head_log_probs`, and without entropy `head_log_probs_alone`."""
        combined = combine(local_sums(hidden, LocalRows(weight, softmax), targets, with_entropy), softmax.tp_group)
        ctx.save_for_backward(hidden, weight, targets, combined.log_z, combined.entropy)
        ctx.softmax = softmax
        return combined.log_prob, combined.entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p / d z_j = 1[j = target] - p_j;   d E / d z_j = -p_j (log p_j + E).

        The gradient of `hidden` is the part that goes through this rank's rows.
        """
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors

        def gradient(chunk: slice, logits: Tensor) -> Tensor:
            log_probs = logits.sub_(log_z[chunk, None])
            if entropy is None or grad_entropy is None:
                grad = log_probs.exp_().mul_(-grad_log_prob[chunk, None])
            else:
                probs = log_probs.exp()
                grad = log_probs.clamp_(min=-1e30).add_(entropy[chunk, None])
                grad.mul_(-grad_entropy[chunk, None]).sub_(grad_log_prob[chunk, None]).mul_(probs)
            rows.add(grad, targets[chunk], grad_log_prob[chunk])
            return grad

        rows, is_trained = LocalRows(weight, ctx.softmax), ctx.needs_input_grad[1]
        return *head_gradients(hidden, rows, gradient, of_weight=is_trained), None, None, None


class HeadCrossEntropy(torch.autograd.Function):
    """-(sum of the targets' log-probs), a float32 scalar, from hidden [N, H] and this rank's weight [v, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softmax: VocabSoftmax) -> Tensor:
        """See `head_cross_entropy`. d(-log p) / d z_j = p_j - 1[j = target]."""
        rows, total = LocalRows(weight, softmax), hidden.new_zeros((), dtype=torch.float32)

        def gradient(chunk: slice, logits: Tensor) -> Tensor:
            mine = sums_of_logits(logits, rows, targets[chunk])
            combined = combine(mine, softmax.tp_group)
            total.sub_(combined.log_prob.sum())
            # The logits have become exp(z - m).
            grad = logits.mul_((mine.largest - combined.log_z).exp()[:, None])
            rows.add(grad, targets[chunk], torch.full_like(combined.log_prob, -1.0))
            return grad

        is_trained = ctx.needs_input_grad[1]
        ctx.save_for_backward(*head_gradients(hidden, rows, gradient, of_weight=is_trained))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: each is needed once."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad), None if grad_weight is None else grad_weight.mul_(grad), None, None


def head_gradients(
    hidden: Tensor,
    rows: LocalRows,
    gradient: Callable[[slice, Tensor], Tensor],
    *,
    of_weight: bool,
    cut: Iterable[slice] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden [N, H], through this rank's rows, and of the weight [v, H], one chunk of tokens at a time.

    gradient: (chunk, its logits [n, v]) -> their gradient [n, v]; it may overwrite the logits. of_weight: False: the
    weight is frozen, and has None. cut: the chunks; None: `chunks`.
    """
    weight, grad_hidden = rows.weight, torch.empty_like(hidden)
    grad_weight = None
    if of_weight:
        # 16 bits would lose most of what the later chunks add.
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    for chunk in chunks(len(hidden), hidden.shape[1], len(weight)) if cut is None else cut:
        logits = rows.logits(hidden[chunk])
        slope = rows.slope(logits)
        grad = gradient(chunk, logits)
        rows.add_product(grad, slope, hidden[chunk], grad_hidden[chunk], grad_weight)
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


@dataclass(frozen=True)
class LocalSums:
    """Sums over the rows v of one rank, each float32 [N]. With m = max z over these rows:

    largest: m. exp: sum exp(z - m). target_logit: the target's z, 0 where another rank holds it. On request:
    exp_times_logit: sum exp(z - m) (z - m), for the entropy; squares: sum exp(z - m)^2.
    """

    largest: Tensor
    exp: Tensor
    target_logit: Tensor
    exp_times_logit: Tensor | None = None
    squares: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[LocalSums]) -> LocalSums:
        """Concatenate the sums of at least one chunk of tokens."""

        def column(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else torch.cat(values)

        return cls(*(column(field.name) for field in fields(cls)))


@dataclass(frozen=True)
class Combined:
    """Sums over the whole vocabulary, each float32 [N] and equal on all ranks: log Z, log-prob of the target, and on
    request entropy and sum of p^2."""

    log_z: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None


def local_sums(
    hidden: Tensor, rows: LocalRows, targets: Tensor, entropy: bool = False, squares: bool = False
) -> LocalSums:
    """Sum over this rank's rows for hidden [N, H] and targets [N], a chunk of tokens at a time.

    entropy, squares: also compute the sums for these.
    """
    cut = list(chunks(len(hidden), hidden.shape[1], len(rows.weight))) or [slice(0, 0)]
    return LocalSums.joined(
        [sums_of_logits(rows.logits(hidden[chunk]), rows, targets[chunk], entropy, squares) for chunk in cut]
    )


def sums_of_logits(
    logits: Tensor, rows: LocalRows, targets: Tensor, entropy: bool = False, squares: bool = False
) -> LocalSums:
    """Sum over one chunk's logits [n, v]. They are overwritten: with exp(z - m), unless the entropy is asked for."""
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
    """The rows [v, H] of the vocabulary that one rank holds; the last ones may be padding."""

    def __init__(self, weight: Tensor, softmax: VocabSoftmax) -> None:
        self.weight = weight
        self.temperature, self.soft_cap = softmax.temperature, softmax.soft_cap
        self.first = softmax.tp_group.rank() * len(weight)
        self.num_real = min(max(softmax.vocab_size - self.first, 0), len(weight))
        last = self.first + self.num_real
        self.unsampled = [token - self.first for token in softmax.unsampled if self.first <= token < last]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [n, v] of hidden [n, H]; padding, which vLLM drops, and `unsampled` are -inf."""
        logits = capped(torch.mm(hidden, self.weight.t()).float(), self.soft_cap)
        if self.temperature != 1.0:
            logits = logits.div_(self.temperature)
        logits[:, self.num_real :] = -torch.inf
        for row in self.unsampled:
            logits[:, row] = -torch.inf
        return logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative of the soft cap, 1 - tanh(x / c)^2 [n, v], from the result of `logits`; None without a cap."""
        if self.soft_cap is None:
            return None
        return cap_slope(logits, self.soft_cap / self.temperature)  # 0 for padding

    def take(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the targets' logits, in the shape [n] or [n, k] of targets; 0 for one that another rank holds."""
        local, is_here = self._local(targets)
        return torch.where(is_here, logits.gather(-1, _as_columns(local)).view_as(local), 0.0)

    def add(self, grad: Tensor, targets: Tensor, values: Tensor) -> None:
        """Add values, [n] or [n, k] as targets, to their columns of grad [n, v], for targets that this rank holds."""
        local, is_here = self._local(targets)
        grad.scatter_add_(-1, _as_columns(local), _as_columns(values * is_here))

    def add_product(
        self, grad: Tensor, slope: Tensor | None, hidden: Tensor, grad_hidden: Tensor, grad_weight: Tensor | None
    ) -> None:
        """Fill grad_hidden [n, H] and add to grad_weight [v, H] from the gradient [n, v] of a chunk's logits.

        grad is overwritten. slope: the result of `slope` for these logits. hidden: [n, H]. grad_weight: float32 or
        more; None: of a frozen weight.
        """
        grad = grad if slope is None else grad.mul_(slope)
        grad = grad if self.temperature == 1.0 else grad.div_(self.temperature)
        grad = grad.to(self.weight.dtype)
        torch.mm(grad, self.weight, out=grad_hidden)
        if grad_weight is None:
            return
        if grad.dtype == grad_weight.dtype:
            grad_weight.addmm_(grad.t(), hidden)
        else:
            add_product_in_float32(grad_weight, grad.t(), hidden)

    def _local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        local = targets - self.first
        return local.clamp(0, len(self.weight) - 1), (local >= 0) & (local < len(self.weight))


def _as_columns(values: Tensor) -> Tensor:
    """[n] -> [n, 1]; [n, k] as it is. n may be 0."""
    return values if values.dim() > 1 else values[:, None]


def add_product_in_float32(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [a, b] float32 += left [a, c] @ right [c, b], both of 16 bits. On a GPU in one kernel, without rounding the
    product.
    """
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(left, right))


def chunks(num_tokens: int, hidden_size: int, num_rows: int) -> Iterator[slice]:
    """Slices of at most `chunk_tokens` tokens that cover all tokens."""
    size = chunk_tokens(hidden_size, num_rows)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def combine(mine: LocalSums, tp_group: dist.ProcessGroup) -> Combined:
    """Combine the sums of all ranks; all ranks must call."""
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
