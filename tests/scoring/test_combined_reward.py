"""Rule and reward model as one score, and either alone."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.errors import RewardError
from megatron_rl.scoring.outcome import Outcome, Sample, failed
from megatron_rl.scoring.scored_answers import ModelScores, ScoredAnswers, combine

SAMPLES = [Sample("unit", text, "x", {}) for text in ("one", "two", "three")]
RM_SCORES = torch.tensor([0.5, -1.0, 4.0])


def model(scores: torch.Tensor, weight: float) -> list[ModelScores]:
    return [ModelScores("reward_model", scores, weight)]


def ruled() -> ScoredAnswers:
    """A score, one whose accuracy is told apart from it, and a failure that is scored -2."""
    outcomes = [Outcome(1.0), Outcome(0.25, {"acc": 1.0, "pred": "2"}), failed("raised", "KeyError")]
    return ScoredAnswers(torch.tensor([1.0, 0.25, -2.0]), SAMPLES, outcomes, "KeyError")


def no_rule() -> ScoredAnswers:
    """As `NoRule` returns it."""
    return ScoredAnswers(torch.zeros(3), SAMPLES, [Outcome(None)] * 3, None)


def test_weighted_sum():
    """2 * rule + 0.5 * model, both told apart in metrics, validation and tables. Would not catch rows mixed up before.

    The accuracy is the rule's, whatever the weights are.
    """
    scored = combine(ruled(), model(RM_SCORES, 0.5), rule_weight=2.0)
    assert scored.scores.tolist() == [2.25, 0.0, -2.0]
    metrics = scored.metrics()
    assert metrics["reward/rule_score/mean"] == pytest.approx(-0.25)
    assert metrics["reward/rm_score/mean"] == pytest.approx(3.5 / 3)
    assert metrics["reward/failed_ratio"] == pytest.approx(1 / 3) and metrics["reward/raised"] == 1
    assert scored.variables() == {
        "acc": [1.0, 1.0, 0.0],
        "reward": [2.25, 0.0, -2.0],
        "rule_score": [1.0, 0.25, -2.0],
        "rm_score": [0.5, -1.0, 4.0],
    }
    assert scored.predictions() == [None, "2", None]
    row = scored.table(["q"] * 3, step=1)[1]
    assert (row["score"], row["rule_score"], row["rm_score"], row["acc"]) == (0.0, 0.25, -1.0, 1.0)


def test_cut_conversations_are_counted():
    """Of models that read text, each under its own name. Would not catch a limit that nobody reaches."""
    first = ModelScores("reward_model", RM_SCORES, 1.0, torch.tensor([True, False, True]))
    second = ModelScores("strict", RM_SCORES, 1.0, torch.tensor([False, False, False]))
    scored = combine(no_rule(), [first, second], 1.0)
    metrics = scored.metrics()
    assert metrics["reward/rm_truncated/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/strict_truncated/mean"] == 0.0
    assert [row["rm_truncated"] for row in scored.table(["q"] * 3, step=1)] == [1.0, 0.0, 1.0]


def test_the_rule_alone():
    """Nothing is added to what it said. Would not catch a weight that is applied twice."""
    plain, scored = ruled(), combine(ruled(), [], rule_weight=1.0)
    assert scored.scores.tolist() == plain.scores.tolist() and scored.outcomes == plain.outcomes
    assert combine(ruled(), [], rule_weight=-2.0).scores.tolist() == [-2.0, -0.5, 4.0]


def test_the_reward_model_alone():
    """No accuracy, and no failures to count. Would not catch a run that waits for a rule."""
    scored = combine(no_rule(), model(RM_SCORES, 2.0), rule_weight=1.0)
    assert scored.scores.tolist() == [1.0, -2.0, 8.0]
    assert scored.variables() == {"reward": [1.0, -2.0, 8.0], "rm_score": [0.5, -1.0, 4.0]}
    assert scored.metrics() == {"reward/rm_score/mean": pytest.approx(3.5 / 3)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_model_without_a_number(bad):
    """Its own failure, not an estimator's. Would not catch a finite but absurd score."""
    with pytest.raises(RewardError, match="the reward model gives (nan|inf) to a prompt of .*response 'two'"):
        combine(ruled(), model(torch.tensor([0.0, bad, 0.0]), 1.0), 1.0)
