"""The policy of tasks without generation: it learns from given responses, by cross-entropy or from preferences."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config.roles import ACTOR, RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.losses.objectives import preference_objective
from megatron_rl.losses.rows import sum_rows
from megatron_rl.records import Batch
from megatron_rl.roles.policy_followers import FollowedPolicy
from megatron_rl.roles.rank import Rank


class SupervisedPolicy(FollowedPolicy):
    """A language model that learns from given responses; saved and exported as the actor."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.preference_training import PreferenceTrainer
        from megatron_rl.roles.token_scorer import TokenScorer

        source = rank.source(spec)
        super().__init__(spec, rank, source, source.language_model())
        settings = source.hf_config.to_dict()
        self.scorer = TokenScorer(self.trainable.pipeline, self.trainable.models, settings, temperature=1.0)
        objective = preference_objective(rank.config.dpo)
        self.learner = PreferenceTrainer(self.trainable, self.scorer.log_probs, objective, sum_rows)

    @remote_method(Dispatch.DP, phase="update", balanced=True, stop=Stop.NEVER_AFTER)
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on the cross-entropy of all sampled tokens, unless it is skipped; metrics (complete on
        the last stage)."""
        return self.compute_gradients(batch) | self.trainable.step().metrics(ACTOR)

    def compute_gradients(self, batch: Batch) -> dict[str, float]:
        """Gradients of the mean over the sampled tokens, on all ranks. Metrics on the last stage."""
        blocks = self.trainable.pipeline.micro_batches(batch, self.cut)
        totals = self.trainable.totals(blocks)

        def loss(hidden: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            total = self.scorer.cross_entropy(hidden, block) / max(totals.tokens, 1)
            return total, {f"{ACTOR}/loss": total.detach()}

        return self.trainable.compute_gradients(blocks, totals, loss) or {}

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_likelihoods(self, batch: Batch) -> Batch | None:
        """`scores`: the sum of the log-probs of the sampled tokens of each row; None before the last stage."""
        flat = self.trainable.pipeline.forward(batch, self.score_cut, self.scorer.log_probs)
        return None if flat is None else Batch(scores=sum_rows(flat, batch.num_sampled))

    @remote_method(Dispatch.DP, phase="update", balanced=True, stop=Stop.NEVER_AFTER)
    def update_preferences(self, batch: Batch, num_prompts: int, baseline: float = 0.0) -> dict[str, float]:
        """One optimizer step on the loss of `dpo.loss`, as the mean over the `num_prompts` of the whole batch.

        baseline: kto's. Metrics (complete on the last stage).
        """
        metrics = self.learner.compute_gradients(batch, self.cut, num_prompts, baseline, ACTOR)
        return metrics | self.trainable.step().metrics(ACTOR)

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def answer_log_probs(self, batch: Batch) -> Batch | None:
        """`answer_scores`: the sum of the tokens' log-probs of each response; None before the last stage."""
        return self.learner.scores(batch, self.score_cut)

    @remote_method(Dispatch.DP, phase="export")
    def sampled_logits(self, batch: Batch) -> torch.Tensor | None:
        """Float32 logits [sampled tokens, vocab_size], for parity checks; None before the last stage."""
        return self.scorer.logits(batch, self.score_cut)
