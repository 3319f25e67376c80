"""Distillation: what teachers add to the actor's loss, or to its advantages.

A loss over the whole vocabulary has the teachers' heads on the actor's last stage, cut as the actor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf_import import HFFolder
from megatron_rl.config.algorithms import distillation_reads
from megatron_rl.config.declarations import DISTILLATION_LOSSES
from megatron_rl.config.roles import RoleSpec
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.hybrid_engine.offload import HostCopy, Offloadable
from megatron_rl.model.families import HEAD, Model, head_cap
from megatron_rl.model.head_distillation import OtherHead
from megatron_rl.model.log_probs import VocabSoftmax
from megatron_rl.model.vocab_head import VocabHead
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.scoring_roles import compared_tokens
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
        """Raises ConfigError where a teacher's head cannot be read."""
        self.keys = rank.config.distillation.distillation_loss
        declared = DISTILLATION_LOSSES[self.keys.loss_mode]
        self._loss: Callable[..., Any] = declared.function
        self._reads = distillation_reads(rank.config)
        self.in_advantages = self.keys.use_policy_gradient
        self.task_weight = self.keys.task_loss_coef if self.keys.use_task_rewards else 0.0
        self.weight = self.keys.distillation_loss_coef if self.keys.use_task_rewards else 1.0
        self._scorer, own = scorer, scorer.head
        self.heads: list[OtherHead] = []
        self._teachers: list[RoleSpec] = []  # those of the heads
        if "teacher_hidden" in self._reads and rank.groups.is_last_stage:
            self._teachers = rank.placement.teachers
            self.heads = [teacher_head(spec, rank, own.weight.detach()) for spec in self._teachers]
            # The student's softmax over the vocabulary that it shares with this teacher.
            self._own = [
                VocabHead(own.model, replace(other.softmax, soft_cap=own.softmax.soft_cap)) for other in self.heads
            ]

    def memory(self) -> dict[str, int]:
        """Bytes of the heads that were read from teachers' folders, under the names of the memory plan."""
        return {f"{spec.name} head": storage_bytes([head.weight]) for spec, head in self._read_heads()}

    def offloadable(self) -> list[Offloadable]:
        """The heads that are offloaded during generation, as the parameters of their teachers are."""
        leaving = [head.weight for spec, head in self._read_heads() if spec.megatron.param_offload]
        return [HostCopy(lambda: leaving)] if leaving else []

    def _read_heads(self) -> list[tuple[RoleSpec, OtherHead]]:
        return [(spec, head) for spec, head in zip(self._teachers, self.heads, strict=True) if not spec.is_actor]

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


def teacher_head(spec: RoleSpec, rank: Rank, own: Tensor) -> OtherHead:
    """Return a teacher's head on a rank of the actor's last stage, with the rows of the vocabulary that `own` has.

    own: the actor's head, which a teacher that is the actor has, too, as it is when it is used. The rows of another
    teacher are read from its folder. Raises ConfigError as `HFFolder`.
    """
    settings, keys = rank.folders[spec.model_path].language_config.to_dict(), rank.config.distillation.distillation_loss
    num_tokens = compared_tokens(rank, settings["vocab_size"])
    temperature = rank.config.temperature if keys.temperature is None else keys.temperature
    softmax = VocabSoftmax(num_tokens, temperature, rank.groups.tp_group, head_cap(settings), rank.unsampled)
    if spec.is_actor:
        return OtherHead(own, softmax)
    matrix = Model.of(settings).specs[HEAD]
    (name,), shape = matrix.hf_names, matrix.tensor.segments[0].shape
    rows = torch.zeros(len(own), shape[1], dtype=getattr(torch, spec.megatron.dtype), device=own.device)
    first = rank.groups.tp_group.rank() * len(own)
    last = max(first, min(first + len(own), num_tokens))
    read_rows(Path(spec.model_path), name, (first, last), shape, rows[: last - first])
    return OtherHead(rows, softmax)


def read_rows(path: Path, name: str, part: tuple[int, int], shape: tuple[int, ...], rows: Tensor) -> None:
    """Read the rows `part` of a matrix of this shape from a model folder into `rows`."""
    HFFolder(path).copy_box(name, (part, (0, shape[1])), shape, rows)
