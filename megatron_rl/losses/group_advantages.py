"""Advantages of whole answers, from the other answers to the same prompt. One score per answer, no critic.

Legend: B answers; `scores` float [B]; `groups` int64 [B], equal for the answers to one prompt, in any order. An answer
that is alone in its group has nothing to be compared with: its baseline is 0 and its standard deviation counts as 1, as
in verl. Of two or more answers with equal scores the advantage is 0, exactly: what rounding leaves of their differences
would be divided by a standard deviation as small.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grpo(scores: Tensor, groups: Tensor, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) over the group, std unbiased (GRPO: Shao et al., arXiv:2402.03300, section 4.1.2); [B].

    Without the division it is Dr.GRPO (Liu et al., arXiv:2503.20783), which weighs easy and hard prompts
    as they come.
    """
    index, sizes = _numbered(groups)
    centred = _centred(scores, index, sizes)
    if not norm_by_std:
        return centred
    return centred / (_stds(scores, index, sizes)[index] + eps)


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """r_i minus the mean of the *other* scores of its group; [B]. RLOO: Ahmadian et al., arXiv:2402.14740.

    The same as n / (n - 1) * (r_i - mean) in a group of n; of a lone answer r_i.
    """
    index, sizes = _numbered(groups)
    centred = _centred(scores, index, sizes)
    return centred * (sizes / (sizes - 1).clamp(min=1))[index]


def opo(scores: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """r_i - sum(l r) / sum(l) over the group, l = `lengths` [B] in tokens; [B].

    The baseline of least variance when an answer's gradient grows with its length (OPO: Hao et al., arXiv:2505.23585).
    An answer without a token has no gradient, and so no weight in it; the baseline of a group of such, and of a lone
    answer, is 0.
    """
    index, sizes = _numbered(groups)
    weights = lengths.to(scores.dtype)
    baselines = _sums(weights * scores, index, sizes) / _sums(weights, index, sizes).clamp(min=1)
    baselines = torch.where(sizes > 1, baselines, 0.0)
    return torch.where(_all_equal(scores, index, sizes), 0.0, scores - baselines[index])


def minus_group_mean(scores: Tensor, groups: Tensor) -> Tensor:
    """r - mean of the group; [B]. What REINFORCE++-baseline whitens (Hu et al., arXiv:2501.03262)."""
    return grpo(scores, groups, norm_by_std=False)


def best_minus_second(scores: Tensor, groups: Tensor, norm_by_std: bool, eps: float = 1e-6) -> Tensor:
    """r_max - r_second, over the group's (std + eps) if told, for the best answer of a group; 0 for all others; [B].

    What one answer adds to the group's best score, Pass@k (Tang et al., arXiv:2503.19595). Two answers that share
    the best score add nothing.
    """
    index, sizes = _numbered(groups)
    nothing = torch.full((sizes.numel(),), -torch.inf, dtype=scores.dtype)
    largest = nothing.scatter_reduce(0, index, scores, "amax")
    is_best = scores == largest[index]
    second = nothing.scatter_reduce(0, index, torch.where(is_best, -torch.inf, scores), "amax")
    is_alone = is_best & (_sums(is_best.to(scores.dtype), index, sizes)[index] == 1) & (sizes[index] > 1)
    gains = torch.where(is_alone, scores - second[index], 0.0)
    return gains / (_stds(scores, index, sizes)[index] + eps) if norm_by_std else gains


def gpg(scores: Tensor, groups: Tensor) -> Tensor:
    """alpha * (r - mean of the group), alpha = B / number of scores that are not 0; [B]. GPG: Chu et al.,
    arXiv:2504.02546: answers without any reward teach nothing, and the others make up for them.
    """
    return minus_group_mean(scores, groups) * len(scores) / scores.count_nonzero().clamp(min=1)


def _numbered(groups: Tensor) -> tuple[Tensor, Tensor]:
    """(each answer's group, counted from 0, [B]; answers in each group [G])."""
    _, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    return index, sizes


def _sums(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros(sizes.numel(), dtype=values.dtype).index_add_(0, index, values)


def _centred(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """r - mean of the group; [B]. Of a lone answer r."""
    means = torch.where(sizes > 1, _sums(scores, index, sizes) / sizes, 0.0)
    return torch.where(_all_equal(scores, index, sizes), 0.0, scores - means[index])


def _stds(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """Unbiased standard deviation of each group [G]; 1 of a lone answer."""
    squares = _sums(_centred(scores, index, sizes).square(), index, sizes)
    return torch.where(sizes > 1, (squares / (sizes - 1).clamp(min=1)).sqrt(), 1.0)


def _all_equal(scores: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    """bool [B]: whether the answers of one's group, two or more, all have the same score."""
    nothing = torch.zeros(sizes.numel(), dtype=scores.dtype)
    largest, smallest = (
        nothing.scatter_reduce(0, index, scores, kind, include_self=False) for kind in ("amax", "amin")
    )
    return ((largest == smallest) & (sizes > 1))[index]
