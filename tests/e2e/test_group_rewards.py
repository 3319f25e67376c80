"""Runs whose reward function compares the responses to a prompt."""

from __future__ import annotations

import json

import pytest
from short_runs import LOCAL, ONE, WITHOUT_RAY, metrics

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


VERDICT = """
def keep_group(rows):
    assert len(rows) == 8 and all({"score", "acc", "num_tokens"} <= row.keys() for row in rows)
    return rows[0]["index"] % 4 != 0 and len({row["acc"] for row in rows}) > 1
"""


@pytest.mark.exhaustive
def test_groups_are_scored_and_judged_in_processes(command_line, tmp_path) -> None:
    """Ranks differ in nearly every group: the verdict alone drops those with equal accuracies, and a quarter more. What
    each response got is in the samples' tables, and the same run in one process has the same bits.

    Would not catch a verdict on rows of another group; tests/sampling has these by hand.
    """
    (tmp_path / "mine.py").write_text(VERDICT)
    keys = (
        *RANKS,
        *("data.train_batch_size=8", "data.gen_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=2"),
        f"algorithm.filter_groups.path={tmp_path / 'mine.py'}",
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
    )
    run = command_line(*ONE, WITHOUT_RAY, *keys, config="configs/dapo_cpu.yaml")
    assert run.wait() == 0, run.text()
    trained = {step: line for step, line in metrics(run).items() if "train/differing_groups" in line}
    assert len(trained) == 2 and all(0 < line["filter_groups/kept_ratio"] < 0.9 for line in trained.values())
    assert all(line["filter_groups/raised"] == line["reward/raised"] == 0 for line in trained.values())
    rows = [json.loads(line) for line in (tmp_path / "samples/1.jsonl").read_text().splitlines()]
    assert len(rows) == 64 and {row["acc"] for row in rows} == {0.0, 1.0}
    here = command_line(*LOCAL, *keys, config="configs/dapo_cpu.yaml")
    assert here.wait() == 0, here.text()
    assert metrics(here) == metrics(run)
