"""Correction for samples that another program drew: the rollout engine's probabilities are not quite the trainer's.

With rho_t = p_trainer / p_rollout of a sampled token, weights of the loss bring its expectation back to the trainer's
policy, and tokens or answers that are too unlikely under one of the two are left out. Yao et al., "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (2025) for token-level truncation; Liu et al., "When Speed Kills
Stability" (2025) for whole answers and masks. Names of the keys are verl's.

Legend: B answers, T response tokens of all answers, laid end to end; `lengths` int64 [B].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.config.schema import RolloutCorrectionConfig
from megatron_rl.losses.rows import mean_rows, spread, sum_rows

LOG_RATIO_LIMIT = 20.0


def importance_weights(log_ratio: Tensor, lengths: Tensor, level: str, threshold: float) -> Tensor:
    """min(rho, threshold) for each token [T], from log rho [T].

    level: "token", the token's own rho; "sequence", the product over the answer, for all of its tokens. The exponent is
    limited to +-LOG_RATIO_LIMIT. Raises ValueError for another level.
    """
    return _log_at(log_ratio, lengths, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=threshold)


def accepted(log_ratio: Tensor, lengths: Tensor, level: str, low: float, high: float) -> Tensor:
    """1.0 for each token [T] whose rho, from log rho [T], is between `low` and `high` (both included), else 0.0.

    level: "token"; "sequence", the product over the answer; "geometric", its mean per token. Raises ValueError for
    another level.
    """
    ratio = _log_at(log_ratio, lengths, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return ((ratio >= low) & (ratio <= high)).float()


def not_vetoed(log_ratio: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """0.0 on all tokens [T] of an answer that has one with rho < `threshold`, from log rho [T]; else 1.0."""
    catastrophic = (log_ratio.exp() < threshold).float()
    return spread((sum_rows(catastrophic, lengths) == 0).float(), lengths)


def correct_rollout(
    trainer_log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
    """(weights [T] or None, 1.0 where a token is kept [T] or None, metrics) as `config` says; log-probs [T].

    None where nothing of that kind is configured. Weights are normalised, where that is, over the tokens kept.
    """
    log_ratio = trainer_log_probs - rollout_log_probs
    metrics, weights, kept = {}, None, None
    if config.rollout_rs is not None:
        high = config.rollout_rs_threshold or config.rollout_is_threshold
        low = 1 / high if config.rollout_rs_threshold_lower is None else config.rollout_rs_threshold_lower
        kept = accepted(log_ratio, lengths, config.rollout_rs, low, high)
    if config.rollout_token_veto_threshold is not None:
        spared = not_vetoed(log_ratio, lengths, config.rollout_token_veto_threshold)
        if (lengths > 0).any():
            vetoed = 1 - float(mean_rows(spared, lengths)[lengths > 0].mean())
            metrics["rollout_corr/rollout_is_veto_fraction"] = vetoed
        kept = spared if kept is None else kept * spared
    if kept is not None and kept.numel():
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1 - float(kept.mean())
    if config.rollout_is is not None:
        weights = importance_weights(log_ratio, lengths, config.rollout_is, config.rollout_is_threshold)
        counts = torch.ones_like(weights) if kept is None else kept
        if config.rollout_is_batch_normalize:
            weights = weights / ((weights * counts).sum() / counts.sum().clamp(min=1)).clamp(min=1e-8)
        metrics |= weight_metrics(weights[counts > 0])
    return weights, kept, metrics


def weight_metrics(weights: Tensor) -> dict[str, float]:
    """Statistics of the weights [N] that count; `eff_sample_size` is (sum w)^2 / (N sum w^2), 1 when all are equal."""
    if not weights.numel():
        return {}
    return {
        "rollout_corr/rollout_is_mean": float(weights.mean()),
        "rollout_corr/rollout_is_std": float(weights.std(correction=0)),
        "rollout_corr/rollout_is_max": float(weights.max()),
        "rollout_corr/rollout_is_min": float(weights.min()),
        "rollout_corr/rollout_is_eff_sample_size": float(weights.mean().square() / weights.square().mean()),
    }


def _log_at(log_ratio: Tensor, lengths: Tensor, level: str) -> Tensor:
    """log rho [T] of the token, or of its answer."""
    if level == "token":
        return log_ratio
    if level == "sequence":
        return spread(sum_rows(log_ratio, lengths), lengths)
    if level == "geometric":
        return spread(mean_rows(log_ratio, lengths), lengths)
    raise ValueError(f"{level} is no level of a ratio")
