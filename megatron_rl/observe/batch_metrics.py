"""The metrics of one step, computed from its tensors, under verl's names. Pure.

Legend: B samples, T sampled tokens of all samples, concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    """Mean, max and min of the task rewards `scores` [B], of `totals` [B], and of the float tensors [T].

    `critic/rewards` are the `totals`: the sum of a sample's token rewards (score minus KL penalty), as in verl.
    `critic/vf_explained_var` is 1 - Var(returns - values) / (Var(returns) + 1e-5): 1 is a perfect critic, 0 is as
    good as a constant, and it can fall far below 0. Metrics of tokens are left out where T = 0, the explained variance
    where T < 2, and both metrics of values where there is no critic.
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
    """Differences between the rollout engine and the trainer for sampled tokens; both float [T]. {} where T = 0.

    The difference of log-probs as maximum, mean and `PARITY_QUANTILE`; and verl's `rollout_probs_diff`, the difference
    of probabilities.
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


def truncation_metrics(rollout: torch.Tensor, trainer: torch.Tensor, top_p: float, top_k: int) -> dict[str, float]:
    """How far log-probs of a truncated engine are outside of what truncation explains, both float [T]; {} where T = 0.

    The truncated distribution is the whole one over the mass M that it keeps, so log p_rollout - log p_trainer is
    -log M: at least 0, and at most -log top_p, as top_p alone (top_k = -1) keeps at least this mass.
    """
    if not rollout.numel():
        return {}
    difference = rollout - trainer
    largest = truncation_limit(top_p, top_k)
    outside = torch.maximum(-difference, difference - largest).clamp_min(0)
    return {
        "training/rollout_logprob_outside_max": outside.max().item(),
        "training/rollout_logprob_outside_p99": quantile(outside, PARITY_QUANTILE),
        "training/rollout_logprob_outside_mean": outside.mean().item(),
    }


def truncation_limit(top_p: float, top_k: int) -> float:
    """The largest log p_rollout - log p_trainer that top_p and top_k explain; infinite with a top_k other than -1."""
    return -math.log(top_p) if top_k == -1 else math.inf


def quantile(values: torch.Tensor, share: float) -> float:
    """The smallest of the values [T], T > 0, that at least this share of them does not exceed; NaN if one is NaN."""
    if values.isnan().any():
        return math.nan
    return values.kthvalue(max(1, math.ceil(share * len(values)))).values.item()


def expert_load_metrics(counts: torch.Tensor, layers: Sequence[int], role: str = "actor") -> dict[str, float]:
    """Load of a role's experts, from counts int64 [layers, experts] of the tokens sent to each. layers: their numbers.

    The load of a layer is the count of its busiest expert over the mean count of its experts: 1 is even, and the worst
    is the number of experts / experts per token. `max` and `mean` are over layers; `idle` is the share of experts
    without a token. Returns {} where no token was sent.
    """
    if not counts.any():
        return {}
    load = counts.amax(1) / counts.double().mean(1)
    by_layer = {f"{role}/expert_load/layer_{layer}": value for layer, value in zip(layers, load.tolist(), strict=True)}
    return {
        f"{role}/expert_load/max": float(load.max()),
        f"{role}/expert_load/mean": float(load.mean()),
        f"{role}/expert_load/idle": float((counts == 0).double().mean()),
        **by_layer,
    }


def balance_metrics(losses: torch.Tensor, layers: Sequence[int], role: str = "actor") -> dict[str, float]:
    """Losses of a role's routers, from float [layers, 2]: aux loss and z loss before coefficients.

    layers: their numbers. An aux loss of 1 is an even load, or a router without a preference; the worst is experts /
    experts per token.
    """
    metrics: dict[str, float] = {}
    for column, name in enumerate(("aux", "z")):
        values = losses[:, column].tolist()
        metrics |= {f"{role}/moe_{name}_loss/layer_{layer}": value for layer, value in zip(layers, values, strict=True)}
        metrics[f"{role}/moe_{name}_loss/mean"] = sum(values) / len(values)
    return metrics


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
