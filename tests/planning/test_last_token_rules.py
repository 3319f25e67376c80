"""Prompts that samples share in part, and groups that a step leaves to the next: what is refused, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import EXPERTS, problems, set_experts, write_model

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


def test_no_gpu_has_run_it(config):
    """Would not catch a GPU that could."""
    config.actor_rollout_ref.rollout.prefix_match_unit, config.trainer.device = 4, "cuda"
    assert f"{UNIT}=4 needs trainer.device=cpu, and it is cuda: no GPU has run it; try: null" in problems(config)


def test_experts_of_shared_tokens_are_not_there(config):
    """Would not catch another feature that needs something of every token."""
    write_model(Path(config.actor_rollout_ref.model.path), **EXPERTS)
    set_experts(config, expert_model_parallel_size=1)
    config.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
    config.actor_rollout_ref.rollout.prefix_match_unit = 4
    (problem,) = [text for text in problems(config) if UNIT in text]
    assert "must be null where the engine returns the experts of every token: vLLM keeps those of whole" in problem


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
        (
            {"trainer.rollout_ahead": 0},
            f"{ROLLOUT}.over_sample_rate=0.2 and trainer.rollout_ahead=0 needs trainer.rollout_ahead >= 1, the steps "
            "that a group may be late: its tokens are trained that many steps later; try: 0",
        ),
        (
            {"async_training.straggler_policy": "resample"},
            "async_training.straggler_policy=resample must be wait with over_sample_rate: the last responses of a "
            "batch continue in the next step; try: wait",
        ),
        (
            {"algorithm.adv_estimator": "remax"},
            f"{ROLLOUT}.over_sample_rate=0.2 and algorithm.adv_estimator=remax must be 0 where an estimator compares "
            f"with greedy responses, which are generated with their batch; try: 0",
        ),
        (
            {f"{ROLLOUT}.multi_turn.enable": True},
            f"{ROLLOUT}.over_sample_rate=0.2 and {ROLLOUT}.multi_turn.enable=true must be 0 with multi-turn "
            f"episodes: an environment identifies an episode by its position in the batch; try: 0",
        ),
        (
            {"actor_rollout_ref.hybrid_engine": False, f"{ROLLOUT}.nnodes": 1, f"{ROLLOUT}.n_gpus_per_node": 2},
            f"{ROLLOUT}.over_sample_rate=0.2 must be 0 where the rollout has a pool of its own: replicas continue "
            "with later batches without waiting; try: 0",
        ),
    ],
)
def test_late_groups_refused(late, change, expected):
    """Word for word. Would not catch another sentence beside it."""
    for key, value in change.items():
        put(late, key, value)
    assert expected in problems(late)


def test_batches_beside_the_schedule_have_no_order(config):
    """Would not catch another way to draw beside it."""
    config.actor_rollout_ref.rollout.longest_first = True
    assert problems(config) == []
    config.algorithm.filter_groups.enable = True
    assert (
        f"{ROLLOUT}.longest_first=true must be false with algorithm.filter_groups.enable=true, whose batches are "
        "not part of the schedule; try: false"
    ) in problems(config)
