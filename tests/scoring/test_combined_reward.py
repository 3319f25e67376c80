"""Rule and reward model as one score, and either alone."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.errors import RewardError
from megatron_rl.records import Batch, ragged
from megatron_rl.roles.scoring_roles import ends_of_turns, with_tokens_after
from megatron_rl.scoring.outcome import Outcome, Sample, failed
from megatron_rl.scoring.scored_answers import ModelScores, ScoredAnswers, combine, join, with_turns

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


def test_a_process_reward_model_reads_the_ends_of_turns_and_steps():
    """Of two conversations in a row, of neighbouring rows, and of a row that was cut in a turn; steps within a turn.

    Would not catch a wrong output of the model: the run in test_reward_model_run.py compares with transformers'.
    """
    ids = ragged([torch.tensor([1, 2, 9, 3, 4, 5, 6, 7]), torch.tensor([1, 2, 3])])
    sampled = ragged([torch.tensor([0, 1, 1, 1, 0, 1, 0, 1]).bool(), torch.tensor([0, 0, 1]).bool()])
    starts = ragged([torch.tensor([0, 0, 0, 0, 1, 0, 0, 0]).bool(), torch.zeros(3, dtype=torch.bool)])
    batch = Batch(input_ids=ids, sampled=sampled, conversation_starts=starts)
    turns = ends_of_turns(batch, torch.empty(0, dtype=torch.int64))
    assert turns.nonzero().flatten().tolist() == [3, 5, 7, 10]
    ends = ends_of_turns(batch, torch.tensor([9, 6]))  # 6 is not the policy's
    assert ends.nonzero().flatten().tolist() == [2, 3, 5, 7, 10]
    longer = with_tokens_after(batch, ends)
    rows = [row.tolist() for row in longer["input_ids"].unbind()]
    assert rows == [[1, 2, 9, 3, 0, 4, 5, 6, 7, 0], [1, 2, 3, 0]]
    assert longer.flat("sampled").nonzero().flatten().tolist() == [3, 4, 7, 9, 13]
    assert longer.flat("conversation_starts").nonzero().flatten().tolist() == [5]


def test_parts_of_turns_follow_their_responses():
    """Weighted, of the sources of their model alone, through a choice of rows and a join."""
    parts = ragged([torch.tensor([0.0, 4.0]), torch.tensor([2.0])])
    found = ModelScores("reward_model", torch.tensor([4.0, 2.0]), 0.5, rows=torch.tensor([0, 2]), turns=parts)
    scored = with_turns(combine(no_rule(), [found], 1.0), [found], torch.tensor([2, 3, 1]))
    assert scored.scores.tolist() == [2.0, 0.0, 1.0] and scored.turns is not None
    again = join([scored[torch.tensor([2])], scored[torch.tensor([0, 1])]])
    assert again.turns is not None and [row.tolist() for row in again.turns] == [[1.0], [0.0, 2.0], [0.0, 0.0, 0.0]]
    assert with_turns(ruled(), model(RM_SCORES, 1.0), torch.tensor([1, 1, 1])).turns is None
