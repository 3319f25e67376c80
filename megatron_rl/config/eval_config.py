"""The configuration of an evaluation: a run's engines, layout and rewards, and nothing that trains. No torch."""

from __future__ import annotations

import copy

from megatron_rl.config.algorithm_keys import AlgorithmConfig
from megatron_rl.config.distillation_keys import DistillationConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.schema import PolicyLossConfig, RunConfig
from megatron_rl.config.trainer import GLOBAL_POOL

EVALUATION = "evaluation"
"""The folder, in that of a run, of the evaluation of a run's own configuration."""

TRAINING_ALONE = (
    *("algorithm.", "critic.", "distillation.", "ptx.", "custom_scorers.", "actor_rollout_ref.actor."),
    *("data.train_", "data.gen_batch_size", "data.shuffle", "trainer.total_", "trainer.save_", "trainer.resume_"),
    *("trainer.test_freq", "trainer.val_before_train", "trainer.critic_warmup", "trainer.max_", "trainer.copy_freq"),
    *("trainer.rollout_ahead", "trainer.rollouts_from", "trainer.recorded_prompts", "trainer.export_hf"),
    *("trainer.balance_batch", "trainer.rollout_data_dir", "trainer.log_val_generations"),
)
"""Beginnings of keys that an evaluation does not read."""
OF_RANKS = ("actor_rollout_ref.actor.pool", "actor_rollout_ref.actor.megatron.")
"""Those among them that it reads all the same, as the layout of its ranks follows from them."""


def is_read(key: str) -> bool:
    """Whether an evaluation may read this key."""
    return not key.startswith(TRAINING_ALONE) or key.startswith(OF_RANKS)


def for_evaluation(config: RunConfig) -> RunConfig:
    """Return a deep copy that generates for the prompts of `data.val_files`, which are its training prompts, too, as
    none are read for training.

    Without critic, reference, teachers, further losses and the user's scorers, without generation ahead, checkpoints,
    export and recorded samples. Pools that then have no role go; their ranks are not started.
    """
    alone = copy.deepcopy(config)
    # The estimator that needs neither a critic nor several samples of a prompt.
    alone.algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    alone.critic.enable = False
    alone.distillation, alone.ptx.coef, alone.custom_scorers = DistillationConfig(), 0.0, {}
    shared, trainer, data = alone.actor_rollout_ref, alone.trainer, alone.data
    shared.actor.policy_loss, shared.actor.use_kl_loss = PolicyLossConfig(), False
    shared.actor.router_replay.mode, shared.rollout.enable_rollout_routing_replay = "disabled", False
    alone.custom_reward_function.validation_only = False
    data.train_files, data.train_file_weights = data.val_files, None
    data.train_max_samples = data.val_max_samples
    data.train_batch_size = data.gen_batch_size = shared.actor.ppo_mini_batch_size
    trainer.total_training_steps, trainer.total_epochs = 1, None
    trainer.rollout_ahead, alone.async_training.partial_rollout = 0, False
    trainer.save_freq, trainer.resume_mode, trainer.resume_from_path = -1, "disable", None
    trainer.rollouts_from, trainer.recorded_prompts, trainer.export_hf = None, 0, False
    return without_empty_pools(alone)


def unjudged(config: RunConfig) -> RunConfig:
    """Return a deep copy of an evaluation in which nothing scores the responses."""
    alone = copy.deepcopy(config)
    alone.custom_reward_function.name = alone.custom_reward_function.path = None
    alone.reward_model.enable, alone.reward_models = False, {}
    return without_empty_pools(alone)


def without_adapters(config: RunConfig) -> RunConfig:
    """Return a deep copy of an evaluation whose model has no adapters next to its weights."""
    alone = copy.deepcopy(config)
    alone.actor_rollout_ref.model.lora = LoraConfig()
    return alone


def without_empty_pools(alone: RunConfig) -> RunConfig:
    """Take away the pools in which an evaluation has no role."""
    shared = alone.actor_rollout_ref
    used = {GLOBAL_POOL, shared.actor.pool, shared.rollout.pool, alone.reward_model.pool}
    used |= {model.pool for model in alone.reward_models.values()}
    alone.pools = {name: pool for name, pool in alone.pools.items() if name in used}
    return alone
