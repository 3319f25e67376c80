"""Of pairs that a reward model calls p likely, how many are in the right order."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.tasks.calibration import calibration_bins, expected_error


def test_bins_by_hand() -> None:
    """Three pairs: two of probability 3/4, one of them the wrong way round, and one of 0.99. Would not catch pairs that
    are drawn twice in the picture."""
    ahead = math.log(3)
    scores = torch.tensor([ahead, 0.0, 0.0, ahead, math.log(99), 0.0])
    bins = calibration_bins(scores, torch.tensor([2, 2, 2]), num_bins=5)
    assert [(one.pairs, one.right) for one in bins] == [(2, 0.5), (1, 1.0)]
    assert [one.mean for one in bins] == pytest.approx([0.75, 0.99])
    assert expected_error(bins) == pytest.approx((2 * 0.25 + 0.01) / 3)


def test_answers_with_scores_alone_have_no_pairs() -> None:
    """Would not catch a picture that is drawn of nothing."""
    assert calibration_bins(torch.ones(3), torch.tensor([1, 1, 1])) == [] and expected_error([]) == 0.0
