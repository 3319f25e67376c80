"""Groups that teach something."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.records import Batch
from megatron_rl.sampling.group_judge import GroupJudge, differing, keeps_of
from megatron_rl.scoring.outcome import Outcome, Sample
from megatron_rl.scoring.scored_answers import ScoredAnswers

GROUPS = torch.tensor([4, 4, 9, 9, 6, 6])
SCORES = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])


def test_by_hand():
    """Groups 4 and 6 have equal scores. Would not catch scores that differ by rounding."""
    assert differing(SCORES, GROUPS).tolist() == [False, False, True, True, False, False]


def test_equal_numbers_are_equal():
    """Three times 0.1, whose standard deviation rounding may leave above 0; and a lone answer. Would not catch a
    tolerance."""
    assert not differing(torch.tensor([0.1, 0.1, 0.1, 0.7]), torch.tensor([3, 3, 3, 5])).any()


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_agrees_with_a_loop(rows):
    """Groups of any sizes. Would not catch rows in another order."""
    groups, scores = torch.tensor([g for g, _ in rows]), torch.tensor([s for _, s in rows])
    seen = {group: {s for g, s in rows if g == group} for group, _ in rows}
    assert differing(scores, groups).tolist() == [len(seen[group]) > 1 for group, _ in rows]


class Scorer:
    """Scores requests from a table. finished: those whose scores need no wait."""

    def __init__(self, outcomes: list[Outcome], finished: set[int]) -> None:
        self.outcomes, self.asked = outcomes, []
        self.rewards = SimpleNamespace(models=(), judges=(), is_scored=finished.issuperset)

    def start(self, batch):
        self.asked.append(list(batch.requests))
        outcomes = [self.outcomes[request] for request in batch.requests]
        scores = torch.tensor([outcome.score or 0.0 for outcome in outcomes])
        samples = [Sample("", str(request), None, {}) for request in batch.requests]
        batch.scored = ScoredAnswers(scores, samples, outcomes, None)

    def take(self):
        return Batch()


class Rows:
    """In the place of batches in flight: two requests per group."""

    def rows(self, requests):
        return Batch(uid=torch.tensor(requests) // 2)


class Kept(dict):
    """In the place of a schedule: group -> its verdict. Groups 0 to 3 are finished."""

    unjudged = property(lambda self: {3, 0, 2, 1} - self.keys())
    judged = dict.__setitem__


def test_verdicts_and_scores():
    """Four groups of two, by hand: a difference in score, none, two failures, one failure. A judge of what is scored
    does not wait for group 1. Scores of judged groups are kept in any order of asking, and made again once they are
    forgotten. Would not catch a wrong column of rows."""
    failed = Outcome(None, failure="error")
    outcomes = [Outcome(1.0), Outcome(0.0), Outcome(1.0), Outcome(1.0), failed, failed, failed, Outcome(1.0)]
    scorer, verdicts = Scorer(outcomes, finished={0, 1, 2, 4, 5, 6, 7}), Kept()
    judge = GroupJudge(keeps_of("score", None), scorer, verdicts, Rows(), size=2)
    assert judge.judge_scored() and verdicts == {0: "kept", 2: "failed", 3: "kept"}
    assert scorer.asked == [[0, 1, 4, 5, 6, 7]]
    assert not judge.judge_scored() and judge.judge() and verdicts[1] == "uniform" and not judge.judge()
    assert judge.scores([3, 0, 1]).scores.tolist() == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [sample.solution for sample in judge.scores([3, 1]).samples] == ["6", "7", "2", "3"]
    assert scorer.asked[1:] == [[2, 3]]
    judge.forget([3, 1])
    assert judge.scores([1, 0, 3]).scores.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert scorer.asked[2:] == [[2, 3, 6, 7]] and not judge.needs_ranks


def test_verdicts_by_accuracy():
    """Equal scores and different "acc", and without a reward function an error that offers the score."""
    outcomes = [Outcome(1.0, {"acc": 1.0}), Outcome(1.0, {"acc": 0.0}), Outcome(0.5), Outcome(0.5)]
    verdicts = Kept()
    judge = GroupJudge(keeps_of("acc", None), Scorer(outcomes, set()), verdicts, Rows(), size=2)
    assert judge.judge([0, 1]) and verdicts == {0: "kept", 1: "uniform"}
    judge = GroupJudge(keeps_of("acc", None), Scorer([Outcome(None)] * 8, set()), Kept(), Rows(), size=2)
    with pytest.raises(ConfigError, match="filter_groups.metric=acc needs a reward function.*try: score"):
        judge.judge()
