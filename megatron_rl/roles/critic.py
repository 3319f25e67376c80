"""The critic: a language model's trunk with a value head, trained with PPO's clipped value loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config.schema import CriticConfig
from megatron_rl.experience.micro_batches import MicroBatch, MicroBatching
from megatron_rl.losses.aggregate import token_weights
from megatron_rl.losses.value import clipped_value_loss
from megatron_rl.records import CriticBatch, Sequences, TokenScores
from megatron_rl.roles.model_source import ModelSource
from megatron_rl.roles.training import TrainableModel


def response_values(output: Tensor, block: MicroBatch) -> Tensor:
    """Model output [b, S, 1] -> float32 [N]: the value *before* each response token, where it was chosen."""
    return output[:, :-1, 0][block.predicts_response].float()


class Critic:
    """Values of states, one per response token. All ranks must call every method."""

    def __init__(
        self,
        source: ModelSource,
        config: CriticConfig,
        cut: MicroBatching,
        num_run_steps: int,
        head_seed: int,
        loss_scale: int,
    ) -> None:
        """`loss_scale`: what `loss_agg_mode=seq-mean-token-sum-norm` divides by. `cut`: of updates."""
        self.config = config
        self.cut = cut
        self.loss_scale = loss_scale
        model = source.value_model(head_seed)
        self.trainable = TrainableModel(
            model.chunks, model.load, config.optim, num_run_steps, source.groups, source.device.torch_device
        )

    def score(self, sequences: Sequences, cut: MicroBatching) -> TokenScores | None:
        """Value of every response position; the record on the last stage, None before."""
        return self.trainable.pipeline.score(sequences, cut, response_values)

    def compute_gradients(self, batch: CriticBatch) -> dict[str, float]:
        """Gradients of one mini-batch's loss over all its tokens on all ranks. Metrics on the last stage."""
        blocks = self.trainable.pipeline.micro_batches(batch, self.cut)
        totals = self.trainable.totals(blocks)

        def loss(output: Tensor, block: MicroBatch) -> tuple[Tensor, Tensor]:
            values = response_values(output, block)
            losses, clipped = clipped_value_loss(
                values, block.fields["old_values"], block.fields["returns"], self.config.cliprange_value
            )
            lengths = block.response_lengths
            weights = token_weights(block.kept, lengths, totals, self.config.loss_agg_mode, self.loss_scale)
            total = (losses * weights).sum()
            per_token = token_weights(block.kept, lengths, totals, "token-mean", self.loss_scale)
            sums = [total, (clipped * per_token).sum(), (values * per_token).sum()]
            return total, torch.stack(sums).detach()

        means = self.trainable.compute_gradients(blocks, totals, loss)
        names = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")
        return {} if means is None else dict(zip(names, means.tolist(), strict=True))

    def update(self, batch: CriticBatch) -> dict[str, float]:
        """One optimizer step on one mini-batch, unless it is skipped; metrics (complete on the last stage)."""
        return self.compute_gradients(batch) | self.trainable.step().metrics("critic")
