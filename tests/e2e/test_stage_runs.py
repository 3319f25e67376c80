"""Whole runs of the stages before PPO: killed and resumed, over layouts, and what they leave for the next stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import RecordedRun
from short_runs import LOCAL, ONE, TP2, WITHOUT_RAY, metrics, reached, steps_saved
from stage_files import STAGES, command_of, keys_of, weights_apart
from sweeps import marks_of
from transformers import AutoModelForSequenceClassification

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.checkpoint.score_statistics import read_statistics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

OFTEN = ("sft",)


@pytest.fixture
def five_steps(recorded, files: Path) -> Callable[[str], RecordedRun]:
    """Of what is run (`STAGES`) a run in one process, left alone."""

    def run(stage: str) -> RecordedRun:
        return recorded(f"five steps of {stage}", *keys_of(files, stage), *LOCAL, stage=command_of(stage))

    return run


@pytest.mark.parametrize("stage", [pytest.param(name, marks=marks_of(name, OFTEN, ("kto",))) for name in STAGES])
def test_killed_stage_goes_on_exactly(command_line, five_steps, files: Path, stage: str) -> None:
    """`kill -9` in step 5: all metrics and the exported model are the uninterrupted run's, bit for bit.

    Weekly for kto, which keeps what dpo keeps. Would not catch a kill inside a save, which tests/checkpoint have
    at every instant.
    """
    keys, command = (*keys_of(files, stage), *LOCAL), command_of(stage)
    whole, killed = five_steps(stage), command_line(*keys, stage=command)
    killed.wait_for(reached(killed, 4), interval=0.02)
    killed.process.kill()
    assert killed.wait() in (-9, 0)
    saved = steps_saved(killed)[0]
    resumed = command_line(*keys, folder=killed.folder, stage=command)
    assert resumed.wait() == 0, resumed.text()
    assert steps_saved(whole) == [5, 4, 2]
    if saved < 5:
        assert f"resuming after step {saved}" in resumed.text()
    assert metrics(resumed) == metrics(whole)
    exported = [(run.run / "hf_model/model.safetensors").read_bytes() for run in (resumed, whole)]
    assert exported[0] == exported[1]
    summary = json.loads((whole.run / "summary.json").read_text())
    assert summary["stage"] == command and summary["hf_export_diff_max"] < 1e-4


@pytest.mark.exhaustive
def test_reward_goes_on_in_another_layout(command_line, five_steps, files: Path) -> None:
    """Saved at step 2 on two ranks of TP, finished on one: losses within rounding. test_stage_ends.py has sft and dpo.
    Would not catch what only larger grids do, which tests/dist go through."""
    keys, stage = keys_of(files, "reward"), "reward"
    whole, two = five_steps(stage), command_line(*keys, *TP2, WITHOUT_RAY, stage=stage)
    assert two.wait() == 0, two.text()
    other = command_line(
        *(*keys, *ONE, "--local", "trainer.resume_mode=resume_path"),
        f"trainer.resume_from_path={two.run / 'global_step_2'}",
        stage=stage,
    )
    assert other.wait() == 0, other.text()
    expected, found = metrics(whole), metrics(other)
    name = "critic/loss"
    assert list(found) == [3, 4, 5]
    for run in (metrics(two), found):
        for step in (3, 4, 5):
            assert run[step][name] == pytest.approx(expected[step][name], rel=1e-4)
    assert weights_apart(other, whole) < 1e-4


@pytest.mark.exhaustive
def test_reward_model_is_what_ppo_takes(command_line, five_steps, tmp_path: Path) -> None:
    """Its folder is a classifier with one label, with what validation said of its scores, which the export of its
    checkpoint has too; PPO scores with it, normalises by that, and its critic starts from it. Would not catch a reward
    model that has learned nothing."""
    reward = five_steps("reward")
    model = reward.run / "hf_model"
    head = AutoModelForSequenceClassification.from_pretrained(model)
    assert head.config.num_labels == 1 and head.score.weight.abs().sum() > 0
    assert json.loads((reward.run / "calibration.json").read_text())["bins"]
    last = json.loads((reward.run / "summary.json").read_text())["val_last"]
    export_saved(reward.run / "global_step_5", "critic", tmp_path / "exported")
    for folder in (model, tmp_path / "exported"):
        told = read_statistics(folder)
        assert told.mean == pytest.approx(last["val/score/mean"], rel=1e-5, abs=1e-6)
        assert told.std == pytest.approx(last["val/score/std"], rel=1e-5)
    ppo = command_line(
        *(*LOCAL, "reward_model.enable=true", f"reward_model.model.path={model}", f"critic.model.path={model}"),
        "reward_model.normalize_reward=held_out",
        *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.val_before_train=false"),
        *("trainer.total_training_steps=1", "custom_reward_function.name=null", "custom_reward_function.path=null"),
    )
    assert ppo.wait() == 0, ppo.text()
    found = metrics(ppo)[1]
    normalised = (found["reward/rm_score/mean"] - told.mean) / told.std
    assert found["reward/rm_reward/mean"] == pytest.approx(normalised, abs=1e-4)
    assert found["critic/score/mean"] == pytest.approx(found["reward/rm_reward/mean"], abs=1e-6)


@pytest.mark.exhaustive
def test_another_stage_does_not_go_on_from_a_checkpoint(command_line, five_steps, files: Path, tmp_path: Path) -> None:
    """Whether the role is the same or not, and PPO as little; by path, too. Would not catch a change of files, which
    the order of examples refuses."""
    folder = five_steps("sft").copy(tmp_path / "copy")
    by_path = (f"trainer.resume_from_path={folder / 'run/global_step_2'}", "trainer.resume_mode=resume_path")
    without_critic = ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
    for stage, keys, said in (
        ("dpo", keys_of(files, "dpo"), "was saved by sft, and this is dpo"),
        ("dpo", (*keys_of(files, "dpo"), *by_path), "was saved by sft, and this is dpo"),
        ("reward", keys_of(files, "reward"), "it has no critic, but actor"),
        ("train", without_critic, "was saved by sft, and this is ppo"),
    ):
        other = command_line(*keys, *LOCAL, folder=folder, stage=stage)
        assert other.wait() == 2, other.text()
        assert said in other.text() and "Traceback" not in other.text(), other.text()
