"""Distillation: what teachers add to the actor's loss, or to its advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.algorithms import distillation_reads
from megatron_rl.config.declarations import DISTILLATION_LOSSES
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.model.vocab_head import VocabHead
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.teacher_heads import teacher_heads
from megatron_rl.roles.token_scorer import TokenScorer


@dataclass(frozen=True)
class DistillationTerms:
    """Terms of the actor's loss in one micro-batch: policy_weight * policy_loss(advantages) + weight * losses."""

    advantages: Tensor
    """[N], float32: advantages of the policy loss."""
    losses: Tensor | None = None
    """[N]: distillation loss of each token, also reported as a metric. None without a teacher."""
    weight: float = 0.0
    policy_weight: float = 1.0
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Further metrics by name, a value per token [N]."""


class Distillation:
    """The configured distillation loss on a rank of the actor's.

    task_weight: factor of the policy loss. weight: factor of the distillation loss.
    """

    def __init__(self, rank: Rank, scorer: TokenScorer) -> None:
        """Raises ConfigError as `teacher_heads`."""
        self.keys = rank.config.distillation.distillation_loss
        declared = DISTILLATION_LOSSES[self.keys.loss_mode]
        self._loss: Callable[..., Any] = declared.function
        self._reads = distillation_reads(rank.config)
        self.in_advantages = self.keys.use_policy_gradient
        self.task_weight = self.keys.task_loss_coef if self.keys.use_task_rewards else 0.0
        self.weight = self.keys.distillation_loss_coef if self.keys.use_task_rewards else 1.0
        self._scorer, own = scorer, scorer.head
        self.heads = []
        if "teacher_hidden" in self._reads and rank.groups.is_last_stage:
            self.heads = teacher_heads(rank, scorer)
            # The student's softmax over the vocabulary that it shares with this teacher.
            self._own = [
                VocabHead(own.model, replace(other.softmax, soft_cap=own.softmax.soft_cap)) for other in self.heads
            ]

    def __call__(
        self, hidden: Tensor, block: MicroBatch, log_probs: Tensor, old_log_probs: Tensor
    ) -> DistillationTerms:
        """hidden [b, S / C, H]; log-probs [N] of the sampled tokens. All TP ranks and all C context-parallel ranks must
        call.
        """
        advantages = block.fields["advantages"]
        if not self.in_advantages:
            losses, metrics = self._losses(hidden, block, log_probs)
            return DistillationTerms(advantages, losses, self.weight, self.task_weight, metrics)
        losses = self._bounded(self._loss(old_log_probs, block.fields["teacher_log_probs"]))
        return DistillationTerms(self.task_weight * advantages - self.weight * losses, losses)

    def _losses(self, hidden: Tensor, block: MicroBatch, log_probs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss of each token [N], further metrics by name [N])."""
        fields = block.fields
        if "teacher_log_probs" in self._reads:
            weights = fields.get("rollout_weights", 1.0)  # what corrects for the tokens' having been sampled by others
            return weights * self._bounded(self._loss(log_probs, fields["teacher_log_probs"])), {}
        if "teacher_hidden" in self._reads:
            return self._divergence(hidden, block), {}
        ids, of_teacher = self._reads
        at_ids, theirs = block.part(block.wide(ids)).long(), block.wide(of_teacher)
        mine = block.whole(self._scorer.head.log_probs_at(block.scored(hidden), at_ids))
        masses = {"distillation/student_mass": mine, "distillation/teacher_mass": theirs}
        metrics = {name: values.detach().exp().sum(-1) for name, values in masses.items()}
        return self._bounded(self._loss(mine, theirs, self.keys)), metrics

    def _divergence(self, hidden: Tensor, block: MicroBatch) -> Tensor:
        """Each teacher's head is compared at the tokens of its own rows."""
        scored, kind = block.scored(hidden), self._loss(self.keys)
        theirs, number = block.part(block.wide("teacher_hidden")), block.part(block.fields["teachers"])
        if len(self.heads) == 1:
            return block.whole(self._compared(0, scored, theirs, kind))
        losses = scored.new_zeros(len(scored), dtype=torch.float32)
        for teacher in range(len(self.heads)):
            rows = (number == teacher).nonzero()[:, 0]
            losses = losses.index_copy(0, rows, self._compared(teacher, scored[rows], theirs[rows], kind))
        return block.whole(losses)

    def _compared(self, teacher: int, hidden: Tensor, theirs: Tensor, kind: Any) -> Tensor:
        other = self.heads[teacher]
        theirs = theirs[:, : other.weight.shape[1]].to(other.weight.dtype)  # columns of a wider teacher are beyond
        return self._own[teacher].divergence(hidden, theirs, other, kind)

    def _bounded(self, losses: Tensor) -> Tensor:
        bound = self.keys.loss_max_clamp
        return losses if bound is None else losses.clamp(-bound, bound)
