"""What keeps the load of experts even while a policy is trained: losses of routers.

Of every layer with experts, over the rows with a response that a mini-batch has on all ranks, of which each has all of
its tokens, prompt included:

    aux loss   mean over rows r of  E / (K L_r) * sum over experts e of  n_re * p_re
    z loss     mean over tokens of  log(sum over experts of exp(logit))^2

n_re: of the K L_r choices of the L_r tokens of row r those that fell on expert e; p_re: the mean over these tokens of
the score of e, where a token's scores add up to 1. The gradient flows through p. A prompt that is computed once for
several rows counts for each of them, and filler never does. As rows and not blocks are what a loss is of, it does not
depend on how a mini-batch is cut (Megatron's `seq_aux_loss`; Wang et al., arXiv:2408.15664, have it as the
sequence-wise balance loss).

Legend: T tokens that a router of this rank sees in one pass, E experts, K of them to a token, R rows of the pass, P
places of their tokens on this rank: as many as rows have tokens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


@dataclass(frozen=True)
class Balance:
    """What the routers of a chunk are told of the rows of one pass that trains.

    tokens: int64 [P], which of the T tokens it is; rows: int64 [P], of which row; lengths: float32 [R], tokens of each
    on all ranks. groups: over which the tokens of a row lie. aux_weight, z_weight: what the sums over rows, and over
    tokens, are multiplied with before Megatron's own factor of losses comes in.
    """

    tokens: Tensor
    rows: Tensor
    lengths: Tensor
    groups: Sequence[dist.ProcessGroup]
    aux_weight: float
    z_weight: float

    def losses(self, logits: Tensor, scores: Tensor, is_chosen: Tensor, top_k: int) -> Tensor:
        """float32 [2]: this rank's share of the sum over rows of the aux loss, and over tokens of the z loss.

        logits and scores float32 [T, E], is_chosen bool [T, E]. All ranks of `groups` must call.
        """
        shape = (len(self.lengths), logits.shape[1])
        with torch.no_grad():
            counts = logits.new_zeros(shape).index_add_(0, self.rows, is_chosen[self.tokens].float())
            for group in self.groups:
                dist.all_reduce(counts, group=group)
        sums = logits.new_zeros(shape).index_add(0, self.rows, scores[self.tokens])
        aux = ((counts * sums).sum(1) * (shape[1] / top_k) / self.lengths.square()).sum()
        z = logits.logsumexp(-1)[self.tokens].square().sum()
        return torch.stack([aux, z])


class BalancedRouter(TopKRouter):
    """Megatron's router, which adds the gradients of balancing losses where it is told of a pass's rows."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [S, B, E] -> (weights [T, E], 0 where an expert is not the token's; bool [T, E])."""
        weights, is_chosen = self.choose(logits, padding_mask)
        tap: Any = self.router_replay
        balance = None if tap is None else tap.balance()
        if balance is None:
            return weights, is_chosen
        floats = logits.flatten(0, 1).float()
        losses = balance.losses(floats, self.shares(floats), is_chosen, self.topk)
        tap.note_losses(losses.detach())
        loss = balance.aux_weight * losses[0] + balance.z_weight * losses[1]
        with_gradient: Tensor = MoEAuxLossAutoScaler.apply(weights, loss)
        return with_gradient, is_chosen

    def choose(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `routing` returns, without losses."""
        found: tuple[Any, Any] = super().routing(logits, padding_mask)
        return found

    def shares(self, logits: Tensor) -> Tensor:
        """float32 [T, E] -> scores that add up to 1."""
        return logits.softmax(-1)
