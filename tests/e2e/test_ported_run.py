"""A launch script of verl's Megatron trainer, shrunk by overrides alone, trains after `port`."""

from __future__ import annotations

import shlex

import pytest
from command_line import REPOSITORY
from forked_run import ForkedRun
from short_runs import metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

ARGUMENTS = REPOSITORY / "tests/port/verl_scripts/examples_grpo_trainer_run_qwen2-7b_math_megatron.args"
SHRUNK = (
    "actor_rollout_ref.model.path=assets/demo/model",
    "data.train_files=assets/demo/train.parquet",
    "data.val_files=assets/demo/test.parquet",
    "data.train_batch_size=8",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.max_num_seqs=64",
    "+custom_reward_function.path=scripts/demo_reward.py",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=4",
    "trainer.logger=['console','jsonl']",
    "trainer.val_before_train=False",
    "trainer.test_freq=2",
    "trainer.save_freq=-1",
    "+trainer.log_val_generations=2",
    "trainer.total_training_steps=2",
)
"""The demo's model, data and lengths in place of a 7B model's; a batch of 8 prompts."""


@pytest.mark.exhaustive
def test_a_script_of_verl_trains(command_line, tmp_path) -> None:
    """Two steps of GRPO with a KL loss; nothing of substance is lost. Would not catch steps that differ from verl's."""
    script, config = tmp_path / "run.sh", tmp_path / "run.yaml"
    lines = [shlex.quote(line) for line in ARGUMENTS.read_text().splitlines() if line]
    script.write_text(" \\\n    ".join(["set -x\npython3 -m verl.trainer.main_ppo", *lines]) + ' "$@"\n')
    said = tmp_path / "port.txt"
    port = ForkedRun(["port", "--out", str(config), str(script), *SHRUNK], REPOSITORY, {}, said)
    assert port.wait() == 0 and "not supported: nothing" in said.read_text(), said.read_text()
    memory = "actor_rollout_ref.rollout.kv_cache_memory_bytes=67108864"
    run = command_line("--local", "--collapse", memory, config=str(config))
    assert run.wait() == 0, run.text()
    logged = metrics(run)
    assert list(logged) == [1, 2]
    assert all(step["actor/grad_norm"] > 0 and "actor/kl_loss" in step for step in logged.values())
    assert len((run.run / "val_generations/2.jsonl").read_text().splitlines()) == 2
