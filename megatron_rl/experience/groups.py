"""Which responses of a batch teach something, by comparing each with the others to its prompt (dynamic sampling).

Legend: B responses; `scores` float [B]; `groups` int64 [B], equal for the responses to one prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor


def differing(scores: Tensor, groups: Tensor) -> Tensor:
    """bool [B]: true for all responses of a group whose scores are not all equal.

    The others have advantage 0 under every estimator that compares within a group (DAPO: Yu et al., arXiv:2503.14476,
    section 3.2).
    """
    _, index = groups.unique(return_inverse=True)
    num_groups = int(index.max()) + 1
    largest = torch.full((num_groups,), -torch.inf).scatter_reduce(0, index, scores, "amax")
    smallest = torch.full((num_groups,), torch.inf).scatter_reduce(0, index, scores, "amin")
    return (largest > smallest)[index]


def first_groups(groups: Tensor, wanted: Tensor, num_groups: int) -> Tensor:
    """Rows, in their order, of the first `num_groups` groups: those with `wanted` bool [B] first, then the others.

    All rows of a group must have the same `wanted`. Fewer groups where there are not as many.
    """
    ids, index = groups.unique(return_inverse=True)
    is_wanted = torch.zeros(len(ids), dtype=torch.bool)
    is_wanted[index] = wanted
    chosen = torch.argsort((~is_wanted).int(), stable=True)[:num_groups]
    return torch.isin(index, chosen).nonzero()[:, 0]
