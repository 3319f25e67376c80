"""From the tensors of one step to the numbers that are logged, under verl's names. Pure.

Legend: B samples, T response tokens of all samples, laid end to end.
"""

from __future__ import annotations

import math

import torch

PARITY_QUANTILE = 0.99
"""The share of sampled tokens that `rollout.logprob_diff_bound` is a bound for."""


def score_metrics(
    scores: torch.Tensor,
    totals: torch.Tensor,
    advantages_flat: torch.Tensor,
    returns_flat: torch.Tensor,
    values_flat: torch.Tensor | None,
) -> dict[str, float]:
    """Statistics of `scores` [B], the task rewards, `totals` [B], and of float tensors [T].

    `critic/rewards` are the `totals`: of each sample the sum of its token rewards (score minus KL penalty), as in verl.
    Without a token there is nothing about tokens, and fewer than two have no variance.
    `critic/vf_explained_var` is 1 - Var(returns - values) / (Var(returns) + 1e-5): 1 is a perfect critic, 0 is as
    good as a constant, and it can fall far below 0. Without a critic there are no values and nothing about them.
    """
    metrics = {
        **_statistics("critic/score", scores),
        **_statistics("critic/rewards", totals),
        **_statistics("critic/advantages", advantages_flat),
        **_statistics("critic/returns", returns_flat),
    }
    if values_flat is None:
        return metrics
    metrics |= _statistics("critic/values", values_flat)
    if values_flat.numel() < 2:
        return metrics
    explained = 1 - (returns_flat - values_flat).var() / (returns_flat.var() + 1e-5)
    return metrics | {"critic/vf_explained_var": explained.item()}


def length_metrics(
    prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, truncated: torch.Tensor
) -> dict[str, float]:
    """Statistics of lengths in tokens, int64 [B], and the share of responses cut off (`truncated` bool [B]).

    `response/aborted_ratio` is verl's name for the share of responses without a token, which
    `response_length_non_aborted` leaves out; it is absent where there is no other.
    """
    whole = response_lengths > 0
    metrics = {
        **_statistics("prompt_length", prompt_lengths),
        **_statistics("response_length", response_lengths),
        "response_length/clip_ratio": truncated.float().mean().item(),
        "response/aborted_ratio": 1 - whole.float().mean().item(),
        **_statistics("response_length_non_aborted", response_lengths[whole]),
    }
    if whole.any():
        metrics["response_length_non_aborted/clip_ratio"] = truncated[whole].float().mean().item()
    return metrics


def parity_metrics(rollout_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor) -> dict[str, float]:
    """How far the rollout engine and the trainer disagree about sampled tokens; both float [T].

    The difference of log-probs, in the mean, of `PARITY_QUANTILE` of the tokens and at most; and verl's
    `rollout_probs_diff`, the difference of probabilities. Nothing where T = 0.
    """
    if not rollout_log_probs.numel():
        return {}
    difference = (rollout_log_probs - trainer_log_probs).abs()
    probs_difference = (rollout_log_probs.exp() - trainer_log_probs.exp()).abs()
    return {
        "training/rollout_logprob_diff_max": difference.max().item(),
        "training/rollout_logprob_diff_p99": quantile(difference, PARITY_QUANTILE),
        "training/rollout_logprob_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": probs_difference.max().item(),
        "training/rollout_probs_diff_mean": probs_difference.mean().item(),
    }


def quantile(values: torch.Tensor, share: float) -> float:
    """The smallest of the values [T], T > 0, that at least this share of them does not exceed; NaN if one is NaN."""
    if values.isnan().any():
        return math.nan
    return values.kthvalue(max(1, math.ceil(share * len(values)))).values.item()


def throughput_metrics(num_tokens: int, step_seconds: float, num_ranks: int) -> dict[str, float]:
    """Tokens of the step (prompts and responses), its seconds, and tokens per second per rank."""
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": num_tokens / (step_seconds * num_ranks),
    }


def _statistics(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, max and min; {} if empty."""
    if not values.numel():
        return {}
    return {
        f"{name}/mean": values.float().mean().item(),
        f"{name}/max": float(values.max().item()),
        f"{name}/min": float(values.min().item()),
    }
