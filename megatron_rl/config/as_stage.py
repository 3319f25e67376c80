"""The configuration of one task: keys without a meaning there take neutral values."""

from __future__ import annotations

import copy

from megatron_rl.config.declarations import PREFERENCE_LOSSES, AnswerLossTraits
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO

UNSET_PROMPT_KEY = "prompt"
"""The default of `data.prompt_key`, which tasks without generation read as null."""


def as_stage(config: RunConfig, stage: str) -> RunConfig:
    """Return a deep copy for the task `stage`. For PPO only `trainer.stage` is set.

    Another task makes one optimizer step on `data.train_batch_size` examples per step and generates nothing. The
    policy's distribution is the model's own. Without a number of steps or epochs there is one epoch.
    """
    changed = copy.deepcopy(config)
    changed.trainer.stage = stage
    if stage == PPO:
        return changed
    data, shared, trainer = changed.data, changed.actor_rollout_ref, changed.trainer
    data.max_length = longest_example(config)
    data.max_prompt_length, data.max_response_length = 1, max(1, data.max_length - 1)
    batch = max(1, data.train_batch_size)  # a smaller one is that key's own fault
    data.gen_batch_size = batch
    for trained in (shared.actor, changed.critic):
        trained.ppo_mini_batch_size, trained.ppo_epochs, trained.shuffle = batch, 1, False
    shared.rollout.n, shared.rollout.temperature = 1, 1.0
    shared.rollout.disable_custom_all_reduce = True
    shared.hybrid_engine = None
    shared.actor.megatron.param_offload = False
    shared.actor.router_replay.mode = "disabled"
    changed.algorithm.filter_groups.enable = False
    changed.reward_model.enable = changed.reward_model.enable_resource_pool = False
    changed.reward_models = {}
    changed.ptx.coef, changed.ptx.files = 0.0, None
    trainer.rollout_ahead, trainer.critic_warmup = 0, 0
    changed.async_training.partial_rollout = False
    if trainer.total_epochs is None and trainer.total_training_steps is None:
        trainer.total_epochs = 1
    return changed


def longest_example(config: RunConfig) -> int:
    """Most tokens of prompt and answer in tasks without generation."""
    data = config.data
    return data.max_prompt_length + data.max_response_length if data.max_length is None else data.max_length


def holds_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the policy scores every batch of `dpo`."""
    return needs_reference(config) and config.dpo.reference == "on_the_fly"


def needs_reference(config: RunConfig) -> bool:
    """Whether the loss of `dpo` compares the policy with the one it starts from."""
    return PREFERENCE_LOSSES.traits(config.dpo.loss, AnswerLossTraits()).reference
