"""Losses of reward models: of several ranked responses, of which a pair is two, and of responses with a score.

Legend: n rankings with N responses in all, packed end to end, the best of each ranking first; `sizes` int64 [n]
responses of each. A ranking of fewer than 2 responses has nothing to compare: its loss is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.declarations import reward_model_loss
from megatron_rl.config.tasks import RewardTrainingConfig
from megatron_rl.losses.rows import mean_rows, row_of_token, sum_rows
from megatron_rl.losses.terms import Answers, ItemTerms, log_sigmoid, mean_metric, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor


def pairs_of(sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(better, worse, ranking), each int64 [P]: all pairs of responses of the same ranking, by their numbers in [0, N),
    and the ranking they are of, in order.
    """
    import torch

    pairs, first = [], 0
    for size in sizes.tolist():
        pairs.append(torch.triu_indices(size, size, offset=1, device=sizes.device) + first)
        first += size
    better, worse = torch.cat(pairs, dim=1) if pairs else sizes.new_zeros(2, 0)
    return better, worse, row_of_token(sizes)[better]


def mean_of_pairs(losses: Tensor, ranking: Tensor, sizes: Tensor) -> Tensor:
    """losses [P] of pairs -> their mean in each ranking [n]; 0 where there is no pair."""
    num_pairs = sizes.new_zeros(sizes.numel()).index_add(0, ranking, ranking.new_ones(ranking.shape))
    return mean_rows(losses, num_pairs)


@reward_model_loss("all_pairs", reads=("given",), keys=("use_margins",))
def all_pairs_loss(answers: Answers, config: RewardTrainingConfig) -> ItemTerms:
    """The mean of -log sigmoid(r_better - r_worse - m) over the K (K - 1) / 2 pairs of each ranking.

    Bradley-Terry, of rankings as in Ouyang et al. (InstructGPT), arXiv:2203.02155, eq. 1; of two responses Stiennon et
    al., arXiv:2009.01325; the margin m is that of Touvron et al. (Llama 2), arXiv:2307.09288, eq. 2, with
    `use_margins`: how much better a response is than the next one of its ranking, 0 at the last, so that margins along
    a ranking add up. Items are rankings.
    """
    scores, margins = answers.numbers, answers.given
    better, worse, ranking = pairs_of(answers.sizes)
    ahead = scores[better] - scores[worse]
    if config.use_margins:
        sums = margins.cumsum(0)  # a sum from `better` to before `worse` is a difference of these
        ahead = ahead - (sums[worse] - margins[worse] - sums[better] + margins[better])
    metrics = pair_metrics(scores[better], scores[worse])
    return ItemTerms(mean_of_pairs(-log_sigmoid(ahead), ranking, answers.sizes), metrics)


@reward_model_loss("plackett_luce")
def plackett_luce_loss(answers: Answers, config: RewardTrainingConfig) -> ItemTerms:
    """-sum over places k of log(exp(r_k) / sum of exp(r_j) over j >= k), the log-likelihood of the whole order.

    Plackett 1975; Luce 1959; Rafailov et al., arXiv:2305.18290, appendix A.3. With 2 responses it is `all_pairs`
    without margins. Items are rankings.
    """
    import torch

    scores, sizes = answers.numbers, answers.sizes
    rest = [torch.logcumsumexp(part.flip(0), 0).flip(0) for part in scores.split(sizes.tolist())]
    below = torch.cat(rest) if rest else scores
    better, worse, _ = pairs_of(sizes)
    return ItemTerms(sum_rows(below - scores, sizes), pair_metrics(scores[better], scores[worse]))


@reward_model_loss("regression", reads=("given",), alone=True)
def regression_loss(answers: Answers, config: RewardTrainingConfig) -> ItemTerms:
    """(r - y)^2, y the score that the file gives to a response. Items are responses."""
    scores, targets = answers.numbers, answers.given
    error = scores - targets
    metrics = {"error": mean_metric(error.abs()), "score": mean_metric(scores), "target": mean_metric(targets)}
    return ItemTerms(error.square(), metrics)
