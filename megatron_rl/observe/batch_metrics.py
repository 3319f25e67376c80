"""From the tensors of one step to the numbers that are logged, under verl's names. Pure.

Legend: B samples, T response tokens of all samples, laid end to end.
"""

from __future__ import annotations

import torch


def score_metrics(
    scores: torch.Tensor,
    rewards_flat: torch.Tensor,
    advantages_flat: torch.Tensor,
    returns_flat: torch.Tensor,
    values_flat: torch.Tensor | None,
) -> dict[str, float]:
    """Statistics of `scores` [B], the task rewards, and of float tensors [T]; T >= 2 for a variance.

    `critic/rewards/mean` is per sample, as in verl: the sum of its token rewards (score minus KL penalty).
    `critic/vf_explained_var` is 1 - Var(returns - values) / (Var(returns) + 1e-5): 1 is a perfect critic, 0 is as
    good as a constant, and it can fall far below 0. Without a critic there are no values and nothing about them.
    """
    metrics = {
        **_statistics("critic/score", scores),
        "critic/rewards/mean": (rewards_flat.sum() / scores.numel()).item(),
        **_statistics("critic/advantages", advantages_flat),
        **_statistics("critic/returns", returns_flat),
    }
    if values_flat is None:
        return metrics
    explained = 1 - (returns_flat - values_flat).var() / (returns_flat.var() + 1e-5)
    return metrics | _statistics("critic/values", values_flat) | {"critic/vf_explained_var": explained.item()}


def length_metrics(
    prompt_lengths: torch.Tensor, response_lengths: torch.Tensor, truncated: torch.Tensor
) -> dict[str, float]:
    """Statistics of lengths in tokens, int64 [B], and the share of responses cut off (`truncated` bool [B])."""
    return {
        **_statistics("prompt_length", prompt_lengths),
        **_statistics("response_length", response_lengths),
        "response_length/clip_ratio": truncated.float().mean().item(),
    }


def parity_metrics(rollout_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor) -> dict[str, float]:
    """How far the rollout engine and the trainer disagree about sampled tokens; both float [T].

    The difference of log-probs, and verl's `rollout_probs_diff`, the difference of probabilities.
    """
    difference = (rollout_log_probs - trainer_log_probs).abs()
    probs_difference = (rollout_log_probs.exp() - trainer_log_probs.exp()).abs()
    return {
        "training/rollout_logprob_diff_max": difference.max().item(),
        "training/rollout_logprob_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": probs_difference.max().item(),
        "training/rollout_probs_diff_mean": probs_difference.mean().item(),
    }


def throughput_metrics(num_tokens: int, step_seconds: float, num_ranks: int) -> dict[str, float]:
    """Tokens of the step (prompts and responses), its seconds, and tokens per second per rank."""
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": num_tokens / (step_seconds * num_ranks),
    }


def _statistics(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": values.float().mean().item(),
        f"{name}/max": float(values.max().item()),
        f"{name}/min": float(values.min().item()),
    }
