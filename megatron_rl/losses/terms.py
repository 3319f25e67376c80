"""What the losses of the stages before PPO return, and how tokens become one number per answer.

Legend: T tokens of B answers laid end to end, `lengths` int64 [B]; n items (pairs, rankings or answers) of a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.losses.row_sums import mean_counted, sum_rows


@dataclass(frozen=True)
class ItemTerms:
    """loss: [n], with its gradient; its sum over the items of a mini-batch is divided by their number, over all ranks
    and micro-batches, which makes the gradient the same however the mini-batch is cut up. metrics: name -> [2] (sum,
    count) without gradients, to be added up over micro-batches and ranks and then divided; the same names every time.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


def sum_answers(log_probs: Tensor, counted: Tensor, lengths: Tensor) -> Tensor:
    """log_probs [T] -> their sum in each answer [B] over the tokens where `counted` [T] is 1; 0 where there is none.

    What is not counted may be anything, infinities and NaN too. Differentiable.
    """
    return sum_rows(torch.where(counted.bool(), log_probs, 0.0), lengths)


def mean_answers(log_probs: Tensor, counted: Tensor, lengths: Tensor) -> Tensor:
    """As `sum_answers`, divided by the number of tokens that count; 0 where there is none."""
    kept = counted.to(log_probs.dtype)
    return mean_counted(torch.where(counted.bool(), log_probs, 0.0), kept, lengths)


def mean_metric(values: Tensor, kept: Tensor | None = None) -> Tensor:
    """[2] (sum, count) of `values` [n], of those where `kept` [n] is 1 if it is given."""
    values = values.detach()
    if kept is None:
        return torch.stack([values.sum(), values.new_tensor(values.numel())])
    kept = kept.bool()
    return torch.stack([torch.where(kept, values, 0.0).sum(), kept.sum().to(values.dtype)])


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Of the rewards [n] of both answers: accuracy (chosen is strictly above rejected), margin, chosen, rejected."""
    return {
        "accuracy": mean_metric((chosen > rejected).to(chosen.dtype)),
        "margin": mean_metric(chosen - rejected),
        "chosen": mean_metric(chosen),
        "rejected": mean_metric(rejected),
    }
