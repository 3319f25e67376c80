"""How old tokens are, and what is said of them."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_rl.experience.staleness import is_fresh, staleness, staleness_metrics
from megatron_rl.records import Batch, ragged, single_turn


def experience(versions: list[list[int]] | None, log_ratio: list[float]) -> Batch:
    """Rows of 2, 1 and 0 tokens; the trainer's log-probs are the rollout's plus `log_ratio`."""
    lengths = torch.tensor([2, 1, 0])
    rollout = torch.tensor([-1.0, -2.0, -0.5])
    old = (rollout + torch.tensor(log_ratio)).split(lengths.tolist())
    return single_turn(
        ragged([torch.zeros(3, dtype=torch.int64)] * 3),
        lengths,
        rollout_log_probs=ragged(list(rollout.split(lengths.tolist()))),
        versions=None if versions is None else ragged([torch.tensor(row, dtype=torch.int64) for row in versions]),
        old_log_probs=ragged(list(old)),
    )


def test_age_is_counted_from_the_weights_that_the_step_begins_with() -> None:
    """By hand: step 5 begins with version 4. Would not catch versions that are stamped wrong."""
    found = experience([[2, 4], [4], []], [0.1, 0.0, 0.2])
    assert staleness(found, step=5).tolist() == [2, 0, 0]
    assert is_fresh(found, step=5).tolist() == [False, False, True]
    metrics = staleness_metrics(found, step=5)
    assert metrics["staleness/mean"] == pytest.approx(2 / 3) and metrics["staleness/max"] == 2
    assert metrics["staleness/mixed_answers"] == pytest.approx(1 / 3)
    assert metrics["staleness/2/share"] == pytest.approx(1 / 3)
    assert metrics["staleness/2/kl"] == pytest.approx(-0.1, abs=1e-6)
    assert metrics["staleness/2/k3"] == pytest.approx(math.exp(0.1) - 1 - 0.1, abs=1e-6)
    assert metrics["staleness/0/kl"] == pytest.approx(-0.1, abs=1e-6)


def test_synchronous_samples_are_all_fresh() -> None:
    """And nothing is said of them. Would not catch a synchronous run that forgets to send weights."""
    found = experience(None, [0.0, 0.0, 0.0])
    assert is_fresh(found, step=9).all() and staleness_metrics(found, step=9) == {}
