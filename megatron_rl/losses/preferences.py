"""Losses that learn from preferences without a reward model: DPO, IPO, SimPO, ORPO of pairs; KTO of labelled answers.

Legend: n pairs, or n answers for KTO. Log-probs are those of whole answers [n], sums over their tokens or means, as the
declaration says; IPO is often given means instead, which makes its target one of tokens. The rewards in the metrics are
those that the loss implies. Gradients flow through the policy's log-probs only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.declarations import preference_loss
from megatron_rl.config.tasks import DPOConfig
from megatron_rl.losses.terms import Answers, ItemTerms, Pairs, log_sigmoid, mean_metric, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SURPRISE = 1e-6
"""ORPO's odds p / (1 - p) take log p to be at most minus this, as they are infinite at p = 1."""


@preference_loss("dpo", reads=("given",), keys=("beta", "label_smoothing"))
def dpo_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta * (log-ratio of chosen - log-ratio of rejected).

    Rafailov et al., arXiv:2305.18290, eq. 7; e, `label_smoothing` in [0, 0.5), is the share of pairs that may be
    labelled the wrong way round (Mitchell, "A note on DPO with noisy preferences", 2023). Rewards: beta * log-ratio.
    """
    better, worse = (config.beta * log_ratio for log_ratio in _log_ratios(pairs))
    ahead, noise = better - worse, config.label_smoothing
    loss = -(1 - noise) * log_sigmoid(ahead) - noise * log_sigmoid(-ahead)
    return ItemTerms(loss, pair_metrics(better, worse))


@preference_loss("ipo", reads=("given",), keys=("beta",))
def ipo_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """(log-ratio of chosen - log-ratio of rejected - 1 / (2 beta))^2.

    Azar et al., arXiv:2310.12036, eq. 17, where beta is tau. Rewards: beta * log-ratio.
    """
    better, worse = _log_ratios(pairs)
    loss = (better - worse - 1 / (2 * config.beta)).square()
    return ItemTerms(loss, pair_metrics(config.beta * better, config.beta * worse))


@preference_loss("simpo", means=True, keys=("beta", "simpo_gamma"))
def simpo_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """-log sigmoid(beta * (mean log-prob of chosen - mean log-prob of rejected) - gamma), gamma the margin to reach.

    Meng et al., arXiv:2405.14734, eq. 6. Rewards: beta * mean log-prob.
    """
    better, worse = config.beta * pairs.chosen, config.beta * pairs.rejected
    return ItemTerms(-log_sigmoid(better - worse - config.simpo_gamma), pair_metrics(better, worse))


@preference_loss("orpo", means=True, keys=("beta",))
def orpo_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """-(mean log-prob of chosen) - beta * log sigmoid(log odds of chosen - log odds of rejected).

    Hong et al., arXiv:2403.07691, eq. 6 and 7, where beta is lambda; odds(y) = p / (1 - p), log p = mean log-prob of y.
    Rewards: beta * mean log-prob. Further metrics: nll (of chosen, per token), log_odds (their difference).
    """
    log_odds = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    metrics = pair_metrics(config.beta * pairs.chosen, config.beta * pairs.rejected)
    metrics |= {"nll": mean_metric(-pairs.chosen), "log_odds": mean_metric(log_odds)}
    return ItemTerms(-pairs.chosen - config.beta * log_sigmoid(log_odds), metrics)


@preference_loss("kto", reads=("given", "labels"), alone=True, keys=("beta", "desirable_weight", "undesirable_weight"))
def kto_loss(answers: Answers, config: DPOConfig) -> ItemTerms:
    """w (1 - sigmoid(beta * (log-ratio - z))) of desirable answers, w (1 - sigmoid(beta * (z - log-ratio))) of others.

    Ethayarajh et al., arXiv:2402.01306, eq. 8; z is the baseline (`kto_baseline`). Items are answers. Rewards: beta *
    log-ratio; chosen are the desirable answers. There is no accuracy, as there are no pairs; kl is the baseline.
    """
    is_good, baseline = answers.labels.bool(), answers.baseline.detach()
    reward = config.beta * (answers.numbers - answers.given.detach())
    ahead = reward - config.beta * baseline
    signed = ahead.where(is_good, -ahead)
    good = is_good.to(reward.dtype)
    weight = config.desirable_weight * good + config.undesirable_weight * (1 - good)
    metrics = {
        "chosen": mean_metric(reward, is_good),
        "rejected": mean_metric(reward, ~is_good),
        "kl": mean_metric(baseline.expand_as(reward)),
    }
    return ItemTerms(weight * (-signed).sigmoid(), metrics)


def kto_baseline(total_log_ratio: Tensor, count: int) -> Tensor:
    """KTO's estimate of the KL between policy and reference, max(0, mean log-ratio), without its gradient; a scalar.

    total_log_ratio, count: over the whole mini-batch, all ranks and micro-batches, the sum of the log-ratios of answers
    to prompts that are not theirs, and how many.
    """
    return (total_log_ratio.detach() / max(count, 1)).clamp(min=0)


def _log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """log(p / p_reference) of chosen and rejected answers."""
    return pairs.chosen - pairs.ref_chosen.detach(), pairs.rejected - pairs.ref_rejected.detach()


def _log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p."""
    limited = log_probs.clamp(max=-LEAST_SURPRISE)
    return limited - (-limited.expm1()).log()
