"""Advantages from the other responses to the same prompt, without a critic: every token has that of its response.

Legend: B responses; r: a response's total reward, `scores` float [B]; `groups` int64 [B], equal for the responses to
one prompt, in any order. A response that is alone in its group is compared with nothing: its baseline is 0 and its
standard deviation counts as 1, as in verl. Equal scores of two or more responses give advantage 0 exactly: rounding
would leave small differences, divided by a standard deviation as small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import estimator
from megatron_rl.losses.advantages import whiten
from megatron_rl.losses.estimators import Samples, required
from megatron_rl.losses.rows import spread

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-6
ROUNDING = 2.0**-20
"""Differences up to this share of what was added up are rounding: 16 units in the last place of float32."""
GROUPS = ("groups",)
BY_STD = ("norm_adv_by_std_in_grpo",)


@estimator("grpo", "grpo_vectorized", reads=GROUPS, keys=(*BY_STD, "scale_rewards"))
def estimate_grpo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(r - group mean) / (group std + 1e-6), std unbiased; `norm_adv_by_std_in_grpo=false`: without the division.

    GRPO: Shao et al., arXiv:2402.03300, section 4.1.2. Without the division it is Dr.GRPO (Liu et al.,
    arXiv:2503.20783), which weighs easy and hard prompts as they come. `scale_rewards=batch`: the std of r over all
    responses of the step (LitePPO: Liu et al., arXiv:2508.08221).
    """
    if config.norm_adv_by_std_in_grpo and config.scale_rewards == "batch":
        scores, centred = samples.totals, minus_group_mean(samples.totals, samples.groups)
        return samples.on_tokens(centred / (scores.std() + EPSILON) if len(scores) > 1 else centred)
    return samples.on_tokens(normalised(samples.totals, samples.groups, config.norm_adv_by_std_in_grpo))


@estimator("rloo", "rloo_vectorized", reads=GROUPS)
def estimate_rloo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """r - mean of the group's other responses, which is n / (n - 1) * (r - group mean); r of a lone response.

    RLOO: Ahmadian et al., arXiv:2402.14740.
    """
    return samples.on_tokens(rloo(samples.totals, samples.groups))


@estimator("opo", reads=GROUPS)
def estimate_opo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """r - length-weighted mean of the group: sum(l r) / sum(l), l in tokens.

    OPO: Hao et al., arXiv:2505.23585, the baseline of least variance when a response's gradient grows with its length.
    A response without a token has no weight; the baseline is 0 for a group of such responses and for a lone response.
    """
    scores, (index, sizes) = samples.totals, numbered(samples.groups)
    weights = samples.lengths.to(scores.dtype)
    baselines = _sums(weights * scores, index, sizes) / _sums(weights, index, sizes).clamp(min=1)
    advantages = scores - baselines.where(sizes > 1, 0.0)[index]
    return samples.on_tokens(advantages.where(~_all_equal(scores, index, sizes), 0.0))


@estimator("gpg", reads=GROUPS)
def estimate_gpg(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(r - group mean) * responses / responses with r != 0, counted over the batch.

    GPG: Chu et al., arXiv:2504.02546: responses without any reward teach nothing, and the others make up for them.
    """
    scores = samples.totals
    gains = minus_group_mean(scores, samples.groups) * len(scores)
    return samples.on_tokens(gains / scores.count_nonzero().clamp(min=1))


@estimator("grpo_passk", reads=GROUPS, second=True, keys=BY_STD)
def estimate_grpo_passk(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """For the group's best response r - the second best r, over (group std + 1e-6); 0 for all others.

    What one response adds to the group's best score, Pass@k (Tang et al., arXiv:2503.19595). Two responses that share
    the best score add nothing. `norm_adv_by_std_in_grpo=false`: without the division.
    """
    scores, (index, sizes) = samples.totals, numbered(samples.groups)
    nothing = scores.new_full((sizes.numel(),), float("-inf"))
    largest = nothing.scatter_reduce(0, index, scores, "amax")
    is_best = scores == largest[index]
    second = nothing.scatter_reduce(0, index, scores.where(~is_best, float("-inf")), "amax")
    is_alone = is_best & (_sums(is_best.to(scores.dtype), index, sizes)[index] == 1) & (sizes[index] > 1)
    gains = (scores - second[index]).where(is_alone, 0.0)
    if config.norm_adv_by_std_in_grpo:
        gains = gains / (_stds(scores, index, sizes)[index] + EPSILON)
    return samples.on_tokens(gains)


@estimator("reinforce_plus_plus_baseline", reads=GROUPS)
def estimate_reinforce_plus_plus_baseline(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """r - group mean, whitened over all tokens of the batch.

    REINFORCE++-baseline: Hu et al., arXiv:2501.03262.
    """
    advantages = whiten(spread(minus_group_mean(samples.totals, samples.groups), samples.lengths))
    return advantages, advantages


@estimator(
    "gdpo",
    reads=(*GROUPS, "components"),
    keys=("gdpo_reward_keys", "gdpo_reward_weights", *BY_STD),
)
def estimate_gdpo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Sum over k of w_k * `grpo` of the k-th component of the reward, whitened over all tokens of the batch.

    GDPO: Liu et al., arXiv:2601.05242. No component drowns the others: a group in which one of them is the same
    everywhere still learns from the rest at full scale. Neither the score itself nor KL penalties enter.
    """
    import torch

    components = required(samples.components)
    weights = config.gdpo_reward_weights or [1.0] * components.shape[1]
    parts = [
        weight * normalised(component, samples.groups, config.norm_adv_by_std_in_grpo)
        for weight, component in zip(weights, components.unbind(1), strict=True)
    ]
    advantages = whiten(spread(torch.stack(parts).sum(0), samples.lengths))
    return advantages, advantages


def normalised(scores: Tensor, groups: Tensor, by_std: bool, summands: Tensor | None = None) -> Tensor:
    """(r - group mean), over (group std + EPSILON) where `by_std`; [B].

    summands: float [B], the sum of absolute values of what each score was added up from; scores that differ by
    `ROUNDING` of it are equal. None: a score is as it was given, and no other one is equal to it.
    """
    index, sizes = numbered(groups)
    if summands is not None:
        scores = _without_rounding(scores, summands, index, sizes)
    centred = _centred(scores, index, sizes)
    return centred / (_stds(scores, index, sizes)[index] + EPSILON) if by_std else centred


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """[B]: each score minus the mean of the others of its group; `estimate_rloo` and estimators of users call it."""
    index, sizes = numbered(groups)
    return _centred(scores, index, sizes) * (sizes / (sizes - 1).clamp(min=1))[index]


def minus_group_mean(scores: Tensor, groups: Tensor) -> Tensor:
    """r - group mean; [B]."""
    return normalised(scores, groups, by_std=False)


def numbered(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each response's group, counted from 0, int64 [B], and the number of responses in each group, int64 [G]."""
    _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    return index, sizes


def _sums(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return values.new_zeros(sizes.numel()).index_add_(0, index, values)


def _centred(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """r - group mean; [B]; r of a lone response."""
    means = (_sums(scores, index, sizes) / sizes).where(sizes > 1, 0.0)
    return (scores - means[index]).where(~_all_equal(scores, index, sizes), 0.0)


def _stds(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """Unbiased standard deviation of each group [G]; 1 of a lone response."""
    squares = _sums(_centred(scores, index, sizes).square(), index, sizes)
    return (squares / (sizes - 1).clamp(min=1)).sqrt().where(sizes > 1, 1.0)


def _without_rounding(scores: Tensor, summands: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """scores [B], but one and the same in a group whose scores differ by the rounding of their `summands` [B] alone."""
    nothing = scores.new_zeros(sizes.numel())
    largest, smallest, scale = (
        nothing.scatter_reduce(0, index, values, kind, include_self=False)
        for values, kind in ((scores, "amax"), (scores, "amin"), (summands, "amax"))
    )
    return largest[index].where((largest - smallest <= ROUNDING * scale)[index], scores)


def _all_equal(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """bool [B]: true for the responses of a group of two or more that all have the same score."""
    nothing = scores.new_zeros(sizes.numel())
    largest, smallest = (
        nothing.scatter_reduce(0, index, scores, kind, include_self=False) for kind in ("amax", "amin")
    )
    return ((largest == smallest) & (sizes > 1))[index]
