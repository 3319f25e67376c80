"""What a head says of more than sampled tokens: its likeliest ones, given ones, and its distance from another head.

Legend as in `log_probs`: N tokens, H hidden size, v rows of the vocabulary on this rank. As there no tensor of N x v
elements exists: logits are made for a chunk of tokens, and again in backward. Two heads share the room of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.model.log_probs import (
    LocalRows,
    LocalSums,
    VocabSoftmax,
    chunks,
    combine,
    head_gradients,
    sums_of_logits,
)


@torch.no_grad()
def head_top_k(hidden: Tensor, weight: Tensor, k: int, softmax: VocabSoftmax) -> tuple[Tensor, Tensor]:
    """(ids int64 [N, k], log-probs float32 [N, k]) of the k likeliest tokens, the likeliest first; equal on TP ranks.

    hidden [N, H], equal on every TP rank. Raises ValueError for more than `vocab_size`. All TP ranks must call.
    """
    if k > softmax.vocab_size:
        raise ValueError(f"the {k} likeliest tokens of a vocabulary of {softmax.vocab_size}")
    rows, group = LocalRows(weight, softmax), softmax.tp_group
    ids, logits, sums = [], [], []
    for chunk in chunks(len(hidden), hidden.shape[1], len(weight)):
        mine = rows.logits(hidden[chunk])
        best = mine.topk(min(k, len(weight)), dim=-1)
        ids.append(best.indices + rows.first)
        logits.append(best.values)
        sums.append(sums_of_logits(mine, rows, best.indices[:, 0]))
    if not sums:
        return hidden.new_zeros(0, k, dtype=torch.int64), hidden.new_zeros(0, k, dtype=torch.float32)
    log_z = combine(LocalSums.joined(sums), group).log_z
    candidates, numbers = (_gathered(torch.cat(parts), group) for parts in (logits, ids))
    best = candidates.topk(k, dim=-1)
    return numbers.gather(-1, best.indices), best.values - log_z[:, None]


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, k] of each rank -> [N, k * ranks] of all."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts, -1)


def head_log_probs_at(hidden: Tensor, weight: Tensor, ids: Tensor, softmax: VocabSoftmax) -> Tensor:
    """Log-probs float32 [N, k] of the tokens `ids` int64 [N, k], equal on every TP rank. All TP ranks must call.

    An id from `vocab_size` on has probability 0. hidden: as for `log_probs.head_log_probs`.
    """
    log_probs: Tensor = HeadLogProbsAt.apply(hidden, weight, ids, softmax)
    return log_probs


class HeadLogProbsAt(torch.autograd.Function):
    """log p of k tokens for each of N, [N, k] in float32, from hidden [N, H] and this rank's weight [v, H]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, softmax: VocabSoftmax) -> Tensor:
        """See `head_log_probs_at`."""
        rows, logits, sums = LocalRows(weight, softmax), [], []
        for chunk in chunks(len(hidden), hidden.shape[1], len(weight)) if len(hidden) else [slice(0, 0)]:
            mine = rows.logits(hidden[chunk])
            logits.append(rows.take(mine, ids[chunk]))
            sums.append(sums_of_logits(mine, rows, ids[chunk, 0]))
        log_z = combine(LocalSums.joined(sums), softmax.tp_group).log_z
        at_ids = torch.cat(logits)
        dist.all_reduce(at_ids, group=softmax.tp_group)
        ctx.save_for_backward(hidden, weight, ids, log_z)
        ctx.softmax = softmax
        return (at_ids - log_z[:, None]).masked_fill_(ids >= softmax.vocab_size, -torch.inf)

    @staticmethod
    def backward(ctx: Any, grad_at: Tensor) -> tuple[Tensor | None, ...]:
        """d log p_i / d z_j = 1[j = i] - p_j, summed over the k tokens i."""
        hidden, weight, ids, log_z = ctx.saved_tensors

        def gradient(chunk: slice, logits: Tensor) -> Tensor:
            grad = logits.sub_(log_z[chunk, None]).exp_().mul_(-grad_at[chunk].sum(-1, keepdim=True))
            rows.add(grad, ids[chunk], grad_at[chunk])
            return grad

        rows, is_trained = LocalRows(weight, ctx.softmax), ctx.needs_input_grad[1]
        return *head_gradients(hidden, rows, gradient, of_weight=is_trained), None, None


class Divergence(Protocol):
    """How far two distributions are from each other, from rows of one rank; see `losses.distillation`."""

    def sums(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [n, v] of this head and of the other -> (this rank's part of the divergence [n], what `gradient`
        needs of it when added up over ranks [n])."""

    def gradient(self, log_p: Tensor, log_q: Tensor, slope: Tensor) -> Tensor:
        """The gradient [n, v] with respect to this head's logits. slope [n, 1]: the second of the sums."""


@dataclass(frozen=True)
class OtherHead:
    """A head that another is compared with: this rank's rows [v, H'] of the same tokens, and their distribution."""

    weight: Tensor
    softmax: VocabSoftmax


def head_divergence(
    hidden: Tensor, weight: Tensor, softmax: VocabSoftmax, other_hidden: Tensor, other: OtherHead, kind: Divergence
) -> Tensor:
    """Divergence float32 [N] between the distribution of this head and that of another over the same tokens.

    hidden [N, H]: as for `log_probs.head_log_probs`. other_hidden [N, H'], equal on every TP rank; it and the other
    head have no gradient. Both `softmax` must name the same vocab_size. All TP ranks must call, and
    meet at every chunk. Memory is that of `HeadLogProb`: chunks are half as long.
    """
    divergence: Tensor = HeadDivergence.apply(hidden, weight, softmax, other_hidden, other, kind)
    return divergence


class HeadDivergence(torch.autograd.Function):
    """See `head_divergence`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        softmax: VocabSoftmax,
        other_hidden: Tensor,
        other: OtherHead,
        kind: Divergence,
    ) -> Tensor:
        rows, others = LocalRows(weight, softmax), LocalRows(other.weight, other.softmax)
        saved = [hidden.new_zeros(4, 0, dtype=torch.float32)]
        for chunk in _half_chunks(hidden, weight):
            mine, theirs = rows.logits(hidden[chunk]), others.logits(other_hidden[chunk])
            log_z = _log_z(mine, theirs, softmax.tp_group)
            sums = torch.stack(kind.sums(_log_probs(mine, log_z[0]), _log_probs(theirs, log_z[1])))
            dist.all_reduce(sums, group=softmax.tp_group)
            saved.append(torch.cat([log_z, sums]))
        log_z_mine, log_z_other, divergence, slope = torch.cat(saved, -1).unbind()
        ctx.save_for_backward(hidden, weight, other_hidden, log_z_mine, log_z_other, slope)
        ctx.softmax, ctx.other, ctx.kind = softmax, other, kind
        return divergence

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of logits is that of `Divergence.gradient`."""
        hidden, weight, other_hidden, log_z_mine, log_z_other, slope = ctx.saved_tensors
        others = LocalRows(ctx.other.weight, ctx.other.softmax)

        def gradient(chunk: slice, logits: Tensor) -> Tensor:
            theirs = _log_probs(others.logits(other_hidden[chunk]), log_z_other[chunk])
            mine = _log_probs(logits, log_z_mine[chunk])
            kind: Divergence = ctx.kind
            of_logits: Tensor = kind.gradient(mine, theirs, slope[chunk, None]) * grad[chunk, None]
            return of_logits

        rows, is_trained, cut = LocalRows(weight, ctx.softmax), ctx.needs_input_grad[1], _half_chunks(hidden, weight)
        return *head_gradients(hidden, rows, gradient, of_weight=is_trained, cut=cut), None, None, None, None


def _half_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Chunks in which the logits of two heads, and what is made of them, take no more room than those of one."""
    return chunks(len(hidden), hidden.shape[1] // 2, 2 * len(weight))


def _log_z(mine: Tensor, theirs: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2, n]: log of the sum of e^z over all ranks, for logits [n, v] of two heads."""
    top = torch.stack([logits.amax(-1).clamp(min=torch.finfo(torch.float32).min / 4) for logits in (mine, theirs)])
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    both = zip((mine, theirs), top, strict=True)
    sums = torch.stack([(logits - most[:, None]).exp_().sum(-1) for logits, most in both])
    dist.all_reduce(sums, group=group)
    log_z: Tensor = top + sums.log()
    return log_z


def _log_probs(logits: Tensor, log_z: Tensor) -> Tensor:
    """Turn logits [n, v] into log-probs in place; those of padding are finite, so that a difference is no NaN."""
    return logits.sub_(log_z[:, None]).clamp_(min=-1e30)
