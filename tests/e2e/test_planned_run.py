"""A run with a hardware file: it is held to its plan, and says once which phases depart from it."""

from __future__ import annotations

import json

import pytest
import yaml

from megatron_rl.planning.hardware import FOLDER

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = (
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"),
    *("trainer.val_before_train=false", "trainer.test_freq=5040", "trainer.logger=[jsonl]", "trainer.export_hf=false"),
    *("trainer.total_training_steps=4", "--local", "--collapse"),
)


def test_phases_that_depart_are_said_once(command_line, tmp_path):
    """One process, with a file in which decode steps take a hundred seconds: generation is quicker, and said to be,
    once with both numbers; all else is too short beside that plan. Would not catch a wrong plan.
    """
    values = yaml.safe_load((FOLDER / "cpu.yaml").read_text())
    file = tmp_path / "slow.yaml"
    file.write_text(yaml.safe_dump(values | {"error": 0.2, "overheads": {"engine_step": 100.0}}))
    run = command_line(*SMALL, f"trainer.hardware_file={file}")
    assert run.wait() == 0, run.text()
    said = [line for line in run.text().splitlines() if "departs from its plan" in line]
    assert [line.split()[0] for line in said] == ["gen"], run.text()
    assert "s planned" in said[0] and "s measured" in said[0] and "the calibration's error is 20%" in said[0]
    steps = [json.loads(line) for line in run.metrics().splitlines()]
    (last,) = [step for step in steps if step["step"] == 4]
    # Answers end with their longest one, of 3 tokens and the end: each token takes a hundred seconds of the plan.
    assert 200 < last["timing_planned_s/gen"] < 900 and last["timing_s/gen"] < 10
    assert {name.removeprefix("timing_planned_s/") for name in last if name.startswith("timing_planned_s/")} == {
        "reshard", "gen", "old_log_prob", "ref", "values", "update_critic", "update_actor",
    }  # fmt: skip


def test_a_hardware_file_that_is_not_there_is_refused(command_line):
    """Before anything starts, with the files that there are. Would not catch one of another machine."""
    run = command_line("trainer.hardware_file=h10")
    assert run.wait() == 2 and not run.run.exists()
    text = " ".join(run.text().split())
    assert "trainer.hardware_file=h10 must be a hardware file" in text and "did you mean: h100" in text
