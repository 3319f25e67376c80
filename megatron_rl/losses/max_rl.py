"""MaxRL: a prompt that is rarely answered rightly counts for more, as under maximum likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import estimator
from megatron_rl.losses.estimators import Samples
from megatron_rl.losses.group_advantages import EPSILON, ROUNDING, minus_group_mean, numbered

if TYPE_CHECKING:
    from torch import Tensor


@estimator("max_rl", reads=("groups",))
def estimate_max_rl(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(r - group mean) / (group mean + 1e-6); 0 where the group mean is not above 0; r of a lone response.

    A mean that is 0 but for the rounding of its scores, which may be negative, is not above 0.

    Tajwar et al., arXiv:2602.02710, whose r is 1 or 0: in expectation, over n samples, it ascends the first n terms of
    log(pass rate) = -sum over k of (1 - pass rate)^k / k, where the mean score ascends the first one alone.
    """
    scores, (index, sizes) = samples.totals, numbered(samples.groups)
    sums, summands = (
        scores.new_zeros(sizes.numel()).double().index_add_(0, index, values.double())
        for values in (scores, scores.abs())
    )
    means = (sums / sizes).to(scores.dtype)
    gains = minus_group_mean(scores, samples.groups) / (means + EPSILON)[index]
    advantages = gains.where((sums > ROUNDING * summands)[index], 0.0)
    return samples.on_tokens(advantages.where(sizes[index] > 1, scores))
