"""Correction for samples of the rollout engine, whose probabilities are not quite the trainer's.

With rho_t = p_trainer / p_rollout of a sampled token, weights of the loss bring its expectation back to the trainer's
policy, and tokens or responses that are too unlikely under one of the two are left out. Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (2025) for token-level truncation; Liu et al., "When Speed Kills
Stability" (2025) for whole responses and masks; IcePop's weights: Ling Team, "Every Step Evolves", arXiv:2510.18855.
Names of the keys are verl's.

Legend: B responses, T sampled tokens of all responses, packed end to end; `lengths` int64 [B].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_rl.config.correction import Criterion, RolloutCorrectionConfig, criteria, importance_bounds
from megatron_rl.losses.correction_metrics import criterion_metrics, mask_metrics, mismatch_metrics, weight_metrics
from megatron_rl.losses.policy import LOG_RATIO_LIMIT
from megatron_rl.losses.rows import max_rows, mean_rows, spread, sum_rows

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_PROBABILITY = 1e-6

OLD_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Criteria of older verl versions, which bound rho, and those of the newest, which bound 1 / rho."""

OVER_ANSWERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "seq_sum": sum_rows,
    "seq_mean": mean_rows,
    "seq_max": max_rows,
}


def importance_weights(
    log_ratio: Tensor, lengths: Tensor, level: str, high: float, low: float | None = None
) -> tuple[Tensor, Tensor]:
    """(weight of each token, rho before any bound), both [T], from log rho [T].

    level: "token", the token's own rho; "sequence", the product over the response, for all of its tokens. The exponent
    is limited to +-LOG_RATIO_LIMIT. The weight is min(rho, high); or, with `low`, rho where low <= rho <= high, and 0
    elsewhere (IcePop). Raises ValueError for another level.
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"{level} is no level of a ratio")
    at_level = log_ratio if level == "token" else spread(sum_rows(log_ratio, lengths), lengths, len(log_ratio))
    ratio = at_level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if low is None:
        return ratio.clamp(max=high), ratio
    return ratio.where((ratio >= low) & (ratio <= high), 0.0), ratio


def measure(trainer_log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, name: str) -> Tensor:
    """The number that the criterion `name` bounds, for each token [T]; numbers of responses are on all of their tokens.

    With l = log rho, limited to +-LOG_RATIO_LIMIT: k1 -l, k2 l^2 / 2, k3 e^l - 1 - l (Schulman, "Approximating KL
    divergence"), of the token, or their sum, mean or maximum over the response; binary_kl the larger of both KLs of the
    token against all others. Log-probs [T].
    """
    if name == "binary_kl":
        return _binary_kl(trainer_log_probs, rollout_log_probs)
    scope, _, kind = OLD_NAMES.get(name, name).rpartition("_")
    log_ratio = (trainer_log_probs - rollout_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    per_token = {"k1": -log_ratio, "k2": 0.5 * log_ratio.square(), "k3": log_ratio.expm1() - log_ratio}[kind]
    return per_token if scope == "token" else spread(OVER_ANSWERS[scope](per_token, lengths), lengths, len(per_token))


def log_bounds(criterion: Criterion) -> tuple[float | None, float]:
    """(low or None, high) of what `measure` gives: of k1, which is a logarithm, the thresholds' own."""
    import torch

    if criterion.low is None:
        return None, criterion.high
    low, high = (float(torch.tensor(bound, dtype=torch.float64).log()) for bound in (criterion.low, criterion.high))
    return (-high, -low) if criterion.name in OLD_NAMES else (low, high)


def accepted(measured: Tensor, low: float | None, high: float) -> Tensor:
    """1.0 where `measured` [T] is between the bounds, both included, else 0.0."""
    kept = measured <= high
    return (kept if low is None else kept & (measured >= low)).float()


def not_vetoed(log_ratio: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """0.0 on all tokens [T] of a response that has one with rho < `threshold`, from log rho [T]; else 1.0."""
    catastrophic = (log_ratio.exp() < threshold).float()
    return spread((sum_rows(catastrophic, lengths) == 0).float(), lengths, len(log_ratio))


def correct_rollout(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
    """(weights [T] or None, 1.0 where a token is kept [T] or None, metrics) as `config` says; log-probs [T].

    None if nothing of that kind is configured. Weights and their metrics cover all samples, those left out too; the
    metrics are taken before weights are normalised. Without a token there are no metrics.
    """
    some = trainer_log_probs.numel() > 0
    metrics = mismatch_metrics(trainer_log_probs, rollout_log_probs, lengths) if some else {}
    weights, kept = None, None
    for criterion in criteria(config):
        measured = measure(trainer_log_probs, rollout_log_probs, lengths, criterion.name)
        low, high = log_bounds(criterion)
        accepts = accepted(measured, low, high)
        if some:
            metrics |= criterion_metrics(criterion.name, measured, accepts, lengths, low, high)
        kept = accepts if kept is None else kept * accepts
    if config.rollout_token_veto_threshold is not None:
        log_ratio = trainer_log_probs - rollout_log_probs
        spared = not_vetoed(log_ratio, lengths, config.rollout_token_veto_threshold)
        if some:
            vetoed = 1 - float(mean_rows(spared, lengths)[lengths > 0].mean())
            metrics["rollout_corr/rollout_is_veto_fraction"] = vetoed
        kept = spared if kept is None else kept * spared
    if kept is not None and some:
        metrics |= mask_metrics(kept, lengths)
    if config.rollout_is is not None:
        low, high = importance_bounds(config)
        weights, ratio = importance_weights(
            trainer_log_probs - rollout_log_probs, lengths, config.rollout_is, high, low
        )
        if some:
            metrics |= weight_metrics(weights, ratio, lengths, config.rollout_is, low, high)
        if config.rollout_is_batch_normalize and some:
            mean = _mean_weight(weights, lengths, config.rollout_is)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
            weights = weights / mean
    return weights, kept, metrics


def current_correction(
    log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Correct a micro-batch of `bypass_mode` with the policy's present log-probs: (weights, kept, metrics).

    All [T]; weights and kept are 1 where nothing is configured. The metrics are terms [T] of means over tokens.
    """
    log_probs = log_probs.detach()
    log_ratio = log_probs - rollout_log_probs
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {"kl": -log_ratio, "k3_kl": limited.expm1() - limited, "chi2_token": (2 * limited).exp() - 1}
    weights = kept = log_ratio.new_ones(log_ratio.shape)
    for criterion in criteria(config):
        measured = measure(log_probs, rollout_log_probs, lengths, criterion.name)
        accepts = accepted(measured, *log_bounds(criterion))
        metrics[f"rollout_rs_{criterion.name}_masked_fraction"] = 1 - accepts
        kept = kept * accepts
    if config.rollout_token_veto_threshold is not None:
        kept = kept * not_vetoed(log_ratio, lengths, config.rollout_token_veto_threshold)
    if config.rollout_rs is not None or config.rollout_token_veto_threshold is not None:
        metrics["rollout_rs_masked_fraction"] = 1 - kept
    if config.rollout_is is not None:
        low, high = importance_bounds(config)
        weights, _ = importance_weights(log_ratio, lengths, config.rollout_is, high, low)
        metrics["rollout_is_mean"] = weights
    return weights, kept, {f"rollout_corr/{name}": terms for name, terms in metrics.items()}


def _mean_weight(weights: Tensor, lengths: Tensor, level: str) -> float:
    """The mean over tokens, or over responses with a token where weights are those of responses; 1 where it is 0."""
    mean = weights.mean() if level == "token" else mean_rows(weights, lengths)[lengths > 0].mean()
    return float(mean) if mean > 1e-8 else 1.0


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """max(KL(p | q), KL(q | p)) of the token against all others, with probabilities kept away from 0 and 1."""
    p, q = (x.float().exp().clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY) for x in (log_p, log_q))

    def divergence(a: Tensor, b: Tensor) -> Tensor:
        return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()

    return divergence(p, q).maximum(divergence(q, p))
