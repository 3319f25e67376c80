"""The language model's head, applied to the tokens that are scored and to no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_rl.model.bitwise import TILE, linear, replaced
from megatron_rl.model.decoder import Chunk, head_weight
from megatron_rl.model.head_distillation import (
    Divergence,
    OtherHead,
    head_divergence,
    head_log_probs_at,
    head_top_k,
)
from megatron_rl.model.log_probs import (
    Combined,
    VocabSoftmax,
    head_cross_entropy,
    head_log_probs,
    head_log_probs_alone,
    head_statistics,
)
from megatron_rl.model.soft_cap import capped


def pass_hidden_states(output_layer: ColumnParallelLinear, tp_group: dist.ProcessGroup) -> None:
    """Let Megatron's output layer return its input, whole: [S, B, H] on every TP rank.

    The layer keeps its weight, which import, export, checkpoints and tied embeddings look for there.
    """

    def forward(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if output_layer.sequence_parallel:
            # The gradient that comes back is already the sum over TP ranks.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp_group)
        return hidden, None

    output_layer.forward = forward


class VocabHead:
    """The head of a rank's last chunk, with the distribution that tokens are scored under."""

    def __init__(self, model: Chunk, softmax: VocabSoftmax) -> None:
        self.model, self.softmax = model, softmax

    @property
    def weight(self) -> Tensor:
        """This rank's rows [v, H]; with tied embeddings they are the embedding's."""
        return head_weight(self.model)

    def log_probs_and_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [N, H], targets int64 [N] -> (log-prob [N], entropy [N]), float32. All TP ranks must call.

        Backward adds up the gradients that go through each rank's rows.
        """
        return head_log_probs(self.copied(hidden), self.weight, targets, self.softmax)

    def log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The log-probs of `log_probs_and_entropy`, without the cost of the entropy."""
        return head_log_probs_alone(self.copied(hidden), self.weight, targets, self.softmax)

    def cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [N, H], targets int64 [N] -> -(sum of the log-probs), float32. All TP ranks must call.

        Backward must come before the next forward pass: see `log_probs.HeadCrossEntropy`.
        """
        return head_cross_entropy(self.copied(hidden), self.weight, targets, self.softmax)

    def statistics(self, hidden: Tensor, targets: Tensor, columns: Sequence[str]) -> Combined:
        """hidden [N, H], targets int64 [N] -> log-prob and `columns` (see `head_statistics`), float32 [N] each, without
        gradients. All TP ranks must call.
        """
        return head_statistics(hidden, self.weight, targets, self.softmax, columns)

    def top_k(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """hidden [N, H] -> (ids int64, log-probs float32), [N, k] each, without gradients. All TP ranks must call."""
        return head_top_k(hidden, self.weight, k, self.softmax)

    def log_probs_at(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [N, H], ids int64 [N, k] -> their log-probs float32 [N, k]. All TP ranks must call."""
        return head_log_probs_at(self.copied(hidden), self.weight, ids, self.softmax)

    def divergence(self, hidden: Tensor, other_hidden: Tensor, other: OtherHead, kind: Divergence) -> Tensor:
        """hidden [N, H], the other head's [N, H'] -> float32 [N]; see `head_divergence`. All TP ranks must call."""
        return head_divergence(self.copied(hidden), self.weight, self.softmax, other_hidden, other, kind)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> float32 [N, vocab_size], before the temperature. All TP ranks must call."""
        group = self.softmax.tp_group
        mine = capped(torch.mm(hidden, self.weight.t()).float(), self.softmax.soft_cap)
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(shards, mine, group=group)
        return torch.cat(shards, -1)[:, : self.softmax.vocab_size]

    def copied(self, hidden: Tensor) -> Tensor:
        """Megatron's copy into the TP region, whose backward adds up the ranks' gradients."""
        copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group=self.softmax.tp_group)
        return copied


class BitwiseHead(VocabHead):
    """A head whose log-probs are the rollout engine's, to the last bit: see `bitwise`. Gradients are `VocabHead`'s."""

    def log_probs_and_entropy(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `VocabHead`."""
        log_probs, entropy = super().log_probs_and_entropy(hidden, targets)
        return replaced(log_probs, lambda: self._exact(hidden, targets)), entropy

    def log_probs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """See `VocabHead`."""
        return replaced(super().log_probs(hidden, targets), lambda: self._exact(hidden, targets))

    def statistics(self, hidden: Tensor, targets: Tensor, columns: Sequence[str]) -> Combined:
        """See `VocabHead`."""
        return replace(super().statistics(hidden, targets, columns), log_prob=self._exact(hidden, targets))

    @torch.no_grad()
    def _exact(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [N, H], targets int64 [N] -> log-probs float32 [N]. All TP ranks must call."""
        return torch.cat([self._of_tile(*tile) for tile in zip(hidden.split(TILE), targets.split(TILE), strict=True)])

    def _of_tile(self, hidden: Tensor, targets: Tensor) -> Tensor:
        group, mine = self.softmax.tp_group, linear(hidden, self.weight)
        shards = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(shards, mine, group=group)
        logits = torch.cat(shards, -1)[:, : self.softmax.vocab_size]
        logits[:, list(self.softmax.unsampled)] = -torch.inf
        scaled = logits if self.softmax.temperature == 1.0 else logits / torch.tensor(self.softmax.temperature)
        return scaled.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
