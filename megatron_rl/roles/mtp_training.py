"""Train the multi-token prediction (MTP) layer next to the policy, on the responses that the policy has sampled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.experience.micro_batches import MicroBatch
from megatron_rl.losses.aggregate import BatchTotals
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.model.decoder import angles_of, embedding_weight
from megatron_rl.model.log_probs import head_log_probs_alone
from megatron_rl.model.mtp import embedded
from megatron_rl.roles.pipeline import Loss
from megatron_rl.roles.token_scorer import TokenScorer
from megatron_rl.roles.training import TrainableModel


class MTPTraining:
    """The cross-entropy of the layer's draft tokens of the sampled tokens, at the sampling temperature, times `factor`.

    All ranks of the pool must build it. Only the layer gets gradients: see `model/mtp.py`.
    """

    def __init__(self, trainable: TrainableModel, scorer: TokenScorer, factor: float) -> None:
        self.trainable, self.scorer, self.factor = trainable, scorer, factor
        self.groups = trainable.groups

    def beside(self, loss: Loss, totals: BatchTotals) -> Loss:
        """Return the loss with the layer's added, and its metric. All ranks must call before each update.

        totals: of all blocks of the update.
        """
        embedding = self._embedding_here()  # goes with the loss

        def both(hidden: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            assert embedding is not None  # losses are computed on the last stage
            value, parts = loss(hidden, block)
            own = self._cross_entropy(hidden, block, embedding) / max(totals.tokens, 1)
            return value + self.factor * own, {**parts, "actor/mtp_loss": own.detach()}

        return both

    def _cross_entropy(self, hidden: Tensor, block: MicroBatch, embedding: Tensor) -> Tensor:
        """hidden [b, S / C, H] -> -(sum of the log-probs of the sampled tokens that count), float32.

        embedding: this TP rank's rows [v, H]. A token that is the second of its sequence has no draft. C:
        context-parallel ranks, all of which must call, and get the same.
        """
        before = block.prev_index()
        out = self._guesses(hidden.detach(), block, before, embedding)
        guesses = before[block.predicting().cpu()]
        if block.share is not None:
            guesses = block.share.here(guesses, block.input_ids.shape[1])
        numbers = (guesses >= 0).nonzero()[:, 0].to(hidden.device)  # of the tokens that are drafted here
        of_tokens = out.flatten(0, 1).index_select(0, guesses[guesses >= 0].to(hidden.device))
        head, targets = self.scorer.head, block.input_ids.flatten()[block.predicting()[numbers] + 1]
        log_probs = head_log_probs_alone(head.copied(of_tokens), head.weight.detach(), targets, head.softmax)
        total = -(log_probs * block.kept[numbers]).sum()
        return total if block.share is None else block.share.total(total)

    def _guesses(self, hidden: Tensor, block: MicroBatch, before: Tensor, embedding: Tensor) -> Tensor:
        """hidden [b, S / C, H] -> same: of each column what the head reads to draft the token after the next."""
        chunk: Any = self.trainable.models[-1]
        segments = self.trainable.pipeline.segments
        next_ids, is_first = block.input_ids.roll(-1, 1), (before < 0).view(block.input_ids.shape).to(hidden.device)
        if block.share is not None:
            next_ids, is_first = next_ids[:, block.share.columns], is_first[:, block.share.columns]
        vectors = embedded(next_ids, embedding, self.groups.tp_group)
        vectors = vectors.masked_fill(is_first.transpose(0, 1).unsqueeze(-1), 0)
        angles = angles_of(chunk, hidden.shape[1], segments)
        out: Tensor = chunk.mtp_layer(hidden.transpose(0, 1), vectors, angles, segments)
        return out.transpose(0, 1)

    @torch.no_grad()
    def _embedding_here(self) -> Tensor | None:
        """This TP rank's rows of the embedding on the last stage, which the first one sends; None on others."""
        groups, models = self.groups, self.trainable.models
        self.trainable.sync.finish()
        first: Any = models[0]
        own = embedding_weight(first).detach() if groups.is_first_stage else None
        if groups.grid.pp_size == 1:
            return own
        stages = dist.get_process_group_ranks(groups.pp_group)
        if groups.is_first_stage:
            assert own is not None
            dist.send(own, stages[-1], group=groups.pp_group)
            return None
        if not groups.is_last_stage:
            return None
        head = self.scorer.head.weight
        received = torch.empty_like(head)
        dist.recv(received, stages[0], group=groups.pp_group)
        return received
