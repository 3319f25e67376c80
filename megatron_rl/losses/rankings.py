"""Losses of reward models: of pairs, of several ranked answers, and of answers with a score.

Legend: n rankings with N answers in all, laid end to end, the best of each ranking first; `sizes` int64 [n] answers of
each. A pair is a ranking of two. A ranking of fewer than 2 answers says nothing: its loss is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rl.losses.row_sums import mean_rows, row_of_token, sum_rows
from megatron_rl.losses.terms import ItemTerms, mean_metric, pair_metrics


def pair_loss(chosen: Tensor, rejected: Tensor, margins: Tensor | None = None) -> ItemTerms:
    """Bradley-Terry: -log sigmoid(r_chosen - r_rejected - m), all arguments [n]; items are pairs.

    Stiennon et al., arXiv:2009.01325; with the margin m of Touvron et al. (Llama 2), arXiv:2307.09288, eq. 2.
    """
    ahead = chosen - rejected
    return ItemTerms(-logsigmoid(ahead if margins is None else ahead - margins), pair_metrics(chosen, rejected))


def pairs_of(sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(better, worse, ranking), each int64 [P]: all pairs of answers of the same ranking, by their numbers in [0, N),
    and the ranking they are of, in order.
    """
    found = []
    first = 0
    for size in sizes.tolist():
        found.append(torch.triu_indices(size, size, offset=1, device=sizes.device) + first)
        first += size
    better, worse = torch.cat(found, dim=1) if found else sizes.new_zeros(2, 0)
    return better, worse, row_of_token(sizes)[better]


def all_pairs_loss(scores: Tensor, sizes: Tensor, margins: Tensor | None = None) -> ItemTerms:
    """The mean of `pair_loss` over the K (K - 1) / 2 pairs of each ranking; items are rankings.

    Ouyang et al. (InstructGPT), arXiv:2203.02155, eq. 1. scores [N]; margins [N]: how much better an answer is than the
    next one of its ranking, read as 0 at the last, so that margins along a ranking add up.
    """
    better, worse, ranking = pairs_of(sizes)
    ahead = scores[better] - scores[worse]
    if margins is not None:
        worth = margins.cumsum(0)  # a sum from `better` to before `worse` is a difference of these
        ahead = ahead - (worth[worse] - margins[worse] - worth[better] + margins[better])
    num_pairs = sizes.new_zeros(sizes.numel()).index_add(0, ranking, torch.ones_like(ranking))
    return ItemTerms(mean_rows(-logsigmoid(ahead), num_pairs), pair_metrics(scores[better], scores[worse]))


def plackett_luce_loss(scores: Tensor, sizes: Tensor) -> ItemTerms:
    """-sum over places k of log(exp(r_k) / sum of exp(r_j) over j >= k); items are rankings; scores [N].

    The log-likelihood of the whole order (Plackett 1975; Luce 1959; Rafailov et al., arXiv:2305.18290, appendix A.3).
    With 2 answers it is `pair_loss` without margins, which it has no place for.
    """
    rest = [torch.logcumsumexp(part.flip(0), 0).flip(0) for part in scores.split(sizes.tolist())]
    below = torch.cat(rest) if rest else scores
    better, worse, _ = pairs_of(sizes)
    return ItemTerms(sum_rows(below - scores, sizes), pair_metrics(scores[better], scores[worse]))


def regression_loss(scores: Tensor, targets: Tensor) -> ItemTerms:
    """(r - y)^2, both [n]; items are answers."""
    error = scores - targets
    metrics = {"error": mean_metric(error.abs()), "score": mean_metric(scores), "target": mean_metric(targets)}
    return ItemTerms(error.square(), metrics)


RANKING_LOSSES = {"all_pairs": all_pairs_loss, "plackett_luce": plackett_luce_loss}
"""By name; both take (scores, sizes), and `all_pairs` margins."""
