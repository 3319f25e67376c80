"""Balancing losses of routers, which keep the load of experts even while a policy is trained.

Every layer with experts has two losses. They count the rows with a response of a mini-batch on all ranks, each row with
all of its tokens, prompt included:

    aux loss   mean over rows r of  E / (K L_r) * sum over experts e of  n_re * p_re
    z loss     mean over tokens of  log(sum over experts of exp(logit))^2

n_re: the number of the K L_r choices of row r (L_r tokens) that fell on expert e; p_re: the mean score of e over these
tokens, where the scores of a token add up to 1. The gradient flows through p. A prompt that is computed once for
several rows counts for each of them; filler does not count. The losses are over rows and not over blocks, so they do
not depend on how a mini-batch is split (Megatron's `seq_aux_loss`; the sequence-wise balance loss of Wang et al.,
arXiv:2408.15664).

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
    """The rows of one training pass, from which the routers of a chunk compute their losses.

    tokens: int64 [P], which of the T tokens it is; rows: int64 [P], its row; lengths: float32 [R], tokens of each row
    on all ranks. groups: the groups over which the tokens of a row are split. aux_weight, z_weight: factors of the sum
    over rows and of the sum over tokens, before Megatron's own loss scale.
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
    """Megatron's router with the gradients of balancing losses, in passes that have a `Balance`."""

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
        """Return what `routing` returns, without losses."""
        choice: tuple[Any, Any] = super().routing(logits, padding_mask)
        return choice

    def shares(self, logits: Tensor) -> Tensor:
        """float32 [T, E] -> scores that add up to 1."""
        return logits.softmax(-1)


class BiasedRouter(BalancedRouter):
    """A router whose logits have a bias [E], which Megatron's has only with biases everywhere."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        bias: Any = torch.nn.Parameter(torch.empty(self.num_experts, dtype=self.config.params_dtype))
        bias.sequence_parallel = self.config.sequence_parallel
        self.bias = bias
