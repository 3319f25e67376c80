"""Cross-entropy, and one number per answer from its tokens: masks with holes, empty answers, cut-up mini-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slopes import slopes

from megatron_rl.losses.cross_entropy import cross_entropy
from megatron_rl.losses.metrics import add_parts
from megatron_rl.losses.terms import mean_answers, mean_metric, pair_metrics, sum_answers

token = st.tuples(st.floats(-6, 0), st.booleans())
answers = st.lists(st.lists(token, max_size=5), min_size=1, max_size=5)


def tensors(rows):
    flat = [one for row in rows for one in row]
    log_probs = torch.tensor([value for value, _ in flat], dtype=torch.float64, requires_grad=True)
    counted = torch.tensor([kept for _, kept in flat], dtype=torch.bool)
    return log_probs, counted, torch.tensor([len(row) for row in rows])


def test_cross_entropy_by_hand():
    """-(-1 - 4) / 2, and the gradient of each of the two tokens that count. Would not catch a wrong total."""
    log_probs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    loss = cross_entropy(log_probs, torch.tensor([1, 0, 1]), 2)
    assert loss.item() == 2.5
    assert torch.autograd.grad(loss, log_probs)[0].tolist() == [-0.5, 0.0, -0.5]


@pytest.mark.parametrize("total", [0, 0.0])
def test_nothing_counted_is_no_loss(total):
    """An empty micro-batch, and one whose tokens are masked and infinite. Would not catch NaN among what counts."""
    assert cross_entropy(torch.empty(0), torch.empty(0), total).item() == 0.0
    log_probs = torch.tensor([-math.inf, math.nan], requires_grad=True)
    loss = cross_entropy(log_probs, torch.zeros(2), total)
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, log_probs)[0].tolist() == [0.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(rows=answers, cuts=st.lists(st.integers(0, 25), max_size=3))
def test_cut_up_mini_batches_have_the_mean_over_all_their_tokens(rows, cuts):
    """Any cut of the tokens into micro-batches adds up to a loop's mean, in loss and gradient, in float64.

    Would not catch a trainer that gives each of them its own total.
    """
    log_probs, counted, _ = tensors(rows)
    kept = [value for row in rows for value, one in row if one]
    total = len(kept)
    borders = [0, *sorted(min(cut, len(log_probs)) for cut in cuts), len(log_probs)]
    loss = sum(cross_entropy(log_probs[a:b], counted[a:b], total) for a, b in zip(borders, borders[1:], strict=False))
    assert loss.item() == pytest.approx(-math.fsum(kept) / max(total, 1), rel=1e-12, abs=1e-12)
    gradient = torch.autograd.grad(loss, log_probs)[0].tolist()
    assert gradient == pytest.approx([-one / max(total, 1) for row in rows for _, one in row])


@settings(max_examples=60, deadline=None)
@given(rows=answers)
def test_sums_and_means_of_answers_agree_with_a_loop(rows):
    """Holes in masks and empty answers, values and gradients, in float64. Would not catch rounding in float32."""
    log_probs, counted, lengths = tensors(rows)
    sums = [math.fsum(value for value, one in row if one) for row in rows]
    numbers = [max(sum(one for _, one in row), 1) for row in rows]
    found = sum_answers(log_probs, counted, lengths)
    assert found.tolist() == pytest.approx(sums, rel=1e-12, abs=1e-12)
    means = mean_answers(log_probs, counted, lengths)
    assert means.tolist() == pytest.approx([s / n for s, n in zip(sums, numbers, strict=True)], rel=1e-12, abs=1e-12)

    def squares(flat: list[float]) -> float:
        values, total = iter(flat), 0.0
        for row, number in zip(rows, numbers, strict=True):
            kept = [value for value, (_, one) in zip((next(values) for _ in row), row, strict=True) if one]
            total += (math.fsum(kept) / number) ** 2
        return total

    expected = slopes(squares, log_probs.tolist())
    assert torch.autograd.grad(means.square().sum(), log_probs)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_what_does_not_count_may_be_anything():
    """NaN and -inf in holes reach neither sums nor gradients. Would not catch them among what counts."""
    log_probs = torch.tensor([-1.0, math.nan, -3.0, -math.inf], requires_grad=True)
    counted, lengths = torch.tensor([1, 0, 1, 0]), torch.tensor([3, 0, 1])
    found = sum_answers(log_probs, counted, lengths)
    assert found.tolist() == [-4.0, 0.0, 0.0]
    assert mean_answers(log_probs, counted, lengths).tolist() == [-2.0, 0.0, 0.0]
    assert torch.autograd.grad(found.sum(), log_probs)[0].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_metrics_add_up():
    """(sum, count) of two micro-batches give the mean of both; a tie is no success. Would not catch a wrong name."""
    parts = [pair_metrics(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.0, 2.0, 3.0])) for _ in range(2)]
    summed = add_parts(parts)
    assert {name: (total / count).item() for name, (total, count) in summed.items()} == pytest.approx(
        {"accuracy": 1 / 3, "margin": -2 / 3, "chosen": 1.0, "rejected": 5 / 3}
    )
    assert mean_metric(torch.tensor([1.0, 5.0, 7.0]), torch.tensor([1, 0, 1])).tolist() == [8.0, 2.0]
    assert mean_metric(torch.empty(0)).tolist() == [0.0, 0.0]


def test_metrics_are_joined_by_name():
    """Micro-batches of samples and of examples, in any order of names. Would not catch ranks with other names."""
    samples = {"pg_loss": torch.tensor(1.0), "score": torch.tensor([6.0, 3.0])}
    others = {"score": torch.tensor([1.0, 1.0]), "pg_loss": torch.tensor(0.5)}
    examples = {"ptx_loss": torch.tensor(4.0)}
    summed = {name: part.tolist() for name, part in add_parts([samples, examples, others]).items()}
    assert summed == {"pg_loss": 1.5, "score": [7.0, 4.0], "ptx_loss": 4.0}
