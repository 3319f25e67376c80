"""The policy roles: the trained actor and the frozen reference, both language models that score tokens."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.config.schema import ActorConfig
from megatron_rl.errors import ConfigError
from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.aggregate import BatchTotals, token_weights
from megatron_rl.losses.kl import KL_ESTIMATORS
from megatron_rl.losses.policy import PolicyTokens
from megatron_rl.losses.registry import policy_loss
from megatron_rl.model.vocab_head import VocabHead
from megatron_rl.records import ActorBatch, Sequences, TokenScores
from megatron_rl.roles.model_source import ModelSource
from megatron_rl.roles.pipeline import Pipeline
from megatron_rl.roles.training import TrainableModel


class TokenScorer:
    """Log-probabilities of response tokens under one language model, at the sampling temperature.

    models: the chunks of this rank's stage, of which the last stage's last one has the head.
    """

    def __init__(self, pipeline: Pipeline, models: list[GPTModel], vocab_size: int, temperature: float) -> None:
        self.pipeline = pipeline
        self.head = VocabHead(models[-1], vocab_size, temperature, pipeline.groups.tp_group)

    def log_probs_and_entropy(self, hidden: Tensor, block: MicroBatch) -> tuple[Tensor, Tensor]:
        """hidden [b, S, H] -> (log-prob [N], entropy [N]) of the block's response tokens, float32."""
        return self.head.log_probs_and_entropy(hidden[:, :-1][block.predicts_response], block.targets)

    def score(self, sequences: Sequences, cut: MicroBatching) -> TokenScores | None:
        """Log-prob of every response token; the record on the last stage, None before. All ranks must call."""
        return self.pipeline.score(sequences, cut, lambda hidden, block: self.log_probs_and_entropy(hidden, block)[0])

    def logits(self, sequences: Sequences, cut: MicroBatching) -> Tensor | None:
        """Float32 logits [response tokens, vocab_size] on the CPU, for parity checks; None before the last stage."""
        return self.pipeline.forward(
            self.pipeline.micro_batches(sequences, cut),
            lambda hidden, block: self.head.logits(hidden[:, :-1][block.predicts_response]),
        )


class Actor:
    """The policy that is trained. All ranks must call every method."""

    def __init__(
        self,
        source: ModelSource,
        config: ActorConfig,
        cut: MicroBatching,
        num_run_steps: int,
        temperature: float,
        loss_scale: int,
    ) -> None:
        """`loss_scale`: what `loss_agg_mode=seq-mean-token-sum-norm` divides by. `cut`: of updates."""
        self.config = config
        self.cut = cut
        self.loss_scale = loss_scale
        self.policy_loss = policy_loss(config)
        model = source.language_model()
        self.trainable = TrainableModel(
            model.chunks, model.load, config.optim, num_run_steps, source.groups, source.device.torch_device
        )
        self.scorer = TokenScorer(
            self.trainable.pipeline, self.trainable.models, source.hf_config.vocab_size, temperature
        )

    def compute_gradients(self, batch: ActorBatch) -> dict[str, float]:
        """Gradients of one mini-batch's loss, aggregated over all its tokens on all ranks. Metrics on the last stage.

        Losses among the metrics are aggregated like the loss itself; the others are means over tokens.
        """
        blocks = self.trainable.pipeline.micro_batches(batch, self.cut)
        totals = self.trainable.totals(blocks)
        means = self.trainable.compute_gradients(
            blocks, totals, lambda hidden, block: self._loss(hidden, block, totals)
        )
        if means is None:
            return {}
        names = ("pg_loss", "kl_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy")
        metrics = {f"actor/{name}": mean for name, mean in zip(names, means.tolist(), strict=True)}
        if self.config.use_kl_loss:
            return metrics | {"actor/kl_coef": self.config.kl_loss_coef}
        del metrics["actor/kl_loss"]
        return metrics

    def _loss(self, hidden: Tensor, block: MicroBatch, totals: BatchTotals) -> tuple[Tensor, Tensor]:
        config, fields, lengths = self.config, block.fields, block.response_lengths
        log_probs, entropy = self.scorer.log_probs_and_entropy(hidden, block)
        tokens = PolicyTokens(log_probs, fields["old_log_probs"], fields["advantages"], lengths)
        terms = self.policy_loss(tokens, config)
        if terms.loss.shape != log_probs.shape:
            raise ConfigError(
                f"{config.policy_loss.loss_mode} must return one loss per token, {list(log_probs.shape)}; it returned "
                f"{list(terms.loss.shape)}"
            )
        losses = terms.loss * fields["rollout_weights"] if "rollout_weights" in fields else terms.loss
        kl = torch.zeros_like(losses)
        if config.use_kl_loss:
            kl = KL_ESTIMATORS[config.kl_loss_type](log_probs, fields["ref_log_probs"])

        weights = token_weights(block.kept, lengths, totals, config.loss_agg_mode, self.loss_scale)
        total = ((losses + config.kl_loss_coef * kl - config.entropy_coeff * entropy) * weights).sum()
        per_token = token_weights(block.kept, lengths, totals, "token-mean", self.loss_scale)
        measured = torch.stack([terms.clipped, terms.clipped_lower, terms.kl, entropy])
        sums = [(losses * weights).sum()[None], (kl * weights).sum()[None], (measured * per_token).sum(1)]
        return total, torch.cat(sums).detach()

    def update(self, batch: ActorBatch) -> dict[str, float]:
        """One optimizer step on one mini-batch, unless it is skipped; metrics (complete on the last stage)."""
        return self.compute_gradients(batch) | self.trainable.step().metrics("actor")


def build_reference(source: ModelSource, temperature: float) -> TokenScorer:
    """The frozen policy that KL is measured against. All ranks must call."""
    model = source.language_model()
    model.load()
    chunks = [chunk.requires_grad_(False) for chunk in model.chunks]
    pipeline = Pipeline(chunks, source.groups, source.device.torch_device)
    return TokenScorer(pipeline, pipeline.chunks, source.hf_config.vocab_size, temperature)
