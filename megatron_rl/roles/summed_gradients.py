"""Gradients that several passes add up before one step, on behalf of a client of the service.

A pass leaves its sums in this rank's buffers. The step reduces them once over all ranks, and updates with Adam's
parameters of that step alone: the schedule of the run's configuration does not count.

All ranks of the pool must call every method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.losses.policy import PolicyTokens
from megatron_rl.losses.summed import SummedLoss
from megatron_rl.records import Batch
from megatron_rl.roles.token_scorer import TokenScorer
from megatron_rl.roles.training import TrainableModel, Update

LOSS_SUM = "loss:sum"


@dataclass(frozen=True)
class AdamStep:
    """Adam's parameters in one step. grad_clip_norm: 0: gradients are not clipped. Weight decay is decoupled, and
    leaves out what Megatron leaves out: norms and biases."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SummedGradients:
    """The sums in the buffers of one trainable model. They begin at 0, and do so again after every step."""

    def __init__(self, trainable: TrainableModel, scorer: TokenScorer, cut: MicroBatching) -> None:
        """scorer: at temperature 1. cut: how rows become micro-batches."""
        self.trainable, self._scorer, self._cut = trainable, scorer, cut
        self._reduction: tuple[tuple[Any, ...], dict[str, Any]] = (trainable.chunks,), {}
        trainable.clear_gradients()

    def add(
        self, batch: Batch, loss: SummedLoss, settings: Mapping[str, float]
    ) -> tuple[dict[str, float], Batch | None]:
        """Add the gradients of a loss over all sampled tokens of all ranks.

        batch: with `advantages` (or weights) and, where the loss reads them, `old_log_probs` and `kept`. Returns the
        sum of the loss, and `old_log_probs`: the log-prob of every sampled token in this pass; nothing before the last
        stage.
        """
        trainable = self.trainable
        if (routing := trainable.pipeline.routing) is not None:
            routing.begin(replays=False, records=False)
        blocks = trainable.pipeline.micro_batches(batch, self._cut)
        totals, computed = trainable.totals(blocks), list[Tensor]()

        def loss_of_block(hidden: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            log_probs, fields = self._scorer.log_probs(hidden, block), block.fields
            computed.append(log_probs.detach())
            given = fields.get("old_log_probs", log_probs.detach())
            tokens = PolicyTokens(log_probs, given, fields["advantages"], block.num_sampled, fields.get("kept"))
            total = loss.function(tokens, settings).sum()
            return total, {LOSS_SUM: total.detach()}

        with self._deferred():
            metrics = trainable.add_gradients(blocks, totals, loss_of_block)
        if metrics is None:
            return {}, None
        log_probs = trainable.pipeline.in_row_order(computed, blocks, batch)
        return metrics, Batch(old_log_probs=batch.per_sampled_token(log_probs))

    def step(self, adam: AdamStep) -> Update:
        """Reduce the sums over all ranks, update, and begin again at 0. Sums that are not finite update nothing."""
        args, options = self._reduction
        finalize_model_grads(*args, **options)
        for part in self.trainable.optimizer.chained_optimizers:
            part.config.clip_grad = adam.grad_clip_norm
        for group in self.trainable.optimizer.param_groups:
            group["lr"] = adam.learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = adam.weight_decay * group.get("wd_mult", 1.0)
            group["betas"], group["eps"] = (adam.beta1, adam.beta2), adam.eps
        update = self.trainable.step()
        self.trainable.clear_gradients()
        return update

    @contextmanager
    def _deferred(self) -> Iterator[None]:
        """Keep what Megatron would reduce with at the end of a pass, instead of reducing."""
        config = self.trainable.config

        def keep(*args: Any, **options: Any) -> None:
            self._reduction = args, options

        config.finalize_model_grads_func = keep
        try:
            yield
        finally:
            config.finalize_model_grads_func = finalize_model_grads
