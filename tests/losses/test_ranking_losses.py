"""Losses of reward models: Bradley-Terry with margins, several ranked answers, scores."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slopes import slopes

from megatron_rl.config.declarations import REWARD_MODEL_LOSSES
from megatron_rl.config.tasks import RewardTrainingConfig
from megatron_rl.losses.rankings import pairs_of
from megatron_rl.losses.terms import Answers

LOG3 = math.log(3)
number = st.floats(-4, 4)
rankings = st.lists(st.lists(st.tuples(number, st.floats(0, 2)), max_size=4), min_size=1, max_size=4)


def loss_of(name: str, scores: torch.Tensor, sizes: torch.Tensor, given: torch.Tensor | None = None):
    none = torch.zeros_like(scores)
    answers = Answers(scores, none if given is None else given, none, sizes, torch.zeros(()), sizes)
    return REWARD_MODEL_LOSSES[name].function(answers, RewardTrainingConfig(name, use_margins=given is not None))


def pair_loss(chosen: torch.Tensor, rejected: torch.Tensor, margin: float = 0.0):
    given = torch.tensor([margin, 0.0], dtype=chosen.dtype)
    return loss_of("all_pairs", torch.cat([chosen, rejected]), torch.tensor([2]), given)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def means(metrics) -> dict[str, float]:
    return {name: (total / count).item() for name, (total, count) in metrics.items()}


#  chosen, rejected, margin, loss, d loss / d chosen
PAIRS = [
    pytest.param(0.0, 0.0, 0.0, math.log(2), -0.5, id="no opinion"),
    pytest.param(LOG3, 0.0, 0.0, math.log(4 / 3), -0.25, id="three to one, rightly"),
    pytest.param(0.0, LOG3, 0.0, math.log(4), -0.75, id="three to one, wrongly"),
    pytest.param(LOG3, 0.0, LOG3, math.log(2), -0.5, id="ahead by just the margin"),
    pytest.param(1000.0, 0.0, 0.0, 0.0, 0.0, id="far ahead"),
    pytest.param(0.0, 1000.0, 0.0, 1000.0, -1.0, id="far behind: finite"),
]


@pytest.mark.parametrize(("chosen", "rejected", "margin", "loss", "gradient"), PAIRS)
def test_pairs_by_hand(chosen, rejected, margin, loss, gradient):
    """Loss and gradients of both scores. Would not catch a wrong sum over pairs."""
    better, worse = (torch.tensor([value], requires_grad=True) for value in (chosen, rejected))
    terms = pair_loss(better, worse, margin)
    assert terms.loss.item() == pytest.approx(loss, abs=1e-6)
    found = [one.item() for one in torch.autograd.grad(terms.loss.sum(), (better, worse))]
    assert found == pytest.approx([gradient, -gradient], abs=1e-6)
    assert means(terms.metrics)["accuracy"] == float(chosen > rejected)
    assert not any(one.requires_grad for one in terms.metrics.values())


def test_pairs_of_rankings_by_hand():
    """Rankings of 3, 0, 1 and 2 answers. Would not catch a loss that reads the pairs the other way round."""
    better, worse, ranking = pairs_of(torch.tensor([3, 0, 1, 2]))
    assert list(zip(better.tolist(), worse.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 2), (4, 5)]
    assert ranking.tolist() == [0, 0, 0, 3]
    assert [one.tolist() for one in pairs_of(torch.empty(0, dtype=torch.int64))] == [[], [], []]


def pairs_by_loop(flat: list[float], rows) -> list[float]:
    values, losses = iter(flat), []
    for row in rows:
        scores, gaps = [next(values) for _ in row], [gap for _, gap in row]
        pairs = [
            softplus(scores[j] - scores[i] + sum(gaps[i:j])) for i, j in itertools.combinations(range(len(row)), 2)
        ]
        losses.append(sum(pairs) / len(pairs) if pairs else 0.0)
    return losses


def plackett_luce_by_loop(flat: list[float], rows) -> list[float]:
    values, losses = iter(flat), []
    for row in rows:
        scores = [next(values) for _ in row]
        losses.append(sum(math.log(math.fsum(math.exp(s) for s in scores[k:])) - scores[k] for k in range(len(scores))))
    return losses


@settings(max_examples=60, deadline=None)
@given(rows=rankings)
def test_rankings_agree_with_loops(rows):
    """Any sizes, 0 and 1 too, margins between neighbours, losses and gradients in float64.

    Would not catch an order that the reader of the file had wrong.
    """
    sizes = torch.tensor([len(row) for row in rows])
    scores = torch.tensor([score for row in rows for score, _ in row], dtype=torch.float64, requires_grad=True)
    gaps = torch.tensor([gap for row in rows for _, gap in row], dtype=torch.float64)
    loops = {"all_pairs": pairs_by_loop, "plackett_luce": plackett_luce_by_loop}
    for name, loop in loops.items():
        terms = loss_of(name, scores, sizes, gaps)
        assert terms.loss.tolist() == pytest.approx(loop(scores.tolist(), rows), rel=1e-9, abs=1e-9)
        if len(scores):
            found = torch.autograd.grad(terms.loss.sum(), scores)[0].tolist()
            expected = slopes(lambda flat, loop=loop: math.fsum(loop(flat, rows)), scores.tolist())
            assert found == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(pair=st.tuples(number, number))
def test_a_ranking_of_two_is_a_pair(pair):
    """Both rules give Bradley-Terry's loss and metrics. Would not catch an error that all three share."""
    scores = torch.tensor(pair, dtype=torch.float64)
    one = pair_loss(scores[:1], scores[1:])
    for name in ("all_pairs", "plackett_luce"):
        terms = loss_of(name, scores, torch.tensor([2]))
        torch.testing.assert_close(terms.loss, one.loss)
        assert means(terms.metrics) == means(one.metrics)


def test_plackett_luce_is_a_probability():
    """Over all 6 orders of 3 answers exp(-loss) adds up to 1. Would not catch an order read from the worst on."""
    scores = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    total = sum(
        loss_of("plackett_luce", scores[list(order)], torch.tensor([3])).loss.neg().exp().item()
        for order in itertools.permutations(range(3))
    )
    assert total == pytest.approx(1.0)


def test_scores_by_hand():
    """Squares, their gradient and the mean error. Would not catch targets that are scaled."""
    scores = torch.tensor([1.0, -2.0], requires_grad=True)
    terms = loss_of("regression", scores, torch.ones(2, dtype=torch.int64), torch.tensor([3.0, -2.5]))
    assert terms.loss.tolist() == [4.0, 0.25]
    assert torch.autograd.grad(terms.loss.sum(), scores)[0].tolist() == [-4.0, 1.0]
    assert means(terms.metrics) == {"error": 1.25, "score": -0.5, "target": 0.25}


@settings(deadline=None)
@given(rows=st.lists(st.tuples(number, number), min_size=1, max_size=9))
def test_scores_agree_with_a_loop(rows):
    """Python floats. Would not catch a wrong gradient, which the case above does."""
    scores, targets = torch.tensor(rows, dtype=torch.float64).T
    found = loss_of("regression", scores, torch.ones(len(rows), dtype=torch.int64), targets).loss.tolist()
    assert found == pytest.approx([(a - b) ** 2 for a, b in rows], rel=1e-12)
