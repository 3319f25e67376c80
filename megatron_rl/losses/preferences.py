"""Losses that learn from preferences without a reward model, of pairs of responses; KTO of labelled responses.

Legend: n pairs, or n responses for KTO; u = p / p_reference of a response, log u its log-ratio. Log-probs are those of
whole responses [n], sums over their tokens or means, as the declaration says; IPO is often given means instead, which
makes its target one of tokens. The rewards in the metrics are those that the loss implies. Gradients flow through the
policy's log-probs only.

Losses that declare `f_divergence_type` compare the two responses by f'(u), of which only the difference matters: the
reward that is best answered by a policy held to the reference by the f-divergence (Wang et al., arXiv:2309.16240).
f' is shifted to be 0 at u = 1. reverse_kl: log u, which is DPO's own; forward_kl: 1 - 1 / u; js_divergence:
log(2 u / (1 + u)); alpha_divergence: (1 - u^-a) / a, a = `f_alpha_divergence_coef`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_rl.config.declarations import preference_loss
from megatron_rl.config.tasks import DPOConfig
from megatron_rl.losses.terms import Answers, ItemTerms, Pairs, log_sigmoid, mean_metric, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SURPRISE = 1e-6
"""ORPO's odds p / (1 - p) take log p to be at most minus this, as they are infinite at p = 1."""
LARGEST_EXPONENT = 40.0
"""Powers of u take log u to be at least minus this, over the coefficient: their squares stay finite in float32. A
response beyond it has no gradient."""
F_KEYS = ("f_divergence_type", "f_alpha_divergence_coef")


@preference_loss("dpo", reads=("given",), keys=("beta", "label_smoothing", *F_KEYS))
def dpo_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta * (log-ratio of chosen - log-ratio of rejected).

    Rafailov et al., arXiv:2305.18290, eq. 7; e, `label_smoothing` in [0, 0.5), is the share of pairs that may be
    labelled the wrong way round (Mitchell, "A note on DPO with noisy preferences", 2023). Rewards: beta * log-ratio.
    """
    better, worse = _scaled(config, *_compared(pairs, config))
    ahead, noise = better - worse, config.label_smoothing
    loss = -(1 - noise) * log_sigmoid(ahead) - noise * log_sigmoid(-ahead)
    return ItemTerms(loss, pair_metrics(better, worse))


@preference_loss("robust", reads=("given",), keys=("beta", "label_smoothing", *F_KEYS))
def robust_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """(-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e), h as for dpo, e < 0.5.

    Ray Chowdhury et al., arXiv:2403.00409: where a share e of the pairs is labelled the wrong way round, its
    mean is that of dpo on the right labels, which `label_smoothing` of dpo is not. Rewards: beta * log-ratio.
    """
    better, worse = _scaled(config, *_compared(pairs, config))
    ahead, noise = better - worse, config.label_smoothing
    loss = (-(1 - noise) * log_sigmoid(ahead) + noise * log_sigmoid(-ahead)) / (1 - 2 * noise)
    return ItemTerms(loss, pair_metrics(better, worse))


@preference_loss("hinge", reads=("given",), keys=("beta", *F_KEYS))
def hinge_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """max(0, 1 - h), h as for dpo: 1 / beta is the margin between the log-ratios that is aimed at.

    Liu et al. (RSO), arXiv:2309.06657, after Zhao et al. (SLiC-HF), arXiv:2305.10425. Rewards: beta *
    log-ratio.
    """
    better, worse = _scaled(config, *_compared(pairs, config))
    return ItemTerms((1 - (better - worse)).relu(), pair_metrics(better, worse))


@preference_loss("ipo", reads=("given",), keys=("beta", *F_KEYS))
def ipo_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """(log-ratio of chosen - log-ratio of rejected - 1 / (2 beta))^2.

    Azar et al., arXiv:2310.12036, eq. 17, where beta is tau. Rewards: beta * log-ratio.
    """
    better, worse = _compared(pairs, config)
    loss = (better - worse - 1 / (2 * config.beta)).square()
    return ItemTerms(loss, pair_metrics(*_scaled(config, better, worse)))


@preference_loss("apo_zero", reads=("given",), keys=("beta",))
def apo_zero_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """(1 - sigmoid(r of chosen)) + sigmoid(r of rejected), r = beta * log-ratio: one up, the other down.

    D'Oosterlinck et al., arXiv:2408.06266, plus 1: for chosen responses that are better than the policy's own.
    Rewards: r.
    """
    better, worse = _scaled(config, *_log_ratios(pairs))
    return ItemTerms((-better).sigmoid() + worse.sigmoid(), pair_metrics(better, worse))


@preference_loss("apo_down", reads=("given",), keys=("beta",))
def apo_down_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """sigmoid(r of chosen) + (1 - sigmoid(r of chosen - r of rejected)), r = beta * log-ratio: both down.

    D'Oosterlinck et al., arXiv:2408.06266, plus 1: for chosen responses that are worse than the policy's own.
    Rewards: r.
    """
    better, worse = _scaled(config, *_log_ratios(pairs))
    return ItemTerms(better.sigmoid() + (worse - better).sigmoid(), pair_metrics(better, worse))


@preference_loss("sppo_hard", reads=("given",), keys=("beta",))
def sppo_hard_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """(log-ratio of chosen - 1 / (2 beta))^2 + (log-ratio of rejected + 1 / (2 beta))^2.

    Wu et al., arXiv:2405.00675, where chosen responses always win and others never; 1 / beta is eta. Rewards:
    beta * log-ratio, aimed at 1/2 and -1/2.
    """
    better, worse = _log_ratios(pairs)
    goal = 1 / (2 * config.beta)
    loss = (better - goal).square() + (worse + goal).square()
    return ItemTerms(loss, pair_metrics(*_scaled(config, better, worse)))


@preference_loss("nca_pair", reads=("given",), keys=("beta",))
def nca_pair_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """-log sigmoid(r of chosen) - (log sigmoid(-r of chosen) + log sigmoid(-r of rejected)) / 2, r = beta * log-ratio.

    Chen et al., arXiv:2402.05369, of two responses, one with all the reward. Rewards: r.
    """
    better, worse = _scaled(config, *_log_ratios(pairs))
    loss = -log_sigmoid(better) - 0.5 * (log_sigmoid(-better) + log_sigmoid(-worse))
    return ItemTerms(loss, pair_metrics(better, worse))


@preference_loss("sft", means=True)
def chosen_likelihood_loss(pairs: Pairs, config: DPOConfig) -> ItemTerms:
    """-(mean log-prob of chosen), which keeps the chosen responses likely next to another loss.

    Pang et al., arXiv:2404.19733, the NLL term. Metrics: nll, the loss itself.
    """
    return ItemTerms(-pairs.chosen, {"nll": mean_metric(-pairs.chosen)})


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
    """w (1 - sigmoid(beta * (log-ratio - z))) of desirable responses, w (1 - sigmoid(beta * (z - log-ratio))) of
    others.

    Ethayarajh et al., arXiv:2402.01306, eq. 8; z is the baseline (`kto_baseline`). Items are responses. Rewards: beta *
    log-ratio; chosen are the desirable responses. There is no accuracy, as there are no pairs; kl is the baseline.
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

    total_log_ratio, count: over the whole mini-batch, all ranks and micro-batches, the sum of the log-ratios of
    responses to prompts that are not theirs, and how many.
    """
    return (total_log_ratio.detach() / max(count, 1)).clamp(min=0)


def _log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """log u of chosen and rejected responses."""
    return pairs.chosen - pairs.ref_chosen.detach(), pairs.rejected - pairs.ref_rejected.detach()


def _compared(pairs: Pairs, config: DPOConfig) -> tuple[Tensor, Tensor]:
    """f'(u) of chosen and rejected responses, for losses of their difference."""
    better, worse = _log_ratios(pairs)
    return _f_prime(better, config), _f_prime(worse, config)


def _scaled(config: DPOConfig, better: Tensor, worse: Tensor) -> tuple[Tensor, Tensor]:
    """Both times beta: the rewards that a loss implies."""
    return config.beta * better, config.beta * worse


def _f_prime(log_ratio: Tensor, config: DPOConfig) -> Tensor:
    """f'(u) of log u, 0 at u = 1."""
    match config.f_divergence_type:
        case "reverse_kl":
            return log_ratio
        case "js_divergence":
            return math.log(2) + log_sigmoid(log_ratio)
    # The alpha divergence at 1 is the forward KL.
    alpha = 1.0 if config.f_divergence_type == "forward_kl" else config.f_alpha_divergence_coef
    return -(-alpha * log_ratio).clamp(max=LARGEST_EXPONENT).expm1() / alpha


def _log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p."""
    limited = log_probs.clamp(max=-LEAST_SURPRISE)
    return limited - (-limited.expm1()).log()
