"""Runs that read images learn what is to be seen, and nothing where there is nothing to be seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from colour_task import write_colours
from short_runs import LOCAL, metrics
from sweeps import WEEKLY
from vision_folders import save_qwen3_vl_folder, save_qwen25_vl_folder

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

CONFIG = "configs/grpo_cpu.yaml"
HELD_OUT = "val-core/colour/acc/mean@1"


def keys_of(folder: Path, save=save_qwen25_vl_folder, side: int = 28, **options) -> tuple[str, ...]:
    return *write_colours(folder / "data", side, **options), f"actor_rollout_ref.model.path={save(folder / 'model')}"


@pytest.mark.exhaustive
def test_two_steps_of_a_run_with_images(command_line, tmp_path) -> None:
    """Engine beside trainer, and the export beside transformers, which reads the pictures themselves; the run says what
    it compared. The tower reads each of the 16 pictures once, for all samples, epochs, steps and the validation. Would
    not catch a model that learns nothing.
    """
    often = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_epochs=3")
    keys = (*keys_of(tmp_path), *LOCAL, "trainer.total_training_steps=2", *often)
    run = command_line(*keys, config=CONFIG)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert all(steps[step]["training/rollout_logprob_diff_max"] <= 5e-5 for step in (1, 2))
    assert [steps[step]["images/tower_passes"] for step in (1, 2)] == [16, 16]


@pytest.mark.parametrize(
    ("save", "side", "is_noise"),
    [
        pytest.param(save_qwen25_vl_folder, 28, False, marks=WEEKLY, id="Qwen2.5-VL"),
        pytest.param(save_qwen3_vl_folder, 32, False, marks=WEEKLY, id="Qwen3-VL"),
        pytest.param(save_qwen25_vl_folder, 28, True, marks=WEEKLY, id="noise"),
    ],
)
def test_the_colour_of_a_square_is_learned(command_line, tmp_path, save, side: int, is_noise: bool) -> None:
    """From a quarter to nearly all in 30 steps; with noise in place of pictures no more than a third is right. Would
    not catch a place that is read as another.
    """
    keys = keys_of(tmp_path, save, side, is_noise=is_noise)
    run = command_line(*keys, *LOCAL, "trainer.seed=1", config=CONFIG)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert steps[0][HELD_OUT] <= 0.35
    assert steps[30][HELD_OUT] <= 0.35 if is_noise else steps[30][HELD_OUT] >= 0.95


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=WEEKLY, id="asynchronous")])
def test_replicas_read_images_while_the_actor_trains(command_line, tmp_path, ahead: int) -> None:
    """Two replicas on ranks of their own, a trainer of TP2 with sequence parallelism, and a resumed run: engine beside
    trainer. Would not catch a replica that is lost.
    """
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
    keys = [
        *keys_of(tmp_path, save_qwen3_vl_folder, 32),
        *("trainer.n_gpus_per_node=2", f"{actor}.tensor_model_parallel_size=2", "trainer.launcher=local"),
        *("actor_rollout_ref.hybrid_engine=false", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=2"),
        *(f"{rollout}.tensor_model_parallel_size=1", f"trainer.rollout_ahead={ahead}", "trainer.save_freq=2"),
        *("async_training.partial_rollout=true", "algorithm.rollout_correction.rollout_is=token"),
    ]
    for last in (2, 4):
        run = command_line(*keys, f"trainer.total_training_steps={last}", config=CONFIG)
        assert run.wait() == 0, run.text()
    assert sorted(metrics(run)) == [0, 1, 2, 3, 4]
    compared = [step.get("training/rollout_logprob_diff_max") for step in metrics(run).values()]
    assert max(worst for worst in compared if worst is not None) <= 5e-5  # of steps that one policy sampled
