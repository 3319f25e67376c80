"""The actor: the trained policy, a language model that scores tokens and learns from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.algorithms import STUDENTS_TOP, distillation_reads, policy_agg_mode, scored_columns
from megatron_rl.config.declarations import KL_ESTIMATES
from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.rollout_keys import MTPUse
from megatron_rl.dispatch import Dispatch, ExtraBatch, Stop, remote_method
from megatron_rl.errors import ConfigError
from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.hybrid_engine.delta_sizes import SENT_LAST
from megatron_rl.hybrid_engine.offload import Offloadable
from megatron_rl.losses.aggregate import BatchTotals, token_weights
from megatron_rl.losses.cross_entropy import cross_entropy
from megatron_rl.losses.kl import importance_weighted
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.losses.policy import PolicyTerms, PolicyTokens, load_policy_loss, sequence_mask
from megatron_rl.losses.rollout_correction import current_correction
from megatron_rl.records import Batch, ragged_from_lengths, row_lengths
from megatron_rl.roles.policy_followers import FollowedPolicy, SendingEnd
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.scoring_roles import num_compared
from megatron_rl.roles.transfer_address import TransferAddress, TransferStore

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.composed_weights import OwnMemory
    from megatron_rl.hybrid_engine.weight_transfer import SendAttempt, SendReport
    from megatron_rl.roles.distillation_terms import Distillation
    from megatron_rl.roles.mtp_training import MTPTraining


class Actor(FollowedPolicy):
    """The policy that is trained."""

    watches_experts = True

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        from megatron_rl.roles.distillation_terms import Distillation
        from megatron_rl.roles.mtp_training import MTPTraining
        from megatron_rl.roles.token_scorer import TokenScorer

        source = rank.source(spec)
        super().__init__(spec, rank, source, source.language_model())
        self.correction = rank.config.algorithm.rollout_correction
        self.policy_loss = load_policy_loss(self.config, self.correction)
        self.columns = scored_columns(rank.config)
        compares_top = STUDENTS_TOP in distillation_reads(rank.config)
        settings = source.hf_config.to_dict()
        num_tokens = source.folder.num_sampled_tokens(rank.config)
        self.num_top = num_compared(rank.config, num_tokens) if compares_top else 0
        model = self.trainable.pipeline, self.trainable.models, settings
        self.scorer = TokenScorer(*model, rank.config.temperature, num_tokens)
        # For given examples, which were not sampled.
        self.reader = TokenScorer(*model, temperature=1.0)
        self.routing = self.trainable.pipeline.routing
        self.distillation: Distillation | None = None
        if rank.config.distillation.enabled:
            self.distillation = Distillation(rank, self.scorer)
        self.mtp: MTPTraining | None = None
        if source.mtp == MTPUse.TRAINED:
            self.mtp = MTPTraining(self.trainable, self.scorer, self.config.mtp_loss_scaling_factor)
        # On rank 0, if the rollout has pools of its own: the weight transfer's store, and older ones that ranks may
        # still use.
        self.transfer_stores: list[TransferStore] = []
        self.sending = SendingEnd()
        self.made: Sequence[OwnMemory] = ()  # what a weight transfer sends that is made of the weights

    def memory(self) -> dict[str, int]:
        """Bytes of what is trained, of teachers' heads next to the policy's, and of the weights that were sent last."""
        heads = {} if self.distillation is None else self.distillation.memory()
        sender = self.sending.sender
        sent = {} if sender is None or not sender.kept_bytes else {SENT_LAST: sender.kept_bytes}
        return super().memory() | heads | sent

    def offloadable(self) -> list[Offloadable]:
        """Tensors that the offload keys select, and teachers' heads as their teachers' keys say."""
        heads = [] if self.distillation is None else self.distillation.offloadable()
        return [*super().offloadable(), *heads]

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
        keeps = self.config.router_replay.mode == "R2"
        if self.routing is not None:
            self.routing.begin(replays=replays, records=keeps or "routed_experts" in batch)
        scores = self.scorer.score("old_log_probs", batch, self.score_cut, self.columns, self.num_top)
        return scores if self.routing is None else self._with_choices(scores, batch, keeps)

    def _with_choices(self, scores: Batch | None, batch: Batch, keeps: bool) -> Batch | None:
        """Add the choices of the routers to the scores of a pass over a batch; all ranks must call."""
        assert self.routing is not None
        input_ids, named = batch["input_ids"], batch.get("routed_experts")
        own = self.routing.finish(row_lengths(input_ids))
        if own is None:
            return scores
        others = None if named is None else self.routing.others(own, batch)
        whole = self.routing.gathered(own) if keeps else None
        if scores is not None:
            experts = None if whole is None else ragged_from_lengths(whole, row_lengths(input_ids))
            scores.add(num_other_experts=others, routed_experts=experts)
        return scores

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
        metrics, own = self._gradients(batch, pretraining)
        scores = None if own is None else Batch(old_log_probs=batch.per_sampled_token(own))
        if self.routing is not None:
            scores = self._with_choices(scores, batch, keeps=False)
        return metrics | self.trainable.step().metrics("actor"), scores

    @remote_method(Dispatch.DP, phase="export")
    def sampled_logits(self, batch: Batch) -> Tensor | None:
        """Float32 logits [sampled tokens, vocab_size], for parity checks; None before the last stage."""
        if self.routing is not None:
            self.routing.begin(replays=False, records=False)
        return self.reader.logits(batch, self.score_cut)  # rows without a token, too

    # Weights for a rollout in another pool

    @remote_method(Dispatch.RANK_ZERO)
    def offer_transfer(self, num_receivers: int) -> TransferAddress:
        """Serve a store through which both sides connect, a new one after ranks were lost; returns its address.

        Ranks that listen at an older store stop.
        """
        for left in self.transfer_stores:
            left.close()
        self.transfer_stores.append(TransferStore(self.rank, num_receivers))
        return self.transfer_stores[-1].address

    @remote_method(Dispatch.ONE_TO_ALL)
    def join_transfer(self, address: TransferAddress) -> str:
        """Build this pool's end of the weight transfer in place of an older one; returns "", or the reason if a rank
        was lost.

        Collective over both sides, with the rollout's `join_transfer`. All training ranks return the same.
        """
        from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError

        if self.sending.sender is not None:
            self.sending.sender.close()
        broken = ""
        try:
            self._join(address)
        except BrokenTransferError as error:
            broken = str(error)
        return self._agreed(broken)

    def _join(self, address: TransferAddress) -> None:
        from megatron_rl.model.families import tensors_of
        from megatron_rl.roles.eight_bit_views import EightBitShards
        from megatron_rl.roles.flat_parameters import flat_parameters
        from megatron_rl.roles.merged_shards import MergedShards

        rollout, source = self.rank.config.actor_rollout_ref.rollout, self.source
        view = self.trained if source.lora.crosses_alone else self.base
        tensors = tensors_of(view.specs)
        if rollout.quantization is not None and view is self.base:
            shards = EightBitShards.of(self, self.rank, source.lora, rollout.quantization_block_size, None)
            self.made, (flat, tensors) = shards.made, shards.as_bytes()
        elif source.lora.is_merged:
            merged = MergedShards(self)
            self.made, flat = [merged], merged.flat(source.place, None, self.rank.node)
        else:
            flat = flat_parameters(view, self.rank.groups, source.place, None, self.rank.node)
        for made in self.made:
            made.release()
        self.connect(self.sending, address, flat, tensors, deltas=rollout.weight_deltas)
        del self.transfer_stores[:-1]

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def send_weights(self, version: int) -> SendReport:
        """Send the current weights, those after step `version`, together with the rollout's `receive_weights`."""
        return self._send(version)

    @remote_method(Dispatch.ONE_TO_ALL, phase="reshard")
    def try_send_weights(self, version: int, holding: dict[int, int] | None = None) -> SendAttempt:
        """Send the current weights; a lost rollout rank is reported, not raised, and equally on all training ranks.

        After a loss all ranks must join a new weight transfer before the next transfer.
        holding: replica -> the version that its generation must hold before; calls the ranks that listen, those with a
        second buffer, and returns when the weights have arrived on all of them. None: `try_receive_weights` calls them.
        """
        from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError, SendAttempt

        report, broken, concluded = None, "", list[Any]()
        if holding is not None and self.transfer_stores:
            self.transfer_stores[-1].call(holding)
        try:
            report = self._send(version)
            if holding is not None and self.sending.sender is not None:
                concluded = self.sending.sender.conclude()
        except BrokenTransferError as error:
            broken = str(error)
        if broken := self._agreed(broken):
            return SendAttempt(version, broken)
        return SendAttempt(version, "", report, concluded if dist.get_rank() == 0 else ())

    def _agreed(self, broken: str) -> str:
        """Join the reasons of all training ranks; with any, all leave the weight transfer, because others may wait for
        them."""
        gathered = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, broken)
        reasons = [f"training rank {number}: {reason}" for number, reason in enumerate(gathered) if reason]
        if reasons and self.sending.sender is not None:
            self.sending.sender.close()
        return "; ".join(reasons)

    def _send(self, version: int) -> SendReport:
        try:
            for made in self.made:
                made.renew()
            return self.send_over(self.sending, version)
        finally:
            for made in self.made:
                made.release()

    def compute_gradients(self, batch: Batch, pretraining: ExtraBatch[Batch] | None = None) -> dict[str, float]:
        """Gradients of one mini-batch's loss, aggregated over all its tokens on all ranks. Metrics on the last stage.

        Losses among the metrics are aggregated like the loss itself; the others are means over tokens.
        """
        metrics = self._gradients(batch, pretraining)[0]
        if self.routing is not None:
            self.routing.finish(row_lengths(batch["input_ids"]))
        return metrics

    def _gradients(self, batch: Batch, pretraining: ExtraBatch[Batch] | None) -> tuple[dict[str, float], Tensor | None]:
        """(metrics, the log-prob of every sampled token if the batch has no old ones), both on the last stage."""
        own: list[Tensor] = []
        is_own = "old_log_probs" not in batch
        if self.routing is not None:
            mode, named = self.config.router_replay.mode, "routed_experts" in batch
            # With R2 an update that computes the old log-probs itself does not replay.
            replays = named and (mode == "R3" or (mode == "R2" and not is_own))
            self.routing.begin(replays=replays, records=named and is_own, of_routed=True)
        blocks = self.trainable.pipeline.micro_batches(batch, self.cut)
        totals = self.trainable.totals(blocks)
        mixed = [] if pretraining is None else self.trainable.pipeline.micro_batches(pretraining.record, self.cut)
        mixed_totals = self.trainable.totals(mixed) if mixed else BatchTotals(0, 0)

        def own_loss(hidden: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            if "advantages" not in block.fields:
                return self._pretraining_loss(hidden, block, mixed_totals)
            return self._loss(hidden, block, totals, own)

        counted = replace(totals, tokens=totals.tokens + mixed_totals.tokens)
        loss = own_loss if self.mtp is None else self.mtp.beside(own_loss, counted)
        metrics = self.trainable.compute_gradients([*blocks, *mixed], counted, loss)
        if metrics is None:
            return {}, None
        log_probs = self.trainable.pipeline.in_row_order(own, blocks, batch) if is_own else None
        weight = {"actor/kl_coef": self.config.kl_loss_coef} if self.config.use_kl_loss else {}
        return metrics | weight, log_probs

    def _pretraining_loss(self, hidden: Tensor, block: MicroBatch, totals: BatchTotals) -> tuple[Tensor, MetricParts]:
        """(ptx.coef * cross-entropy of a block's examples, the cross-entropy as a metric)."""
        log_probs, _ = self.reader.log_probs_and_entropy(hidden, block)
        value = cross_entropy(log_probs, totals.tokens)
        return self.rank.config.ptx.coef * value, {"actor/ptx_loss": value.detach()}

    def _loss(
        self, hidden: Tensor, block: MicroBatch, totals: BatchTotals, own: list[Tensor]
    ) -> tuple[Tensor, MetricParts]:
        """(loss of a block, its parts of metrics); log-probs are appended to `own` if the block has no old ones."""
        from megatron_rl.roles.distillation_terms import DistillationTerms

        config, fields, lengths = self.config, block.fields, block.num_sampled
        log_probs, entropy = self.scorer.log_probs_and_entropy(hidden, block)
        old_log_probs = fields.get("old_log_probs")
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
            own.append(old_log_probs)
        taught = DistillationTerms(fields["advantages"])
        if self.distillation is not None:
            taught = self.distillation(hidden, block, log_probs, old_log_probs)
        terms, losses, kept = self._policy_terms(log_probs, old_log_probs, taught.advantages, block)
        weights = token_weights(block.kept, lengths, totals, config.loss_agg_mode, self.loss_scale)
        of_policy = token_weights(kept, lengths, totals, policy_agg_mode(config), self.loss_scale)
        weighted = taught.policy_weight * losses * of_policy
        parts, penalty = {"actor/pg_loss": weighted.sum()}, -config.entropy_coeff * entropy
        if taught.losses is not None:
            parts["distillation/loss"] = (taught.losses * weights).sum()
            penalty = taught.weight * taught.losses + penalty
        if config.use_kl_loss:
            kl = KL_ESTIMATES[config.kl_loss_type].function(log_probs, fields["ref_log_probs"])
            if config.kl_loss_unbiased:
                kl = importance_weighted(kl, log_probs, old_log_probs)
            parts["actor/kl_loss"] = (kl * weights).sum()
            penalty = config.kl_loss_coef * kl + penalty
        total = (weighted + penalty * weights).sum()
        per_token = token_weights(block.kept, lengths, totals, "token-mean", self.loss_scale)
        measured = {
            "actor/pg_clipfrac": terms.clipped,
            "actor/pg_clipfrac_lower": terms.clipped_lower,
            "actor/ppo_kl": terms.kl,
            "actor/entropy": entropy,
            **terms.metrics,
            **taught.metrics,
        }
        parts |= {name: (values * per_token).sum() for name, values in measured.items()}
        return total, {name: part.detach() for name, part in parts.items()}

    def _policy_terms(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, block: MicroBatch
    ) -> tuple[PolicyTerms, Tensor, Tensor]:
        """(the policy loss's terms, its losses with the rollout's weights [N], 1 where a token counts in it [N])."""
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
        if terms.loss.shape != log_probs.shape:
            raise ConfigError(
                f"{config.policy_loss.loss_mode} must return one loss per token, {list(log_probs.shape)}; it returned "
                f"{list(terms.loss.shape)}"
            )
        losses = terms.loss
        if rollout_weights is not None and not terms.is_weighted:
            losses = losses * rollout_weights
        if config.policy_loss.off_policy_mask_threshold is not None:
            mask = sequence_mask(tokens, config.policy_loss.off_policy_mask_threshold)
            losses, metrics = losses * mask, metrics | {"actor/off_policy_masked_fraction": 1 - mask}
        if "trained" in fields:
            low = {"actor/low_entropy_masked_fraction": 1 - fields["trained"]}
            losses, metrics = losses * fields["trained"], metrics | low
        return replace(terms, metrics={**terms.metrics, **metrics}), losses, kept
