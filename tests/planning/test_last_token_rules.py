"""Prompts that samples share in part, and groups that a step leaves to the next: what is refused, word for word."""

from __future__ import annotations

import pytest
from model_folders import problems

from megatron_rl.config.keys import put

ROLLOUT = "actor_rollout_ref.rollout"
UNIT = f"{ROLLOUT}.prefix_match_unit"
OWN_POOL = {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 2}


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


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"async_training.straggler_policy": "resample"},
        {"algorithm.adv_estimator": "remax"},
        {f"{ROLLOUT}.multi_turn.enable": True},
        OWN_POOL,
    ],
)
def test_late_groups_pass(late, change):
    """Would not catch a rule that is missing."""
    for key, value in change.items():
        put(late, key, value)
    assert [text for text in problems(late) if "over_sample_rate" in text or "rollout_ahead" in text] == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {f"{ROLLOUT}.over_sample_rate": 0.6},
            f"{ROLLOUT}.over_sample_rate=0.6 must be >= 0 and <= 0.5; try: 0.5",
        ),
        (
            OWN_POOL | {"trainer.rollout_ahead": 1},
            f"{ROLLOUT}.over_sample_rate=0.2 and trainer.rollout_ahead=1 on a pool of its own needs "
            "trainer.rollout_ahead > async_training.trigger_parameter_sync_step=1: a group that begins during training "
            "is that old, and one step older if it is late; try: trainer.rollout_ahead=2",
        ),
    ],
)
def test_late_groups_refused(late, change, expected):
    """Word for word. Would not catch another sentence beside it."""
    for key, value in change.items():
        put(late, key, value)
    assert expected in problems(late)
