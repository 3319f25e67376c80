"""Log-probabilities of sampled tokens under one language model, for actor, reference and tuned policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.columns import ACTOR_SCORES
from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.cross_entropy import cross_entropy
from megatron_rl.model.decoder import Chunk
from megatron_rl.model.families import head_cap
from megatron_rl.model.log_probs import VocabSoftmax
from megatron_rl.model.vocab_head import BitwiseHead, VocabHead
from megatron_rl.records import Batch
from megatron_rl.roles.pipeline import Pipeline


class TokenScorer:
    """Log-probabilities of sampled tokens under one language model, at the sampling temperature.

    models: the chunks of this rank's stage, of which the last stage's last one has the head. settings: config.json's.
    num_tokens: the first tokens of the vocabulary, over which log-probs are normalised, but not those in `unsampled`;
    None: all. What has many numbers a token leaves the device with its micro-batch, as that of all would need much
    memory there. bitwise: its log-probs are the rollout engine's to the last bit (`model.bitwise`).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        models: list[Chunk],
        settings: Mapping[str, Any],
        temperature: float,
        num_tokens: int | None = None,
        unsampled: tuple[int, ...] = (),
        bitwise: bool = False,
    ) -> None:
        self.pipeline = pipeline
        num_tokens = settings["vocab_size"] if num_tokens is None else num_tokens
        softmax = VocabSoftmax(num_tokens, temperature, pipeline.groups.tp_group, head_cap(settings), unsampled)
        self.head = (BitwiseHead if bitwise else VocabHead)(models[-1], softmax)

    def log_probs_and_entropy(self, hidden: Tensor, block: MicroBatch) -> tuple[Tensor, Tensor]:
        """hidden [b, S / C, H] -> (log-prob [N], entropy [N]) of the block's sampled tokens, float32.

        C: context-parallel ranks, all of which must call, and get the same.
        """
        statistics = self.head.log_probs_and_entropy(block.scored(hidden), block.targets)
        if block.share is None and block.tree is None:
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
        # gradients that are scaled later. Of a tree's pairs some count several times.
        if len(self.pipeline.chunks) > 1 or hidden.dtype == torch.float16 or block.tree is not None:
            return cross_entropy(self.log_probs(hidden, block), 1)
        total = self.head.cross_entropy(block.scored(hidden), block.targets)
        return total if block.share is None else block.share.total(total)

    def score(
        self, column: str, batch: Batch, cut: MicroBatching, others: Sequence[str] = (), num_top: int = 0
    ) -> Batch | None:
        """Log-prob of every sampled token as a column of this name; on the last stage, None before.

        others: further columns, "entropy" and "sum_pi_squared" or one of them. num_top: also make `student_top_ids` of
        that many likeliest tokens; 0: do not. All ranks must call.
        """
        if not (others or num_top):
            return self.pipeline.score(column, batch, cut, self.log_probs)

        def per_token(hidden: Tensor, block: MicroBatch) -> Tensor:
            statistics = self.head.statistics(block.scored(hidden), block.targets, others)
            values = torch.stack([statistics.log_prob, *(getattr(statistics, name) for name in others)], -1)
            if num_top:
                values = torch.cat([values, _as_floats(self.head.top_k(block.scored(hidden), num_top)[0])], -1)
            values = block.whole(values)
            return values.cpu() if num_top else values

        of_tokens = self.pipeline.forward(batch.read_by(ACTOR_SCORES), cut, per_token)
        if of_tokens is None:
            return None
        names = (column, *others)
        columns = (batch.per_sampled_token(of_tokens[:, place].contiguous()) for place in range(len(names)))
        scores = Batch(**dict(zip(names, columns, strict=True)))
        if num_top:
            scores.add(student_top_ids=batch.per_sampled_token(of_tokens[:, len(names) :].int()))
        return scores

    def top_k(self, batch: Batch, cut: MicroBatching, k: int) -> tuple[Tensor, Tensor] | None:
        """(ids int32, log-probs float32), [sampled tokens, k] each, of the k likeliest tokens; on the last stage, None
        before. All ranks must call.
        """

        def per_token(hidden: Tensor, block: MicroBatch) -> Tensor:
            ids, log_probs = self.head.top_k(block.scored(hidden), k)
            return block.whole(torch.cat([_as_floats(ids), log_probs], -1)).cpu()

        both = self.pipeline.forward(batch, cut, per_token)
        return None if both is None else (both[:, :k].int(), both[:, k:].contiguous())

    def log_probs_at(self, batch: Batch, cut: MicroBatching, column: str) -> Tensor | None:
        """Log-probs float32 [sampled tokens, k] of the tokens whose ids int32 [B, (N), k] a column has; on the last
        stage, None before. All ranks must call.
        """

        def per_token(hidden: Tensor, block: MicroBatch) -> Tensor:
            ids = block.part(block.wide(column)).long()
            return block.whole(self.head.log_probs_at(block.scored(hidden), ids)).cpu()

        return self.pipeline.forward(batch, cut, per_token)

    def hidden_states(self, batch: Batch, cut: MicroBatching) -> Tensor | None:
        """What the head reads of each sampled token, [sampled tokens, H] in the model's dtype; on the last stage, None
        before. All ranks must call.
        """
        return self.pipeline.forward(batch, cut, lambda hidden, block: block.whole(block.scored(hidden)).cpu())

    def logits(self, batch: Batch, cut: MicroBatching) -> Tensor | None:
        """Float32 logits [sampled tokens, vocab_size] on the CPU, for parity checks; None before the last stage."""
        return self.pipeline.forward(
            batch, cut, lambda hidden, block: block.whole(self.head.logits(block.scored(hidden)))
        )


def _as_floats(ids: Tensor) -> Tensor:
    """Ids of tokens in float32, which has every whole number below 2^24."""
    return ids.float()
