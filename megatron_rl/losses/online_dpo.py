"""Online DPO: the best and the worst of the responses to a prompt are a pair, whose preference the policy learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.declarations import estimator
from megatron_rl.losses.estimators import Samples
from megatron_rl.losses.group_advantages import numbered
from megatron_rl.losses.rows import spread, sum_rows

if TYPE_CHECKING:
    from torch import Tensor


@estimator("online_dpo", reads=("groups", "old_log_probs", "ref_log_probs"), second=True, keys=("online_dpo_beta",))
def estimate_online_dpo(samples: Samples, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """n b sigma(-m) for a group's best response, the negative for its worst, 0 for others; m = b times the difference
    of their log-ratios to the reference.

    That is the gradient of -log sigma(m), the loss of DPO (Rafailov et al., arXiv:2305.18290) on pairs that the policy
    samples and scores judge (Guo et al., "Direct Language Model Alignment from Online AI Feedback", arXiv:2402.04792).
    b is `online_dpo_beta`, n the responses of the group: with loss_agg_mode=seq-mean-token-sum a policy loss has the
    gradient of the mean over prompts. It is exact in a step's first update; later ones have the m of its beginning. A
    group whose responses score alike, or have no token, teaches nothing.
    """
    import torch

    assert samples.old_log_probs is not None and samples.ref_log_probs is not None
    ratios = sum_rows(samples.old_log_probs - samples.ref_log_probs, samples.lengths)
    (index, sizes), scores = numbered(samples.groups), samples.totals
    of_rows = torch.zeros_like(ratios)
    for group in range(len(sizes)):
        rows = (index == group).nonzero()[:, 0]
        totals = scores[rows]
        best, worst = rows[totals.argmax()], rows[totals.argmin()]
        if totals.max() > totals.min():
            margin = config.online_dpo_beta * (ratios[best] - ratios[worst])
            weight = len(rows) * config.online_dpo_beta * torch.sigmoid(-margin)
            of_rows[best], of_rows[worst] = weight, -weight
    advantages = spread(of_rows, samples.lengths)
    return advantages, advantages
