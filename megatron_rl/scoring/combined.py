"""One score out of several: the rule's and those of reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_rl.errors import RewardError
from megatron_rl.scoring.outcome import describe
from megatron_rl.scoring.rule import ScoredAnswers
from megatron_rl.scoring.shaping import Shaped

FIRST_MODEL, FIRST_NAME = "reward_model", "rm_score"
"""The reward model of verl's keys, and what its score is called; that of another is its name with "_score"."""


@dataclass(frozen=True)
class ModelScores:
    """What one reward model gives B answers: float32 [B], and what that counts.

    is_cut: bool [B], of which conversations it does not read the end; None where it reads the actor's tokens.
    shaped: what training takes in the place of the scores; None: they themselves. rows: int64 [B], numbers of these
    answers among all, where it does not score all; else None.
    """

    name: str
    scores: torch.Tensor
    weight: float
    is_cut: torch.Tensor | None = None
    shaped: Shaped | None = None
    rows: torch.Tensor | None = None

    @property
    def label(self) -> str:
        """What the score is called in logs and tables."""
        return FIRST_NAME if self.name == FIRST_MODEL else f"{self.name}_score"

    @property
    def all_rows(self) -> torch.Tensor:
        """int64 [B]: the answers' numbers."""
        return torch.arange(len(self.scores)) if self.rows is None else self.rows

    @property
    def rewards(self) -> torch.Tensor:
        """float32 [B]: what its weight multiplies."""
        return self.scores if self.shaped is None else self.shaped.rewards

    @property
    def columns(self) -> dict[str, list[float]]:
        """What is logged of each answer, by name."""
        short = self.label.removesuffix("_score")
        found = {self.label: self.scores.tolist()}
        if self.is_cut is not None:
            found[f"{short}_truncated"] = self.is_cut.float().tolist()
        if self.shaped is not None:
            found[f"{short}_reward"] = self.shaped.rewards.tolist()
            if self.shaped.is_clipped is not None:
                found[f"{short}_clipped"] = self.shaped.is_clipped.float().tolist()
        return found


def combine(ruled: ScoredAnswers, models: Sequence[ModelScores], rule_weight: float) -> ScoredAnswers:
    """score = rule_weight * rule + sum of weight * model over the models that score an answer, each as it is shaped.

    With a model all parts are among the further numbers of each answer, "rule_score" (where there is a rule),
    "rm_score" and so on, so they are logged, validated and in sample tables; so is "rm_truncated", 1 where a reward
    model with a tokenizer of its own does not read the end of a conversation, else 0. The rule's "acc" stays what it
    is. Where scores are shaped, "rm_reward" is what counts of each and "rm_clipped" whether it was clipped.
    Raises RewardError, naming the first sample, when a model's score is not finite.
    """
    scores = rule_weight * ruled.scores
    for model in models:
        if not model.scores.isfinite().all():
            row = int(model.all_rows[model.scores.isfinite().int().argmin()])
            who = "the reward model" if model.name == FIRST_MODEL else f"the reward model {model.name}"
            bad = float(model.scores[~model.scores.isfinite()][0])
            raise RewardError(f"{who} gives {bad} to {describe(ruled.samples[row])}")
        scores = scores.index_add(0, model.all_rows, model.weight * model.rewards)
    if not models:
        return replace(ruled, scores=scores)
    given: list[dict[str, float]] = [{} for _ in ruled.outcomes]
    for model in models:
        for label, values in model.columns.items():
            for row, value in zip(model.all_rows.tolist(), values, strict=True):
                given[row][label] = value
    outcomes = []
    for parts, rule_score, outcome in zip(given, ruled.scores.tolist(), ruled.outcomes, strict=True):
        has_rule = outcome.failure or outcome.score is not None
        said = {"rule_score": rule_score} if has_rule else {}
        outcomes.append(replace(outcome, extras=outcome.extras | said | parts))
    return replace(ruled, scores=scores, outcomes=outcomes)
