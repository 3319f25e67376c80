"""Prompts that samples share in part: what is refused before anything starts, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_folders import EXPERTS, problems, set_experts, write_model

ROLLOUT = "actor_rollout_ref.rollout"
UNIT = f"{ROLLOUT}.prefix_match_unit"


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (1, []),
        (32, []),
        (0, [f"{UNIT}=0 must be null (whole blocks) or >= 1; nearest: null"]),
        (5, [f"{UNIT}=5 must divide the 32 tokens of a block of the KV cache; nearest: 4"]),
        (48, [f"{UNIT}=48 must divide the 32 tokens of a block of the KV cache; nearest: 32"]),
    ],
)
def test_units(config, unit, expected):
    """Would not catch a kernel whose blocks have another size."""
    config.actor_rollout_ref.rollout.prefix_match_unit = unit
    assert problems(config) == expected


def test_no_gpu_has_run_it(config):
    """Would not catch a GPU that could."""
    config.actor_rollout_ref.rollout.prefix_match_unit, config.trainer.device = 4, "cuda"
    assert f"{UNIT}=4 needs trainer.device=cpu, and it is cuda: no GPU has run it; nearest: null" in problems(config)


def test_experts_of_shared_tokens_are_not_there(config):
    """Would not catch another feature that needs something of every token."""
    write_model(Path(config.actor_rollout_ref.model.path), **EXPERTS)
    set_experts(config, expert_model_parallel_size=1)
    config.actor_rollout_ref.rollout.enable_rollout_routing_replay = True
    config.actor_rollout_ref.rollout.prefix_match_unit = 4
    (problem,) = [text for text in problems(config) if UNIT in text]
    assert "must be null where the engine returns the experts of every token" in problem
