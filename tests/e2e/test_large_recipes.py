"""The largest recipes, shrunk to a few CPU processes by overrides alone: the same losses and kinds of splits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from short_runs import MEGATRON, WITHOUT_RAY, metrics
from test_several_nodes import tiny_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TINY = (
    WITHOUT_RAY,
    *("data.train_files=assets/demo/train.parquet", "data.max_prompt_length=16", "data.max_response_length=8"),
    *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=4"),
    *("custom_reward_function.path=scripts/demo_reward.py", "trainer.device=cpu", "trainer.nnodes=1"),
    *("trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    *("trainer.export_hf=false", "trainer.logger=[jsonl]", "trainer.val_before_train=false"),
    *(f"{ROLLOUT}.kv_cache_memory_bytes=67108864", f"{ROLLOUT}.max_num_batched_tokens=4096"),
    *(f"{MEGATRON}.expert_model_parallel_size=2", f"{MEGATRON}.dtype=float32"),
    # A random model earns nothing; what its answers' lengths cost it differs.
    *("reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=4"),
)


@pytest.mark.exhaustive
def test_gspo_on_235b(command_line, tmp_path: Path) -> None:
    """TP2 x PP2 with EP2, replayed routers, Adam on the host, recomputed layers: a step without a skipped update.

    Would not catch what only 64 GPUs show, nor bad learning: the model is random.
    """
    keys = (
        *TINY,
        *("trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=2"),
        *(f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"),
        *(f"{MEGATRON}.num_layers_in_{end}_pipeline_stage=null" for end in ("first", "last")),
        f"{ACTOR}.ppo_max_token_len_per_gpu=48",
        f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}",
    )
    run = command_line(*keys, config="configs/qwen3_235b_a22b_gspo.yaml")
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["layout"] == {"world_size": 4, "tp": 2, "pp": 2, "cp": 1, "dp": 1, "rollout_tp": 2}
    (step,) = metrics(run).values()
    assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0 and "actor/kl_loss" not in step
    assert step["training/rollout_logprob_diff_max"] < 5e-5


@pytest.mark.exhaustive
def test_distillation_from_a_pool_of_its_own(command_line, tmp_path: Path) -> None:
    """TP2 x PP2 with a teacher of another family and size on two other ranks, over the whole vocabulary, no reward.

    Would not catch a student that forgets what is not asked of it.
    """
    keys = (
        *TINY,
        *("trainer.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=2"),
        *("trainer.total_training_steps=4", f"{ACTOR}.optim.lr=3e-3", f"{ACTOR}.ppo_mini_batch_size=8"),
        *(f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.pipeline_model_parallel_size=2"),
        *("pools.teachers.n_gpus_per_node=2", "distillation.teacher_models.expert.model_path=assets/demo/model"),
        f"{MEGATRON}.expert_model_parallel_size=1",
        f"{ACTOR}.ppo_max_token_len_per_gpu=48",
        f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}",
    )
    run = command_line(*keys, config="configs/recipes/llama3_70b_distill.yaml")
    assert run.wait() == 0, run.text()
    first, *_, last = metrics(run).values()
    assert first["actor/grad_norm"] > 0 and first["actor/pg_loss"] == 0
    assert last["distillation/loss"] < 0.9 * first["distillation/loss"]


@pytest.mark.exhaustive
def test_128k_grpo(command_line, tmp_path: Path) -> None:
    """Up to CP2 with EP2: 12 tokens on a rank are half of the longest sequence; a leash to the reference.

    Would not catch what long sequences alone show; the planner and tests/parity know of these.
    """
    keys = (
        *TINY,
        *("trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=1"),
        *(f"{MEGATRON}.tensor_model_parallel_size=1", f"{MEGATRON}.context_parallel_size=2"),
        f"{ACTOR}.ppo_max_token_len_per_gpu=12",
        f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}",
    )
    run = command_line(*keys, config="configs/recipes/qwen3_30b_a3b_128k_grpo.yaml")
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["layout"] == {"world_size": 2, "tp": 1, "pp": 1, "cp": 2, "dp": 1, "rollout_tp": 1}
    (step,) = metrics(run).values()
    assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0 and step["actor/kl_loss"] >= 0
    assert step["training/rollout_logprob_diff_max"] < 5e-5
