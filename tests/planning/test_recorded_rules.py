"""Rules of training on recorded samples, before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.config.load import load_config
from megatron_rl.planning.recorded_rules import recorded_problems

REPOSITORY = Path(__file__).parents[2]


def problems(*overrides: str, config_only: bool = False) -> list[str]:
    config = load_config(REPOSITORY / "configs/demo_cpu.yaml", overrides)
    return [str(problem) for problem in recorded_problems(config, config_only)]


def test_a_run_without_a_record_and_one_with_it_have_no_problem(tmp_path):
    """Would not catch a record of another batch size, which is refused when the run starts."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples/1.safetensors").touch()
    assert problems() == problems(f"trainer.rollouts_from={tmp_path}") == []
    assert problems(f"trainer.rollouts_from={tmp_path / 'elsewhere'}", config_only=True) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "has none; record a run with trainer.recorded_prompts=-1"),
        (["trainer.default_local_dir={run}"], "must be another folder than trainer.default_local_dir"),
        (["trainer.default_local_dir={run}"], "try: trainer.default_local_dir={run}_again"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(tmp_path, overrides, said):
    run = str(tmp_path)
    found = problems(f"trainer.rollouts_from={run}", *(text.format(run=run) for text in overrides))
    assert any(said.format(run=run) in problem for problem in found), found
