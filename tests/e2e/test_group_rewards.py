"""Runs whose reward function compares the responses to a prompt."""

from __future__ import annotations

import json

import pytest
from short_runs import ONE, WITHOUT_RAY

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

GRPO = "configs/grpo_cpu.yaml"
RANKS = (
    "custom_reward_function.path=scripts/demo_group_reward.py",
    "custom_reward_function.name=compute_group_scores",
    "custom_reward_function.per_group=true",
)


@pytest.mark.exhaustive
def test_the_demo_learns_from_ranks(command_line) -> None:
    """Ranks within a group have the mean 0.5 in every step, and the policy learns all the same.

    Would not catch a rank that is compared with another prompt's responses; tests/scoring has these by hand.
    """
    run = command_line(*ONE, WITHOUT_RAY, *RANKS, "data.val_files=assets/demo/test.parquet", config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [json.loads(line) for line in run.metrics().splitlines()]
    assert all(step["critic/score/mean"] == pytest.approx(0.5) for step in steps if "critic/score/mean" in step)
    assert json.loads((run.run / "summary.json").read_text())["val_accuracy_after"] >= 0.95
