"""The baseline of least variance for every place in a response (Li et al., "The Optimal Token Baseline",
arXiv:2602.07078).

The variance of a policy gradient is least when rewards to go are measured against their mean weighed by the squared
norm of the gradient so far. That norm is not known without a backward pass; with respect to the logits it is, from the
probabilities alone: |d log pi / d z|^2 = 1 - 2 pi + sum over the vocabulary of pi^2.

Legend: B responses, R places, right-padded; T tokens of all responses, packed end to end; pi: probability of a sampled
token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import estimator
from megatron_rl.losses.advantages import rewards_to_go
from megatron_rl.losses.estimators import Samples, required

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-8
SMALLEST_ENERGY = 2.0**-20
"""1 - 2 pi + sum pi^2 of a token that is almost certain is the rounding of its summands, and may be negative."""


# tir_ names the case of several turns, whose sampled tokens lie end to end here anyway.
@estimator(
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    reads=("groups", "old_log_probs", "sum_pi_squared"),
)
def estimate_optimal_token_baseline(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Rewards to go - their mean at the same place of the group's responses, weighed by W.

    W: the sum of `path_energy` up to that place; see `optimal_baselines`. Li et al., arXiv:2602.07078.
    """
    mask, weights = samples.mask, samples.rollout_weights
    returns = rewards_to_go(samples.padded(samples.rewards), mask, gamma=1.0)
    energy = path_energy(required(samples.old_log_probs), required(samples.sum_pi_squared), weights)
    baselines = optimal_baselines(returns, samples.padded(energy), mask, samples.groups)
    return (returns - baselines)[mask], returns[mask]


def path_energy(log_probs: Tensor, sum_pi_squared: Tensor, weights: Tensor | None) -> Tensor:
    """w = 1 - 2 pi + sum pi^2 of each token [T], times the square of its importance weight where there are `weights`.

    All arguments [T]. The first factor is at least `SMALLEST_ENERGY`.
    """
    energy = (1 - 2 * log_probs.exp() + sum_pi_squared).clamp(min=SMALLEST_ENERGY)
    return energy if weights is None else energy * weights.square()


def optimal_baselines(returns: Tensor, energy: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """b_t = sum_i G_it W_it / (sum_i W_it + eps) over the responses i of a group, W_it = w_i1 + ... + w_it; [B, R].

    returns G, energy w [B, R], 0 where `mask` [B, R] is false; groups int64 [B]. Where one response continues alone,
    beyond all others of its group, there is nothing to compare with, and the baseline is 0, as in verl. Where the
    rewards to go of all responses that are still there are equal, the baseline is that number to the last bit.
    """
    cumulated = energy.cumsum(1).where(mask, 0.0)
    _, index = groups.unique(return_inverse=True)
    num_groups = int(index.max()) + 1 if len(index) else 0

    def over_group(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups, values.shape[1]).index_add_(0, index, values)[index]

    def extreme(kind: str, missing: float) -> Tensor:
        values = returns.where(mask, missing)
        start = values.new_full((num_groups, values.shape[1]), missing)
        return start.scatter_reduce(0, index[:, None].expand_as(values), values, kind)[index]

    weighed = over_group(cumulated * returns) / (over_group(cumulated) + EPSILON)
    largest, smallest = extreme("amax", float("-inf")), extreme("amin", float("inf"))
    weighed = returns.where(largest == smallest, weighed)
    has_others = over_group(mask.to(returns.dtype)) > 1
    return weighed.where(mask & has_others, 0.0)
