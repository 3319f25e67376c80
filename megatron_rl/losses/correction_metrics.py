"""The `rollout_corr/*` metrics: how far the rollout's probabilities are from the trainer's, and what was done about it.

Names and definitions are verl's; where verl averages over responses, empty ones are left out here.

Legend: B responses, T > 0 sampled tokens of all responses, packed end to end; `lengths` int64 [B]. rho = p_trainer /
p_rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.losses.policy import LOG_RATIO_LIMIT
from megatron_rl.losses.rows import mean_rows, sum_rows

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "rollout_corr"


def mismatch_metrics(trainer_log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor) -> dict[str, float]:
    """KL(rollout | trainer) by k1 and k3, perplexities of both, chi^2 = E[rho^2] - 1 of tokens and responses.

    log_ppl_diff is the mean over a response of log p_rollout - log p_trainer; above 0 the trainer finds it less likely.
    """
    log_ratio = trainer_log_probs - rollout_log_probs
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    whole = lengths > 0
    of_trainer, of_rollout = (-mean_rows(x, lengths)[whole] for x in (trainer_log_probs, rollout_log_probs))
    difference = of_trainer - of_rollout
    of_answers = sum_rows(log_ratio, lengths)[whole].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {
        "kl": -log_ratio.mean(),
        "k3_kl": (limited.expm1() - limited).mean(),
        "training_ppl": of_trainer.exp().mean(),
        "training_log_ppl": of_trainer.mean(),
        "rollout_ppl": of_rollout.exp().mean(),
        "rollout_log_ppl": of_rollout.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "chi2_token": (2 * limited).exp().mean() - 1,
        "chi2_seq": (2 * of_answers).exp().mean() - 1,
    }
    return _named("", metrics)


def weight_metrics(
    weights: Tensor, ratio: Tensor, lengths: Tensor, level: str, low: float | None, high: float
) -> dict[str, float]:
    """Metrics of importance weights [T], before they are normalised, and of the rho [T] that they come from.

    level: "token" or "sequence", whose rho it is. `low`, `high`: the bounds; without a lower one the fractions
    below are of 1 / high. eff_sample_size: (sum w)^2 / (T sum w^2), 1 when all are equal; 0 when all are 0.
    """
    whole = lengths > 0
    lower = 1 / high if low is None else low
    of_answers, ratio_of_answers = (mean_rows(x, lengths)[whole] for x in (weights, ratio))
    of_level = ratio if level == "token" else ratio_of_answers
    extremes = weights if level == "token" else ratio_of_answers
    mean, mean_square = weights.mean(), weights.square().mean()
    metrics = {
        "mean": mean,
        "max": extremes.max(),
        "min": extremes.min(),
        "std": weights.std(correction=0),
        "eff_sample_size": mean.square() / mean_square if mean_square > 0 else mean_square,
        "ratio_fraction_high": _share(of_level > high),
        "ratio_fraction_low": _share(of_level < lower),
        "seq_mean": of_answers.mean(),
        "seq_std": _std(of_answers),
        "seq_max": of_answers.max(),
        "seq_min": of_answers.min(),
        "seq_max_deviation": (of_answers - 1).abs().max(),
        "seq_fraction_high": _share(ratio_of_answers > high),
        "seq_fraction_low": _share(ratio_of_answers < lower),
    }
    if low is not None:
        metrics["oob_ratio"] = _share((ratio < low) | (ratio > high))
    return _named("rollout_is_", metrics)


def criterion_metrics(
    name: str, measured: Tensor, accepts: Tensor, lengths: Tensor, low: float | None, high: float
) -> dict[str, float]:
    """Metrics of one criterion of `rollout_rs`, from what it measured [T] and 1 where it accepts a token [T].

    `low`, `high`: the bounds of what was measured. std is of what was measured, limited to them.
    """
    whole = lengths > 0
    of_answers = mean_rows(measured, lengths)[whole]
    of_level = of_answers if name.startswith("seq") or name in ("sequence", "geometric") else measured
    metrics = {
        "mean": measured.mean(),
        "max": of_level.max(),
        "min": of_level.min(),
        "std": measured.clamp(0.0 if low is None else low, high).std(correction=0),
        "fraction_high": _share(of_level > high),
        "fraction_low": _share(of_level < low) if low is not None else of_answers.new_zeros(()),
        "seq_mean": of_answers.mean(),
        "seq_std": _std(of_answers),
        "seq_max": of_answers.max(),
        "seq_min": of_answers.min(),
        "seq_max_deviation": of_answers.abs().max(),
        "seq_fraction_high": _share(of_answers > high),
        "masked_fraction": 1 - accepts.mean(),
        "seq_masked_fraction": _share(sum_rows(1 - accepts, lengths)[whole] > 0),
    }
    if low is not None:
        metrics["seq_fraction_low"] = _share(of_answers < low)
    return _named(f"rollout_rs_{name}_", metrics)


def mask_metrics(kept: Tensor, lengths: Tensor) -> dict[str, float]:
    """Shares of tokens that are left out, and of responses that lost one; `kept` [T] is 1 or 0."""
    lost = sum_rows(1 - kept, lengths)[lengths > 0] > 0
    return _named("rollout_rs_", {"masked_fraction": 1 - kept.mean(), "seq_masked_fraction": _share(lost)})


def _named(prefix: str, metrics: dict[str, Tensor]) -> dict[str, float]:
    return {f"{PREFIX}/{prefix}{name}": float(value) for name, value in metrics.items()}


def _share(marked: Tensor) -> Tensor:
    return marked.float().mean()


def _std(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())
