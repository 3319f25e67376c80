"""How long a run is, which defaults are verl's, and which are said not to be."""

from __future__ import annotations

import pytest

from megatron_rl.config.keys import KEYS
from megatron_rl.config.load import read_run
from megatron_rl.config.schema import DataConfig, RunConfig
from megatron_rl.config.steps import is_validation_step, num_steps, with_steps
from megatron_rl.config.trainer import TrainerConfig
from megatron_rl.config.verl_compat.default_differences import differences, verl_defaults

REQUIRED = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
MEGATRON = "actor_rollout_ref.actor.megatron"
EAGER = "actor_rollout_ref.rollout.enforce_eager=true"


@pytest.fixture
def read(tmp_path):
    (tmp_path / "run.yaml").write_text("{}\n")
    return lambda *overrides: read_run(tmp_path / "run.yaml", [*REQUIRED, *overrides])


@pytest.mark.parametrize(
    ("steps", "epochs", "num_prompts", "expected"),
    [
        (None, None, 64, 30 * 2),
        (7, None, 64, 7),
        (None, 3, 64, 6),
        (None, 3, 95, 6),  # what is left of an epoch is no batch
        (5, 3, 64, 5),
        (7, 3, 64, 6),
        (None, 3, 5, 3),  # fewer prompts than a batch: one step an epoch
    ],
)
def test_steps_by_hand(steps, epochs, num_prompts, expected):
    """Batches of 32. Would not catch epochs that dynamic sampling uses up sooner."""
    trainer = TrainerConfig(total_training_steps=steps, total_epochs=epochs)
    assert num_steps(RunConfig(trainer=trainer, data=DataConfig(gen_batch_size=32)), num_prompts) == expected


@pytest.mark.parametrize(
    ("test_freq", "before", "expected"),
    [(2, True, [2, 4, 5]), (2, False, [2, 4, 5]), (9, False, [5]), (0, True, [5]), (0, False, [])],
)
def test_validation_that_is_switched_off_stays_off(test_freq, before, expected):
    """Of five steps. Would not catch a validation at a run's end: tests/e2e/test_local_runs.py."""
    trainer = TrainerConfig(total_training_steps=5, test_freq=test_freq, val_before_train=before)
    assert [step for step in range(1, 6) if is_validation_step(trainer, step)] == expected


def test_steps_are_put_into_a_copy():
    """Would not catch a role that has read the number before."""
    config = RunConfig(data=DataConfig(gen_batch_size=2))
    with pytest.raises(ValueError, match="total_training_steps is null"):
        _ = config.trainer.num_steps
    assert with_steps(config, 9).trainer.num_steps == 120 and config.trainer.total_training_steps is None


def test_defaults_on_gpus_are_verls(read):
    """bfloat16, sequence parallelism, also of those who follow, and graphs; none of it on CPUs. Would not catch a third
    device.
    """
    config = read().config
    assert (config.critic.megatron.dtype, config.actor_rollout_ref.ref.megatron.sequence_parallel) == ("bfloat16", True)
    assert config.actor_rollout_ref.rollout.enforce_eager is False and config.async_training.second_buffer is False
    assert read(EAGER).config.actor_rollout_ref.rollout.enforce_eager is True
    config = read("trainer.device=cpu").config
    assert (config.critic.megatron.dtype, config.actor_rollout_ref.ref.megatron.sequence_parallel) == ("float32", False)
    assert config.actor_rollout_ref.rollout.enforce_eager is True
    config = read(f"{MEGATRON}.dtype=float32").config
    assert config.actor_rollout_ref.actor.megatron.dtype == "float32"
    assert not config.algorithm.use_kl_in_reward and not config.actor_rollout_ref.actor.shuffle


def test_differences_are_said_of_keys_left_alone(read):
    """Neither of a key that is set nor of one that means nothing. Would not catch one that verl has changed."""
    assert {default.key for default in verl_defaults()} <= KEYS.keys()
    reading = read("data.train_batch_size=64", "trainer.test_freq=0")
    found = {one.default.key: (one.here, one.default.verl) for one in differences(reading.config, reading.given)}
    assert found["actor_rollout_ref.actor.ppo_mini_batch_size"] == (32, 256)
    assert found["actor_rollout_ref.rollout.gpu_memory_utilization"] == (None, 0.5)
    assert not {"data.train_batch_size", "trainer.test_freq", f"{MEGATRON}.dtype"} & found.keys()
    assert "actor_rollout_ref.rollout.val_kwargs.temperature" not in found
    reading = read("trainer.device=cpu", "actor_rollout_ref.rollout.val_kwargs.do_sample=true")
    found = {one.default.key: one.here for one in differences(reading.config, reading.given)}
    assert found["actor_rollout_ref.rollout.enforce_eager"] is True
    assert found[f"{MEGATRON}.dtype"] == "float32" and found["actor_rollout_ref.rollout.val_kwargs.temperature"] == 1.0


def test_bounds_of_log_probs_follow_the_type(read):
    """On both devices, unless they are set. Would not catch a bound that lets a wrong weight pass."""
    for device in ("cpu", "cuda"):
        for dtype, bounds in (("float32", (1e-3, 1e-4)), ("bfloat16", (0.5, 0.05)), ("float16", (0.05, 0.005))):
            rollout = read(f"trainer.device={device}", f"{MEGATRON}.dtype={dtype}").config.actor_rollout_ref.rollout
            assert (rollout.logprob_diff_bound, rollout.logprob_diff_mean_bound) == bounds
    rollout = read("actor_rollout_ref.rollout.logprob_diff_mean_bound=0.7").config.actor_rollout_ref.rollout
    assert (rollout.logprob_diff_bound, rollout.logprob_diff_mean_bound) == (0.5, 0.7)
