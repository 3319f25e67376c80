"""Runs that preflight lets pass, for tests to break one rule at a time."""

from __future__ import annotations

import pytest
from model_folders import EXPERTS, REWARD, set_experts, write_model, write_prompts

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.config.schema import RunConfig


@pytest.fixture
def config(tmp_path) -> RunConfig:
    """Six ranks, TP2 x PP3, everything in order; interpolated defaults written out."""
    for name in ("train.parquet", "test.parquet"):
        write_prompts(tmp_path / name)
    (tmp_path / "reward.py").write_text(REWARD)
    config = RunConfig()
    config.data.train_files, config.data.val_files = str(tmp_path / "train.parquet"), str(tmp_path / "test.parquet")
    config.data.gen_batch_size = config.data.train_batch_size
    config.data.max_prompt_length, config.data.max_response_length = 16, 48
    config.custom_reward_function.path = str(tmp_path / "reward.py")
    shared, critic, trainer = config.actor_rollout_ref, config.critic, config.trainer
    shared.model.path = critic.model.path = write_model(tmp_path / "model")
    for role in (shared.actor, shared.ref, critic):
        role.megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    shared.rollout.tensor_model_parallel_size = 2
    shared.rollout.pool = shared.ref.pool = shared.actor.pool
    shared.rollout.n_gpus_per_node = config.reward_model.n_gpus_per_node = 6
    shared.actor.clip_ratio_low = shared.actor.clip_ratio_high = shared.actor.clip_ratio
    critic.loss_agg_mode, critic.loss_scale_factor = shared.actor.loss_agg_mode, None
    critic.ppo_mini_batch_size, critic.ppo_micro_batch_size_per_gpu, critic.ppo_epochs = 32, 64, 1
    critic.forward_micro_batch_size_per_gpu = shared.ref.log_prob_micro_batch_size_per_gpu = 128
    critic.use_dynamic_bsz = shared.ref.log_prob_use_dynamic_bsz = shared.rollout.log_prob_use_dynamic_bsz = False
    critic.ppo_max_token_len_per_gpu = critic.forward_max_token_len_per_gpu = shared.actor.ppo_max_token_len_per_gpu
    shared.ref.log_prob_max_token_len_per_gpu = shared.actor.ppo_max_token_len_per_gpu
    shared.rollout.log_prob_max_token_len_per_gpu = shared.actor.ppo_max_token_len_per_gpu
    reward = config.reward_model
    reward.micro_batch_size_per_gpu, reward.use_dynamic_bsz = 128, False
    reward.model.use_remove_padding = True
    reward.forward_max_token_len_per_gpu = shared.actor.ppo_max_token_len_per_gpu
    reward.megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=3)
    trainer.device, trainer.n_gpus_per_node = "cpu", 6
    trainer.default_local_dir = str(tmp_path / "out")
    config.algorithm.use_kl_in_reward = True
    config.ptx.mini_batch_size = shared.actor.ppo_mini_batch_size
    return config


@pytest.fixture
def moe_config(config, tmp_path) -> RunConfig:
    """8 experts of 20 columns; twelve ranks, TP2 x PP3, so 4 a stage. The dense MLP's 191 columns are not used."""
    write_model(tmp_path / "model", **EXPERTS, intermediate_size=191)
    config.trainer.n_gpus_per_node = 12
    set_experts(config, sequence_parallel=True)
    return config
