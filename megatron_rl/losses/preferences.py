"""Losses that learn from preferences without a reward model: DPO, IPO, SimPO, ORPO of pairs; KTO of labelled answers.

Legend: n pairs, or n answers for KTO. Log-probs are of whole answers [n], under the policy or the reference: sums over
their tokens (`terms.sum_answers`) or means (`terms.mean_answers`); `NEEDS` says which each is defined with. Gradients
flow through the policy's log-probs only. The rewards in the metrics are those that the loss implies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rl.losses.terms import ItemTerms, mean_metric, pair_metrics

LEAST_SURPRISE = 1e-6
"""ORPO's odds p / (1 - p) take log p to be at most minus this, as they are infinite at p = 1."""


@dataclass(frozen=True)
class Needs:
    """means: log-probs are divided by the answer's tokens, else summed. reference: the reference's are needed.
    labels: learns from labelled answers, else from pairs.
    """

    means: bool
    reference: bool
    labels: bool = False


NEEDS = {
    "dpo": Needs(means=False, reference=True),
    "ipo": Needs(means=False, reference=True),
    "simpo": Needs(means=True, reference=False),
    "orpo": Needs(means=True, reference=False),
    "kto": Needs(means=False, reference=True, labels=True),
}
"""As the papers define them; IPO is often given means instead, which makes its target one of tokens."""


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
) -> ItemTerms:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta * (log-ratio of chosen - log-ratio of rejected).

    Rafailov et al., arXiv:2305.18290, eq. 7; e, `label_smoothing` in [0, 0.5), is the share of pairs that may be
    labelled the wrong way round (Mitchell, "A note on DPO with noisy preferences", 2023). Rewards: beta * log-ratio.
    """
    better, worse = beta * (chosen - ref_chosen.detach()), beta * (rejected - ref_rejected.detach())
    ahead = better - worse
    loss = -(1 - label_smoothing) * logsigmoid(ahead) - label_smoothing * logsigmoid(-ahead)
    return ItemTerms(loss, pair_metrics(better, worse))


def ipo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> ItemTerms:
    """(log-ratio of chosen - log-ratio of rejected - 1 / (2 beta))^2.

    Azar et al., arXiv:2310.12036, eq. 17, where beta is tau. Rewards: beta * log-ratio.
    """
    better, worse = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    loss = (better - worse - 1 / (2 * beta)).square()
    return ItemTerms(loss, pair_metrics(beta * better, beta * worse))


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> ItemTerms:
    """-log sigmoid(beta * (mean log-prob of chosen - mean log-prob of rejected) - gamma), gamma the margin to reach.

    Meng et al., arXiv:2405.14734, eq. 6. Rewards: beta * mean log-prob.
    """
    better, worse = beta * chosen, beta * rejected
    return ItemTerms(-logsigmoid(better - worse - gamma), pair_metrics(better, worse))


def orpo_loss(chosen: Tensor, rejected: Tensor, beta: float) -> ItemTerms:
    """-(mean log-prob of chosen) - beta * log sigmoid(log odds of chosen - log odds of rejected).

    Hong et al., arXiv:2403.07691, eq. 6 and 7, where beta is lambda; odds(y) = p / (1 - p), log p = mean log-prob of y.
    Rewards: beta * mean log-prob. Metrics, too: nll (of chosen, per token), log_odds (their difference).
    """
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    metrics = pair_metrics(beta * chosen, beta * rejected)
    metrics |= {"nll": mean_metric(-chosen), "log_odds": mean_metric(log_odds)}
    return ItemTerms(-chosen - beta * logsigmoid(log_odds), metrics)


def _log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p."""
    limited = log_probs.clamp(max=-LEAST_SURPRISE)
    return limited - torch.log(-torch.expm1(limited))


def kto_baseline(total_log_ratio: Tensor, count: Tensor | int) -> Tensor:
    """KTO's estimate of the KL between policy and reference, max(0, mean log-ratio), without its gradient; a scalar.

    total_log_ratio, count: over the whole mini-batch, all ranks and micro-batches, the sum of the log-ratios of answers
    to prompts that are not theirs, and how many.
    """
    return (total_log_ratio.detach() / torch.as_tensor(count).clamp(min=1)).clamp(min=0)


def kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> ItemTerms:
    """w (1 - sigmoid(beta * (log-ratio - z))) of desirable answers, w (1 - sigmoid(beta * (z - log-ratio))) of others.

    Ethayarajh et al., arXiv:2402.01306, eq. 8. desirable: 1 or 0 [n]; baseline: z, see `kto_baseline`. Items are
    answers. Rewards: beta * log-ratio, chosen being the desirable ones. accuracy is left out, as there are no pairs; kl
    is the baseline.
    """
    is_good = desirable.bool()
    reward = beta * (log_probs - ref_log_probs.detach())
    ahead = reward - beta * baseline.detach()
    signed = torch.where(is_good, ahead, -ahead)
    good = is_good.to(reward.dtype)
    weight = desirable_weight * good + undesirable_weight * (1 - good)
    metrics = {
        "chosen": mean_metric(reward, is_good),
        "rejected": mean_metric(reward, ~is_good),
        "kl": mean_metric(baseline.detach().expand_as(reward)),
    }
    return ItemTerms(weight * torch.sigmoid(-signed), metrics)
