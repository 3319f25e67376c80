"""Advantage estimators under one signature: what `algorithm.adv_estimator` names. See `registry.py` for how to add one.

Legend: B answers, T response tokens of all answers, laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import AlgorithmConfig
from megatron_rl.losses.advantages import gae, rewards_to_go, whiten
from megatron_rl.losses.group_advantages import best_minus_second, gpg, grpo, minus_group_mean, opo, rloo
from megatron_rl.losses.row_sums import spread, total_rows
from megatron_rl.losses.token_baseline import optimal_baselines, path_energy


@dataclass(frozen=True)
class Samples:
    """What estimators read: the answers of one step.

    rewards: float [T], the score of an answer on its last token, minus KL penalties where they enter the reward.
    lengths: int64 [B]; an answer may have no token. groups: int64 [B], equal for the answers to one prompt.
    scores: float [B], without penalties.
    values: float [T], of the critic; None where there is none.
    greedy_scores: float [B], of the greedy answer to each answer's prompt; None but for ReMax.
    components: float [B, K], the numbers that `algorithm.gdpo_reward_keys` names; None but for GDPO.
    old_log_probs, sum_pi_squared: float [T], of the sampled token its log-prob, and of its distribution the sum of
    squared probabilities; None but for the optimal token baseline. rollout_weights: float [T], the importance weights
    of the rollout's samples; None where there are none.
    """

    rewards: Tensor
    lengths: Tensor
    groups: Tensor
    scores: Tensor
    values: Tensor | None = None
    greedy_scores: Tensor | None = None
    components: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_weights: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """float [B]: the sum of each answer's rewards; of one without a token its score, so that its group knows it."""
        return total_rows(self.rewards, self.lengths, self.scores)

    @property
    def mask(self) -> Tensor:
        """bool [B, R]: real tokens of right-padded rows."""
        return torch.arange(int(self.lengths.max()))[None] < self.lengths[:, None]

    def padded(self, values: Tensor | None) -> Tensor:
        """values [T] as right-padded rows [B, R]. Raises ValueError where there are none."""
        mask, values = self.mask, _there(values)
        dense = values.new_zeros(mask.shape)
        dense[mask] = values
        return dense


def _there(field: Tensor | None) -> Tensor:
    if field is None:
        raise ValueError(
            "this estimator needs samples with the critic's values, greedy_scores, components, or sum_pi_squared"
        )
    return field


Estimator = Callable[[Samples, AlgorithmConfig], tuple[Tensor, Tensor]]
"""(samples, algorithm's keys) -> (advantages [T], returns [T]). Returns are what a critic learns to predict."""


def estimate_gae(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`gae`, whitened over all tokens of the batch; returns are not."""
    mask = samples.mask
    rewards, values = samples.padded(samples.rewards), samples.padded(samples.values)
    advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
    return whiten(advantages[mask]), returns[mask]


def estimate_grpo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`grpo` of each answer's total, on all of its tokens; `norm_adv_by_std_in_grpo=false` is Dr.GRPO's."""
    return _on_tokens(grpo(samples.totals, samples.groups, config.norm_adv_by_std_in_grpo), samples)


def estimate_grpo_passk(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`best_minus_second` of each answer's total, on all of its tokens."""
    gains = best_minus_second(samples.totals, samples.groups, config.norm_adv_by_std_in_grpo)
    return _on_tokens(gains, samples)


def estimate_gdpo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """sum over k of w_k * `grpo` of the k-th component of the reward, whitened over all tokens of the batch.

    So that no component drowns the others: a group in which one of them is the same everywhere still learns from the
    rest at full scale (GDPO: Liu et al., arXiv:2601.05242). Neither the score itself nor KL penalties enter.
    """
    components = _there(samples.components)
    weights = config.gdpo_reward_weights or [1.0] * components.shape[1]
    normalised = [
        weight * grpo(component, samples.groups, config.norm_adv_by_std_in_grpo)
        for weight, component in zip(weights, components.unbind(1), strict=True)
    ]
    advantages = whiten(spread(torch.stack(normalised).sum(0), samples.lengths))
    return advantages, advantages


def estimate_gpg(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`gpg` of each answer's total, on all of its tokens."""
    return _on_tokens(gpg(samples.totals, samples.groups), samples)


def estimate_optimal_token_baseline(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Rewards to go minus `optimal_baselines`, one for each place in an answer and group. See `token_baseline.py`."""
    mask, weights = samples.mask, samples.rollout_weights
    returns = rewards_to_go(samples.padded(samples.rewards), mask, gamma=1.0)
    energy = path_energy(_there(samples.old_log_probs), _there(samples.sum_pi_squared), weights)
    baselines = optimal_baselines(returns, samples.padded(energy), mask, samples.groups)
    return (returns - baselines)[mask], returns[mask]


def estimate_rloo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`rloo` of each answer's total, on all of its tokens."""
    return _on_tokens(rloo(samples.totals, samples.groups), samples)


def estimate_opo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`opo` of each answer's total, on all of its tokens."""
    return _on_tokens(opo(samples.totals, samples.lengths, samples.groups), samples)


def estimate_reinforce_plus_plus(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Discounted rewards to go, whitened over all tokens of the batch (REINFORCE++: Hu et al., arXiv:2501.03262)."""
    mask = samples.mask
    returns = rewards_to_go(samples.padded(samples.rewards), mask, config.gamma)[mask]
    return whiten(returns), returns


def estimate_reinforce_plus_plus_baseline(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Each answer's total minus its group's mean, on all of its tokens, whitened over all tokens of the batch.

    REINFORCE++-baseline, Hu et al., arXiv:2501.03262.
    """
    advantages = whiten(spread(minus_group_mean(samples.totals, samples.groups), samples.lengths))
    return advantages, advantages


def estimate_remax(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Rewards to go, without discount, minus the score of the greedy answer (ReMax: Li et al., arXiv:2310.10505)."""
    mask = samples.mask
    returns = rewards_to_go(samples.padded(samples.rewards), mask, gamma=1.0)[mask]
    return returns - spread(_there(samples.greedy_scores), samples.lengths), returns


def _on_tokens(advantages: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Advantages [B] on every token [T]; estimators of whole answers have no other returns."""
    tokens = spread(advantages, samples.lengths)
    return tokens, tokens
