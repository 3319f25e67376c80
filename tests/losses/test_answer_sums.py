"""Cross-entropy, and one number per answer from its tokens: empty answers, cut-up mini-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slopes import slopes

from megatron_rl.losses.cross_entropy import cross_entropy
from megatron_rl.losses.metrics import add_parts
from megatron_rl.losses.rows import last_of_rows, mean_rows, sum_rows
from megatron_rl.losses.terms import mean_metric, pair_metrics

answers = st.lists(st.lists(st.floats(-6, 0), max_size=5), min_size=1, max_size=5)


def tensors(rows):
    log_probs = torch.tensor([value for row in rows for value in row], dtype=torch.float64, requires_grad=True)
    return log_probs, torch.tensor([len(row) for row in rows])


def test_cross_entropy_by_hand():
    """-(-1 - 4) / 2, and the gradient of each token; of no token 0. Would not catch a wrong total."""
    log_probs = torch.tensor([-1.0, -4.0], requires_grad=True)
    loss = cross_entropy(log_probs, 2)
    assert loss.item() == 2.5
    assert torch.autograd.grad(loss, log_probs)[0].tolist() == [-0.5, -0.5]
    assert cross_entropy(torch.empty(0), 0).item() == 0.0


@settings(max_examples=50, deadline=None)
@given(rows=answers, cuts=st.lists(st.integers(0, 25), max_size=3))
def test_cut_up_mini_batches_have_the_mean_over_all_their_tokens(rows, cuts):
    """Any cut of the tokens into micro-batches adds up to a loop's mean, in loss and gradient, in float64.

    Would not catch a trainer that gives each of them its own total.
    """
    log_probs, _ = tensors(rows)
    total = len(log_probs)
    borders = [0, *sorted(min(cut, total) for cut in cuts), total]
    loss = sum(cross_entropy(log_probs[a:b], total) for a, b in zip(borders, borders[1:], strict=False))
    assert loss.item() == pytest.approx(-math.fsum(log_probs.tolist()) / max(total, 1), rel=1e-12, abs=1e-12)
    gradient = torch.autograd.grad(loss, log_probs)[0].tolist()
    assert gradient == pytest.approx([-1 / max(total, 1)] * total)


@settings(max_examples=60, deadline=None)
@given(rows=answers)
def test_sums_means_and_last_numbers_of_answers_agree_with_a_loop(rows):
    """Values and gradients in float64, of empty answers too. Would not catch rounding in float32."""
    log_probs, lengths = tensors(rows)
    means = mean_rows(log_probs, lengths)
    assert sum_rows(log_probs, lengths).tolist() == pytest.approx(
        [math.fsum(row) for row in rows], rel=1e-12, abs=1e-12
    )
    expected = [math.fsum(row) / max(len(row), 1) for row in rows]
    assert means.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)

    def squares(flat: list[float]) -> float:
        values = iter(flat)
        return sum((math.fsum(next(values) for _ in row) / max(len(row), 1)) ** 2 for row in rows)

    slope = torch.autograd.grad(means.square().sum(), log_probs)[0].tolist()
    assert slope == pytest.approx(slopes(squares, log_probs.tolist()), abs=1e-6)
    full = [row for row in rows if row] or [[-1.0]]
    assert last_of_rows(*tensors(full)).tolist() == [row[-1] for row in full]


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
