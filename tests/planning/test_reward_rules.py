"""What preflight says of reward models whose scores are normalised. No model is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.checkpoint.score_statistics import ScoreStatistics, write_statistics
from megatron_rl.config.load import read_config
from megatron_rl.planning.file_rules import statistics_problems

DEMO = Path(__file__).parents[2] / "configs" / "demo_cpu.yaml"


@pytest.mark.parametrize("group", ["reward_model", "reward_models.strict"])
def test_statistics_must_be_there(tmp_path: Path, group: str):
    """Asked for and there, asked for and not there, and not asked for. Would not catch statistics of other scores."""
    keys = [f"{group}.model.path={tmp_path}", "reward_model.enable=true", "reward_model.model.path=nowhere"]
    config, _ = read_config(DEMO, [*reversed(keys), f"{group}.normalize_reward=held_out"])
    (tmp_path / "config.json").write_text("{}")
    (problem,) = statistics_problems(config)
    assert str(problem) == (
        f"{group}.normalize_reward=held_out needs the mean and spread of held-out scores in {group}.model.path="
        f"{tmp_path}: it has no reward_statistics.json, and its config.json no mean and std; try: running; "
        "megatron-rl reward writes them into the folder of the model that it exports"
    )
    write_statistics(tmp_path, ScoreStatistics(1.0, 2.0))
    assert list(statistics_problems(config)) == []
    config, _ = read_config(DEMO, [*reversed(keys), f"{group}.normalize_reward=running"])
    assert list(statistics_problems(config)) == []
