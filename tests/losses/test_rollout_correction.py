"""Weights and masks for samples that the rollout engine drew with slightly other probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RolloutCorrectionConfig
from megatron_rl.losses.rollout_correction import accepted, correct_rollout, importance_weights, not_vetoed

LENGTHS = torch.tensor([2, 1])
LOG_RATIO = torch.tensor([2.0, 0.25, 4.0]).log()  # products 0.5 and 4, means sqrt(0.5) and 4


@pytest.mark.parametrize(("level", "expected"), [("token", [2.0, 0.25, 3.0]), ("sequence", [0.5, 0.5, 3.0])])
def test_weights_by_hand(level, expected):
    """Truncated at 3. Would not catch weights that are not multiplied with a loss."""
    assert importance_weights(LOG_RATIO, LENGTHS, level, 3.0).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "low", "high", "expected"),
    [
        ("token", 0.5, 2.5, [1, 0, 0]),
        ("sequence", 0.4, 2.5, [1, 1, 0]),
        ("sequence", 0.6, 5.0, [0, 0, 1]),
        ("geometric", 0.7, 1.0, [1, 1, 0]),
        ("geometric", 0.71, 5.0, [0, 0, 1]),
    ],
)
def test_masks_by_hand(level, low, high, expected):
    """Both ends. Would not catch a mask that leaves the number of tokens as it was."""
    assert accepted(LOG_RATIO, LENGTHS, level, low, high).tolist() == expected


def test_veto_takes_the_whole_answer():
    """One token of ratio 0.25 below 0.3. Would not catch a ratio that overflows."""
    assert not_vetoed(LOG_RATIO, LENGTHS, 0.3).tolist() == [0.0, 0.0, 1.0]
    assert not_vetoed(LOG_RATIO, LENGTHS, 0.2).tolist() == [1.0, 1.0, 1.0]


def test_unknown_level():
    """Would not catch one that preflight lets pass."""
    with pytest.raises(ValueError, match="word is no level"):
        importance_weights(LOG_RATIO, LENGTHS, "word", 2.0)


def correct(**keys) -> tuple:
    return correct_rollout(LOG_RATIO, torch.zeros(3), LENGTHS, RolloutCorrectionConfig(**keys))


def test_what_is_configured():
    """Weights alone, a mask alone, both with normalisation. Would not catch a metric that is absent."""
    assert correct() == (None, None, {})
    weights, kept, metrics = correct(rollout_is="token")
    assert weights.tolist() == pytest.approx([2.0, 0.25, 2.0]) and kept is None
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(4.25 / 3)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(4.25**2 / 3 / (4 + 0.0625 + 4))
    weights, kept, metrics = correct(rollout_rs="token", rollout_rs_threshold=2.0, rollout_token_veto_threshold=1e-4)
    assert weights is None and kept.tolist() == [1.0, 0.0, 0.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.0
    keys = {"rollout_is": "token", "rollout_is_threshold": 4.0, "rollout_is_batch_normalize": True}
    weights, kept, _ = correct(**keys, rollout_rs="token", rollout_rs_threshold_lower=1.0)
    # Kept are 2 and 4, of mean 3
    assert kept.tolist() == [1.0, 0.0, 1.0] and weights.tolist() == pytest.approx([2 / 3, 0.25 / 3, 4 / 3])


def test_everything_left_out_is_no_error():
    """A whole batch below the veto. Would not catch an update that is taken for it; `tests/dist` does."""
    weights, kept, metrics = correct(rollout_is="sequence", rollout_token_veto_threshold=1.0, rollout_rs="token")
    assert kept.tolist() == [0.0, 0.0, 0.0] and torch.isfinite(weights).all()
    assert "rollout_corr/rollout_is_mean" not in metrics


rows = st.lists(st.lists(st.floats(-3, 3), max_size=4), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=rows, threshold=st.sampled_from([1.1, 2.0, 10.0]))
def test_agrees_with_a_loop(rows, threshold):
    """Python floats, both levels of weights. Would not catch ratios beyond e^20."""
    lengths = torch.tensor([len(row) for row in rows])
    log_ratio = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    by_token = [min(math.exp(x), threshold) for row in rows for x in row]
    by_answer = [min(math.exp(sum(row)), threshold) for row in rows for _ in row]
    assert importance_weights(log_ratio, lengths, "token", threshold).tolist() == pytest.approx(by_token, rel=1e-6)
    assert importance_weights(log_ratio, lengths, "sequence", threshold).tolist() == pytest.approx(by_answer, rel=1e-6)
