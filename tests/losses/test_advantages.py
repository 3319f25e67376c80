"""Generalised advantage estimation and whitening."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.losses.advantages import gae, whiten


def test_three_tokens_by_hand():
    """gamma 0.9, lambda 0.8, reward on the last token. Would not catch a mask that is ignored."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.6, 0.7]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.9, lam=0.8)
    # delta = 0.9*0.6-0.5, 0.9*0.7-0.6, 1-0.7 = 0.04, 0.03, 0.3; then A_t = delta_t + 0.72 A_{t+1}
    torch.testing.assert_close(advantages, torch.tensor([[0.21712, 0.246, 0.3]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([[0.71712, 0.846, 1.0]]), atol=1e-6, rtol=0)


def test_lambda_one_is_return_minus_value_and_zero_is_one_step():
    """The two ends of lambda, gamma 1. Would not catch an error that needs gamma < 1."""
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.25, 1.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert gae(rewards, values, mask, 1.0, 1.0)[1].tolist() == [[6.0, 5.0, 3.0]]
    assert gae(rewards, values, mask, 1.0, 0.0)[0].tolist() == [[0.75, 2.75, 2.0]]


def advantage_of(t, rewards, values, gamma, lam):
    """The defining sum over the tokens from t on, in Python floats."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return sum((gamma * lam) ** n * delta for n, delta in enumerate(deltas[t:]))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    seed=st.integers(0, 999),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_agrees_with_the_defining_sum_on_ragged_rows(lengths, seed, gamma, lam, dtype):
    """Rows of any length, NaN in the padding. Would not catch an error shared with the formula."""
    longest = max(lengths) or 1
    rewards, values = torch.rand(2, len(lengths), longest, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    expected = torch.zeros(len(lengths), longest, dtype=torch.float64)
    for row, length in enumerate(lengths):
        row_rewards, row_values = rewards[row, :length].tolist(), values[row, :length].tolist()
        for t in range(length):
            expected[row, t] = advantage_of(t, row_rewards, row_values, gamma, lam)
    nan = torch.tensor(torch.nan, dtype=dtype)
    advantages, returns = gae(torch.where(mask, rewards, nan), torch.where(mask, values, nan), mask, gamma, lam)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-12, "rtol": 0}
    torch.testing.assert_close(advantages.double(), expected, **tolerance)
    torch.testing.assert_close(returns.double(), expected + torch.where(mask, values.double(), 0.0), **tolerance)
    assert advantages[~mask].eq(0).all() and returns[~mask].eq(0).all()


def test_whiten_by_hand():
    """Variance of 1, 2, 3, 4 is 5/3, unbiased. Would not catch a large eps."""
    scale = (3 / 5) ** 0.5
    expected = torch.tensor([-1.5, -0.5, 0.5, 1.5]) * scale
    torch.testing.assert_close(whiten(torch.tensor([1.0, 2.0, 3.0, 4.0])), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("values", [[], [5.0], [2.0, 2.0, 2.0]])
def test_whiten_without_spread_is_zero_and_finite(values):
    """Nothing, one value, equal values. Would not catch values that differ by less than eps."""
    assert whiten(torch.tensor(values)).tolist() == [0.0] * len(values)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), size=st.integers(2, 50), shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_whiten_forgets_shift_and_scale(seed, size, shift, scale):
    """Mean 0, variance 1, order kept. Would not catch a whitening per row instead of per batch."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + shift
    white = whiten(values, eps=0.0)
    assert abs(float(white.mean())) < 1e-9 and abs(float(white.var()) - 1) < 1e-9
    assert torch.equal(white.argsort(), values.argsort())
