"""Log-probabilities of sampled tokens under one language model, for actor, reference and tuned policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_rl.columns import ACTOR_SCORES
from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.cross_entropy import cross_entropy
from megatron_rl.model.families import head_cap
from megatron_rl.model.log_probs import VocabSoftmax
from megatron_rl.model.vocab_head import VocabHead
from megatron_rl.records import Batch
from megatron_rl.roles.pipeline import Pipeline


class TokenScorer:
    """Log-probabilities of sampled tokens under one language model, at the sampling temperature.

    models: the chunks of this rank's stage, of which the last stage's last one has the head. settings: config.json's.
    """

    def __init__(
        self, pipeline: Pipeline, models: list[GPTModel], settings: Mapping[str, Any], temperature: float
    ) -> None:
        self.pipeline = pipeline
        softmax = VocabSoftmax(settings["vocab_size"], temperature, pipeline.groups.tp_group, head_cap(settings))
        self.head = VocabHead(models[-1], softmax)

    def log_probs_and_entropy(self, hidden: Tensor, block: MicroBatch) -> tuple[Tensor, Tensor]:
        """hidden [b, S / C, H] -> (log-prob [N], entropy [N]) of the block's sampled tokens, float32.

        C: context-parallel ranks, all of which must call, and get the same.
        """
        statistics = self.head.log_probs_and_entropy(block.scored(hidden), block.targets)
        if block.share is None:
            return statistics
        log_probs, entropy = block.whole(torch.stack(statistics, -1)).unbind(-1)
        return log_probs, entropy

    def log_probs(self, hidden: Tensor, block: MicroBatch) -> Tensor:
        """hidden [b, S / C, H] -> log-prob [N] of the block's sampled tokens, float32; C as `log_probs_and_entropy`."""
        return block.whole(self.head.log_probs(block.scored(hidden), block.targets))

    def cross_entropy(self, hidden: Tensor, block: MicroBatch) -> Tensor:
        """hidden [b, S / C, H] -> -(sum of the log-probs of the block's sampled tokens), a float32 scalar.

        C and calls are those of `log_probs_and_entropy`. Logits are computed only once where possible.
        """
        # Interleaved stages run several blocks forward before the first comes back, and float16 has no room for
        # gradients that are scaled later.
        if len(self.pipeline.chunks) > 1 or hidden.dtype == torch.float16:
            return cross_entropy(self.log_probs(hidden, block), 1)
        total = self.head.cross_entropy(block.scored(hidden), block.targets)
        return total if block.share is None else block.share.total(total)

    def score(self, column: str, batch: Batch, cut: MicroBatching, others: Sequence[str] = ()) -> Batch | None:
        """Log-prob of every sampled token as a column of this name; on the last stage, None before.

        others: further columns, "entropy" and "sum_pi_squared" or one of them. All ranks must call.
        """
        if not others:
            return self.pipeline.score(column, batch, cut, self.log_probs)

        def per_token(hidden: Tensor, block: MicroBatch) -> Tensor:
            statistics = self.head.statistics(block.scored(hidden), block.targets, others)
            values = [statistics.log_prob, *(getattr(statistics, name) for name in others)]
            return block.whole(torch.stack(values, -1))

        of_tokens = self.pipeline.forward(batch.read_by(ACTOR_SCORES), cut, per_token)
        if of_tokens is None:
            return None
        columns = (batch.per_sampled_token(values.contiguous()) for values in of_tokens.T)
        return Batch(**dict(zip((column, *others), columns, strict=True)))

    def logits(self, batch: Batch, cut: MicroBatching) -> Tensor | None:
        """Float32 logits [sampled tokens, vocab_size] on the CPU, for parity checks; None before the last stage."""
        return self.pipeline.forward(
            batch, cut, lambda hidden, block: block.whole(self.head.logits(block.scored(hidden)))
        )
