"""Prompts that samples share in part, and groups that a step leaves to the next: what is refused, word for word."""

from __future__ import annotations

import pytest
from model_folders import problems

from megatron_rl.config.keys import put

ROLLOUT = "actor_rollout_ref.rollout"
UNIT = f"{ROLLOUT}.prefix_match_unit"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (1, []),
        (32, []),
        (0, [f"{UNIT}=0 must be null (whole blocks) or >= 1; try: null"]),
        (5, [f"{UNIT}=5 must divide the 32 tokens of a block of the KV cache; try: 4"]),
        (48, [f"{UNIT}=48 must divide the 32 tokens of a block of the KV cache; try: 32"]),
    ],
)
def test_units(config, unit, expected):
    """Would not catch a kernel whose blocks have another size."""
    config.actor_rollout_ref.rollout.prefix_match_unit = unit
    assert problems(config) == expected


@pytest.fixture
def late(config):
    """A fifth of the groups may be late."""
    config.actor_rollout_ref.rollout.over_sample_rate, config.trainer.rollout_ahead = 0.2, 2
    config.async_training.partial_rollout = True
    config.algorithm.rollout_correction.rollout_is = "token"
    return config


def test_late_groups_pass(late):
    """Would not catch a rule that is missing."""
    assert problems(late) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {f"{ROLLOUT}.over_sample_rate": 0.6},
            f"{ROLLOUT}.over_sample_rate=0.6 must be >= 0 and <= 0.5; try: 0.5",
        ),
    ],
)
def test_late_groups_refused(late, change, expected):
    """Word for word. Would not catch another sentence beside it."""
    for key, value in change.items():
        put(late, key, value)
    assert expected in problems(late)
