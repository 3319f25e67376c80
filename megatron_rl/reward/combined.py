"""One score out of two: the rule's and the reward model's."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.errors import RewardError
from megatron_rl.reward.outcome import describe
from megatron_rl.reward.rule import Scored


def combine(ruled: Scored, rm_scores: torch.Tensor | None, rule_weight: float, weight: float) -> Scored:
    """score = rule_weight * rule + weight * model, where `rm_scores` float32 [B] is the model's; None: there is none.

    With a model both parts are among the further numbers of each answer, "rule_score" (where there is a rule) and
    "rm_score", so they are logged, validated and in sample tables. The rule's "acc" stays what it is. Raises
    RewardError, naming the first sample, when the model's score is not finite.
    """
    if rm_scores is None:
        return replace(ruled, scores=rule_weight * ruled.scores)
    if not rm_scores.isfinite().all():
        row = int(rm_scores.isfinite().int().argmin())
        raise RewardError(f"the reward model gives {float(rm_scores[row])} to {describe(ruled.samples[row])}")
    outcomes = []
    for rule_score, rm_score, outcome in zip(ruled.scores.tolist(), rm_scores.tolist(), ruled.outcomes, strict=True):
        has_rule = outcome.failure or outcome.score is not None
        parts = ({"rule_score": rule_score} if has_rule else {}) | {"rm_score": rm_score}
        outcomes.append(replace(outcome, extras=outcome.extras | parts))
    return replace(ruled, scores=rule_weight * ruled.scores + weight * rm_scores, outcomes=outcomes)
