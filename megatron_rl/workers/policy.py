"""The policy roles: the trained actor and the frozen reference, both language models that score tokens."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.config.schema import ActorConfig
from megatron_rl.experience.batches import MicroBatch
from megatron_rl.losses.policy import ppo_clip
from megatron_rl.model.vocab_head import VocabHead
from megatron_rl.records import ActorBatch, Sequences, TokenScores
from megatron_rl.workers.model_source import ModelSource
from megatron_rl.workers.pipeline import Pipeline
from megatron_rl.workers.training import TrainableModel


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

    def score(self, sequences: Sequences, micro_batch_size: int) -> TokenScores | None:
        """Log-prob of every response token; the record on the last stage, None before. All ranks must call."""
        return self.pipeline.score(
            sequences, micro_batch_size, lambda hidden, block: self.log_probs_and_entropy(hidden, block)[0]
        )

    def logits(self, sequences: Sequences, micro_batch_size: int) -> Tensor | None:
        """Float32 logits [response tokens, vocab_size] on the CPU, for parity checks; None before the last stage."""
        return self.pipeline.forward(
            self.pipeline.micro_batches(sequences, micro_batch_size),
            lambda hidden, block: self.head.logits(hidden[:, :-1][block.predicts_response]),
        )


class Actor:
    """The policy that is trained with PPO's clipped objective. All ranks must call every method."""

    def __init__(self, source: ModelSource, config: ActorConfig, num_run_steps: int, temperature: float) -> None:
        self.config = config
        model = source.language_model()
        self.trainable = TrainableModel(
            model.chunks, model.load, config.optim, num_run_steps, source.groups, source.device.torch_device
        )
        self.scorer = TokenScorer(
            self.trainable.pipeline, self.trainable.models, source.hf_config.vocab_size, temperature
        )

    def compute_gradients(self, batch: ActorBatch) -> dict[str, float]:
        """Gradients of one mini-batch's loss, a mean over all its tokens on all ranks. Metrics on the last stage."""
        blocks = self.trainable.pipeline.micro_batches(batch, self.config.ppo_micro_batch_size_per_gpu)
        num_tokens = self.trainable.num_tokens(blocks)

        def loss(hidden: Tensor, block: MicroBatch) -> tuple[Tensor, Tensor]:
            log_probs, entropy = self.scorer.log_probs_and_entropy(hidden, block)
            terms = ppo_clip(
                log_probs, block.fields["old_log_probs"], block.fields["advantages"], self.config.clip_ratio
            )
            total = (terms.loss - self.config.entropy_coeff * entropy).sum() / num_tokens
            sums = torch.stack([terms.loss.sum(), terms.clipped.sum(), terms.kl.sum(), entropy.sum()])
            return total, sums.detach() / num_tokens

        means = self.trainable.compute_gradients(blocks, loss)
        names = ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy")
        return {} if means is None else dict(zip(names, means.tolist(), strict=True))

    def update(self, batch: ActorBatch) -> dict[str, float]:
        """One optimizer step on one mini-batch; metrics (complete on the last stage)."""
        metrics = self.compute_gradients(batch)
        metrics["actor/grad_norm"], metrics["actor/lr"] = self.trainable.step()
        return metrics


def build_reference(source: ModelSource, temperature: float) -> TokenScorer:
    """The frozen policy that KL is measured against. All ranks must call."""
    model = source.language_model()
    model.load()
    chunks = [chunk.requires_grad_(False) for chunk in model.chunks]
    pipeline = Pipeline(chunks, source.groups, source.device.torch_device)
    return TokenScorer(pipeline, pipeline.chunks, source.hf_config.vocab_size, temperature)
