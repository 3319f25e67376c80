"""The actor: the policy that is trained. In a step it scores the sampled tokens, then learns from them.

This file follows a step. `log_probs` scores a batch. `update` takes each of its mini-batches: `_gradients` cuts it into
micro-batches, and each of these gets a loss. `_loss` adds up the policy loss (`_policy_terms`) and what is added to it
(`_penalty`). Weights leave for other pools by the base class, in `policy_followers.py`.

All ranks of the pool must call every remote method, each with the rows of its data-parallel rank. Legend of a
micro-batch: b rows of S tokens, N sampled tokens in all, H hidden size, C context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_rl.config.algorithms import STUDENTS_TOP, distillation_reads, policy_agg_mode, scored_columns
from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.dispatch import Dispatch, ExtraBatch, Stop, remote_method
from megatron_rl.errors import ConfigError
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.hybrid_engine.offload import Offloadable
from megatron_rl.losses.aggregate import BatchTotals, token_weights
from megatron_rl.losses.cross_entropy import cross_entropy
from megatron_rl.losses.kl import importance_weighted
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, load_policy_loss, sequence_mask
from megatron_rl.losses.rollout_correction import current_correction
from megatron_rl.records import Batch, ragged_from_lengths, row_lengths
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.scoring_roles import num_compared
from megatron_rl.roles.served_policy import ServedPolicy

if TYPE_CHECKING:
    from megatron_rl.roles.distillation_terms import Distillation, DistillationTerms
    from megatron_rl.roles.mtp_training import MTPTraining


class Actor(ServedPolicy):
    """The policy that is trained."""

    watches_experts = True

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.distillation_terms import Distillation
        from megatron_rl.roles.mtp_training import MTPTraining
        from megatron_rl.roles.token_scorer import TokenScorer

        source, config = rank.source(spec), rank.config
        bitwise = config.actor_rollout_ref.rollout.bitwise
        super().__init__(spec, rank, source, source.language_model(bitwise))
        self.correction = config.algorithm.rollout_correction
        self.policy_loss = load_policy_loss(self.config, self.correction)
        self.columns, num_tokens = scored_columns(config), source.folder.num_sampled_tokens(config)
        self.num_top = num_compared(config, num_tokens) if STUDENTS_TOP in distillation_reads(config) else 0
        model = self.trainable.pipeline, self.trainable.models, source.hf_config.to_dict()
        self.scorer = TokenScorer(*model, config.temperature, num_tokens, rank.unsampled, bitwise)
        # For given examples, which were not sampled.
        self.reader = TokenScorer(*model, temperature=1.0)
        self.client_scorer = TokenScorer(*model, 1.0, num_tokens, rank.unsampled, bitwise)
        self.routing = self.trainable.pipeline.routing
        self.distillation: Distillation | None = None
        if config.distillation.enabled:
            self.distillation = Distillation(rank, self.scorer)
        self.mtp: MTPTraining | None = None
        if source.mtp == MTPUse.TRAINED:
            self.mtp = MTPTraining(self.trainable, self.scorer, self.config.mtp_loss_scaling_factor)

    def memory(self) -> dict[str, int]:
        """Bytes of what is trained and sent, and of teachers' heads next to the policy's."""
        return super().memory() | ({} if self.distillation is None else self.distillation.memory())

    def offloadable(self) -> list[Offloadable]:
        """Tensors that the offload keys select, and teachers' heads as their teachers' keys say."""
        return super().offloadable() + ([] if self.distillation is None else self.distillation.offloadable())

    # Scoring

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs(self, batch: Batch) -> Batch | None:
        """`old_log_probs`, the log-prob of each sampled token; None before the last stage.

        Adds the columns that `scored_columns` names, and `student_top_ids` where teachers are asked about those. With
        R3 tokens go to the batch's `routed_experts`. Where it has them, `num_other_experts` says how many of these the
        routers would not have chosen; with R2 `routed_experts` are the routers' choices.
        """
        return self._scored(batch, replays=self.config.router_replay.mode == "R3")

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def log_probs_without_replay(self, batch: Batch) -> Batch | None:
        """`old_log_probs` without router replay; None before the last stage."""
        return self._scored(batch, replays=False)

    def _scored(self, batch: Batch, replays: bool) -> Batch | None:
        adds_experts = self.config.router_replay.mode == "R2"
        if self.routing is not None:
            self.routing.begin(replays=replays, records=adds_experts or "routed_experts" in batch)
        scores = self.scorer.score("old_log_probs", batch, self.score_cut, self.columns, self.num_top)
        return scores if self.routing is None else self._with_experts(scores, batch, adds_experts)

    def _with_experts(self, scores: Batch | None, batch: Batch, adds_experts: bool) -> Batch | None:
        """End a pass in which routers were watched, and add their choices to its scores; all ranks must call."""
        assert self.routing is not None
        lengths = row_lengths(batch["input_ids"])
        chosen = self.routing.finish(lengths)
        if chosen is None:
            return scores
        num_others = self.routing.others(chosen, batch) if "routed_experts" in batch else None
        of_all_layers = self.routing.gathered(chosen) if adds_experts else None
        if scores is not None:
            experts = None if of_all_layers is None else ragged_from_lengths(of_all_layers, lengths)
            scores.add(num_other_experts=num_others, routed_experts=experts)
        return scores

    @remote_method(Dispatch.DP, phase="export")
    def sampled_logits(self, batch: Batch) -> Tensor | None:
        """Float32 logits [sampled tokens, vocab_size], for parity checks; None before the last stage."""
        if self.routing is not None:
            self.routing.begin(replays=False, records=False)
        return self.reader.logits(batch, self.score_cut)  # rows without a token, too

    # Learning

    @remote_method(Dispatch.DP, phase="update", balanced=True, stop=Stop.NEVER_AFTER)
    def update(self, batch: Batch, pretraining: ExtraBatch[Batch] | None = None) -> dict[str, float]:
        """One optimizer step on one mini-batch, unless it is skipped; metrics (complete on the last stage).

        pretraining: examples whose cross-entropy, times `ptx.coef`, joins the loss.
        """
        return self.compute_gradients(batch, pretraining) | self.trainable.step().metrics("actor")

    @remote_method(Dispatch.DP, phase="update", balanced=True, stop=Stop.NEVER_AFTER)
    def update_on_policy(
        self, batch: Batch, pretraining: ExtraBatch[Batch] | None = None
    ) -> tuple[dict[str, float], Batch | None]:
        """`update` with a batch whose old log-probs are those of this pass; also returns them, as `log_probs` does."""
        metrics, log_probs = self._gradients(batch, pretraining)
        scores = None if log_probs is None else Batch(old_log_probs=batch.per_sampled_token(log_probs))
        if self.routing is not None:
            scores = self._with_experts(scores, batch, adds_experts=False)
        return metrics | self.trainable.step().metrics("actor"), scores

    def compute_gradients(self, batch: Batch, pretraining: ExtraBatch[Batch] | None = None) -> dict[str, float]:
        """Gradients of one mini-batch's loss, aggregated over all its tokens on all ranks. Metrics on the last stage.

        Losses among the metrics are aggregated like the loss itself; the others are means over tokens.
        """
        metrics, _ = self._gradients(batch, pretraining)
        if self.routing is not None:
            self.routing.finish(row_lengths(batch["input_ids"]))
        return metrics

    def _gradients(self, batch: Batch, pretraining: ExtraBatch[Batch] | None) -> tuple[dict[str, float], Tensor | None]:
        """Return metrics, and the log-prob of every sampled token if the batch has no old ones: float32 [sampled tokens
        of the batch], on the last stage. All ranks must call, and end the routers' pass then.
        """
        pipeline, has_old = self.trainable.pipeline, "old_log_probs" in batch
        self._begin_replay(has_experts="routed_experts" in batch, has_old=has_old)
        blocks = pipeline.micro_batches(batch, self.cut)
        totals = self.trainable.totals(blocks)
        examples = [] if pretraining is None else pipeline.micro_batches(pretraining.record, self.cut)
        example_totals = self.trainable.totals(examples) if examples else BatchTotals(0, 0)
        log_probs: list[Tensor] = []

        def loss_of_block(hidden: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            if "advantages" not in block.fields:
                return self._pretraining_loss(hidden, block, example_totals)
            return self._loss(hidden, block, totals, log_probs)

        all_totals = replace(totals, tokens=totals.tokens + example_totals.tokens)
        loss = loss_of_block if self.mtp is None else self.mtp.beside(loss_of_block, all_totals)
        metrics = self.trainable.compute_gradients([*blocks, *examples], all_totals, loss)
        if metrics is None:
            return {}, None
        weight = {"actor/kl_coef": self.config.kl_loss_coef} if self.config.use_kl_loss else {}
        return metrics | weight, None if has_old else pipeline.in_row_order(log_probs, blocks, batch)

    def _begin_replay(self, has_experts: bool, has_old: bool) -> None:
        """Let the routers of an update replay the batch's `routed_experts`, or record their own choices, or neither."""
        if self.routing is not None:
            mode = self.config.router_replay.mode
            # With R2 an update that computes the old log-probs itself does not replay.
            replays = has_experts and (mode == "R3" or (mode == "R2" and has_old))
            self.routing.begin(replays=replays, records=has_experts and not has_old, of_routed=True)

    def _pretraining_loss(self, hidden: Tensor, block: MicroBatch, totals: BatchTotals) -> tuple[Tensor, MetricParts]:
        """Return ptx.coef * cross-entropy of a block's examples, and the cross-entropy as a metric.

        hidden: [b, S / C, H]. All TP and all C context-parallel ranks of the last stage must call.
        """
        log_probs, _ = self.reader.log_probs_and_entropy(hidden, block)
        value = cross_entropy(log_probs, totals.tokens)
        return self.rank.config.ptx.coef * value, {"actor/ptx_loss": value.detach()}

    def _loss(
        self, hidden: Tensor, block: MicroBatch, totals: BatchTotals, computed: list[Tensor]
    ) -> tuple[Tensor, MetricParts]:
        """Return the loss of a block, a scalar, and its parts of metrics.

        hidden: [b, S / C, H]. All TP and all C context-parallel ranks of the last stage must call. Where the block has
        no old log-probs, this pass's [N] are appended to `computed`.
        """
        from megatron_rl.roles.distillation_terms import DistillationTerms

        fields, lengths, scale = block.fields, block.num_sampled, self.loss_scale
        log_probs, entropy = self.scorer.log_probs_and_entropy(hidden, block)
        old_log_probs = fields.get("old_log_probs")
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
            computed.append(old_log_probs)
        distilled = DistillationTerms(fields["advantages"])
        if self.distillation is not None:
            distilled = self.distillation(hidden, block, log_probs, old_log_probs)
        terms, losses, kept = self._policy_terms(log_probs, old_log_probs, distilled.advantages, block)
        policy_weights = token_weights(kept, lengths, totals, policy_agg_mode(self.config), scale)
        policy_losses = distilled.policy_weight * losses * policy_weights
        weights = token_weights(block.kept, lengths, totals, self.config.loss_agg_mode, scale)
        penalty, added = self._penalty(log_probs, old_log_probs, entropy, distilled, block)
        total = (policy_losses + penalty * weights).sum()
        parts = {"actor/pg_loss": policy_losses.sum()}
        parts |= {name: (values * weights).sum() for name, values in added.items()}
        means = token_weights(block.kept, lengths, totals, "token-mean", scale)
        measured = {
            "actor/pg_clipfrac": terms.clipped,
            "actor/pg_clipfrac_lower": terms.clipped_lower,
            "actor/ppo_kl": terms.kl,
            "actor/entropy": entropy,
            **terms.metrics,
            **distilled.metrics,
        }
        parts |= {name: (values * means).sum() for name, values in measured.items()}
        return total, {name: part.detach() for name, part in parts.items()}

    def _penalty(
        self, log_probs: Tensor, old_log_probs: Tensor, entropy: Tensor, distilled: DistillationTerms, block: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what each token adds to its policy loss [N], and the losses in it that are metrics, by name [N]:
        minus the entropy, the distillation loss, and the KL divergence from the reference, each with its coefficient.
        """
        config, metrics = self.config, dict[str, Tensor]()
        penalty = -config.entropy_coeff * entropy
        if distilled.losses is not None:
            metrics["distillation/loss"] = distilled.losses
            penalty = distilled.weight * distilled.losses + penalty
        if config.use_kl_loss:
            kl = KL_ESTIMATES[config.kl_loss_type].function(log_probs, block.fields["ref_log_probs"])
            if config.kl_loss_unbiased:
                kl = importance_weighted(kl, log_probs, old_log_probs)
            metrics["actor/kl_loss"] = kl
            penalty = config.kl_loss_coef * kl + penalty
        return penalty, metrics

    def _policy_terms(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, block: MicroBatch
    ) -> tuple[PolicyTerms, Tensor, Tensor]:
        """Return the policy loss's terms, its losses with the rollout's weights and with masks [N], and where a token
        counts in it, 1 or 0 [N]. Raises ConfigError where the user's loss returns another shape than [N].
        """
        config, correction, fields, lengths = self.config, self.correction, block.fields, block.num_sampled
        kept, rollout_weights = block.kept, fields.get("rollout_weights")
        metrics: dict[str, Tensor] = {}
        if correction.bypass_mode:
            weights, accepted, metrics = current_correction(log_probs, old_log_probs, lengths, correction)
            # The ratio of any other loss is already taken to the rollout.
            rollout_weights = weights if correction.loss_type == "reinforce" else None
            kept = kept * accepted
        tokens = PolicyTokens(log_probs, old_log_probs, advantages, lengths, kept, rollout_weights)
        terms = self.policy_loss(tokens, config)
        losses = terms.loss
        if losses.shape != log_probs.shape:
            raise ConfigError(
                f"{config.policy_loss.loss_mode} must return one loss per token, {list(log_probs.shape)}; it returned "
                f"{list(losses.shape)}"
            )
        if rollout_weights is not None and not terms.is_weighted:
            losses = losses * rollout_weights
        if config.policy_loss.off_policy_mask_threshold is not None:
            mask = sequence_mask(tokens, config.policy_loss.off_policy_mask_threshold)
            losses, metrics = losses * mask, metrics | {"actor/off_policy_masked_fraction": 1 - mask}
        if "trained" in fields:
            masked = {"actor/low_entropy_masked_fraction": 1 - fields["trained"]}
            losses, metrics = losses * fields["trained"], metrics | masked
        return replace(terms, metrics={**terms.metrics, **metrics}), losses, kept
