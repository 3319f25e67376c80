"""Arguments and results of the losses of `reward` and `dpo`, and how tokens become one number per response.

Legend: T tokens of B responses packed end to end, `lengths` int64 [B]; n items (pairs, rankings or responses) of a
loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """n prompts with N responses in all, packed end to end, the best of each prompt first.

    numbers [N]: with their gradient; scores of a reward model, or log-probs of responses under the policy. given [N]:
    for a reward model the margin to the next response or the score to give; for the policy the reference's log-probs.
    labels [N]: 1 for a desirable response (kto). sizes: int64 [n], responses of each prompt. baseline: a scalar of kto.
    lengths: int64 [N], the tokens whose log-probs `numbers` adds up.
    """

    numbers: Tensor
    given: Tensor
    labels: Tensor
    sizes: Tensor
    baseline: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Pairs:
    """Log-probs of a better and a worse response under policy and reference, each [n]; gradients flow through the
    policy's."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor


@dataclass(frozen=True)
class ItemTerms:
    """loss: [n], with its gradient; its sum over the items of a mini-batch is divided by their number, over all ranks
    and micro-batches, which makes the gradient the same however the mini-batch is cut up. metrics: name -> [2] (sum,
    count) without gradients, to be added up over micro-batches and ranks and then divided; the same names every time.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


def log_sigmoid(values: Tensor) -> Tensor:
    """log(1 / (1 + e^-x)) of each value, any shape; finite for large negative ones."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)


def mean_metric(values: Tensor, kept: Tensor | None = None) -> Tensor:
    """[2] (sum, count) of `values` [n]; with `kept` [n], of those where it is 1."""
    import torch

    values = values.detach()
    if kept is None:
        return torch.stack([values.sum(), values.new_tensor(values.numel())])
    kept = kept.bool()
    return torch.stack([values.where(kept, 0.0).sum(), kept.sum().to(values.dtype)])


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Metrics of the rewards [n] of both responses: accuracy (chosen is strictly larger), margin, chosen, rejected."""
    return {
        "accuracy": mean_metric((chosen > rejected).to(chosen.dtype)),
        "margin": mean_metric(chosen - rejected),
        "chosen": mean_metric(chosen),
        "rejected": mean_metric(rejected),
    }
