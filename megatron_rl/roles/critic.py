"""The critic: a language model's trunk with a value head, trained with PPO's clipped value loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_rl.config.roles import RoleSpec
from megatron_rl.dispatch import Dispatch, Stop, remote_method
from megatron_rl.losses.aggregate import token_weights
from megatron_rl.losses.metrics import MetricParts
from megatron_rl.losses.value import clipped_value_loss
from megatron_rl.records import Batch
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.role import TrainedRole

if TYPE_CHECKING:
    from megatron_rl.experience.micro_batches import MicroBatch


def values_before(output: Tensor, block: MicroBatch) -> Tensor:
    """Model output [b, S, 1] -> float32 [N]: the value *before* each sampled token, where it was chosen.

    Each of C context-parallel ranks has S / C columns, and gets all values.
    """
    return block.whole(block.scored(output)[:, 0].float())


class Critic(TrainedRole):
    """Values of states, one per sampled token."""

    def __init__(self, spec: RoleSpec, rank: Rank) -> None:
        source = rank.source(spec)
        super().__init__(spec, rank, source, source.value_model(head_seed=rank.config.trainer.seed))

    @remote_method(Dispatch.DP, phase="score", balanced=True, stop=Stop.BEFORE)
    def values(self, batch: Batch) -> Batch | None:
        """`old_values`, the value before each sampled token; None before the last stage."""
        return self.trainable.pipeline.score("old_values", batch, self.score_cut, values_before)

    @remote_method(Dispatch.DP, phase="update", balanced=True, stop=Stop.NEVER_AFTER)
    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on one mini-batch, unless it is skipped; metrics (complete on the last stage)."""
        return self.compute_gradients(batch) | self.trainable.step().metrics("critic")

    def compute_gradients(self, batch: Batch) -> dict[str, float]:
        """Gradients of one mini-batch's loss over all its tokens on all ranks. Metrics on the last stage."""
        blocks = self.trainable.pipeline.micro_batches(batch, self.cut)
        totals = self.trainable.totals(blocks)

        def loss(output: Tensor, block: MicroBatch) -> tuple[Tensor, MetricParts]:
            values = values_before(output, block)
            losses, clipped = clipped_value_loss(
                values, block.fields["old_values"], block.fields["returns"], self.config.cliprange_value
            )
            lengths = block.num_sampled
            weights = token_weights(block.kept, lengths, totals, self.config.loss_agg_mode, self.loss_scale)
            total = (losses * weights).sum()
            per_token = token_weights(block.kept, lengths, totals, "token-mean", self.loss_scale)
            return total, {
                "critic/vf_loss": total.detach(),
                "critic/vf_clipfrac": (clipped * per_token).sum().detach(),
                "critic/vpred_mean": (values * per_token).sum().detach(),
            }

        return self.trainable.compute_gradients(blocks, totals, loss) or {}
