"""A configuration as one stage sees it: keys that mean nothing there take the values that say so."""

from __future__ import annotations

import copy

from megatron_rl.config.declarations import PREFERENCE_LOSSES, AnswerLossTraits
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import PPO

UNSET_PROMPT_KEY = "prompt"
"""The default of `data.prompt_key`, which stages that do not generate take for null."""


def as_stage(config: RunConfig, stage: str) -> RunConfig:
    """A deep copy for `stage`. Of PPO nothing else is changed.

    A step of the others is one optimizer step on `data.train_batch_size` examples; nothing is generated, the policy's
    distribution is the model's own, and without a number of steps or epochs there is one epoch.
    """
    found = copy.deepcopy(config)
    found.trainer.stage = stage
    if stage == PPO:
        return found
    data, shared, trainer = found.data, found.actor_rollout_ref, found.trainer
    data.max_length = longest_example(config)
    data.max_prompt_length, data.max_response_length = 1, max(1, data.max_length - 1)
    batch = max(1, data.train_batch_size)  # a smaller one is that key's own fault
    data.gen_batch_size = batch
    for trained in (shared.actor, found.critic):
        trained.ppo_mini_batch_size, trained.ppo_epochs, trained.shuffle = batch, 1, False
    shared.rollout.n, shared.rollout.temperature = 1, 1.0
    shared.rollout.disable_custom_all_reduce = True
    shared.hybrid_engine = None
    shared.actor.megatron.param_offload = False
    shared.actor.router_replay.mode = "disabled"
    found.algorithm.filter_groups.enable = False
    found.reward_model.enable = found.reward_model.enable_resource_pool = False
    found.reward_models = {}
    found.ptx.coef, found.ptx.files = 0.0, None
    trainer.rollout_ahead, trainer.critic_warmup = 0, 0
    found.async_training.partial_rollout = False
    if trainer.total_epochs is None and trainer.total_training_steps is None:
        trainer.total_epochs = 1
    return found


def longest_example(config: RunConfig) -> int:
    """Tokens of prompt and answer at most, in stages that do not generate."""
    data = config.data
    return data.max_prompt_length + data.max_response_length if data.max_length is None else data.max_length


def holds_reference(config: RunConfig) -> bool:
    """Whether a frozen copy of the policy scores every batch of `dpo`."""
    return needs_reference(config) and config.dpo.reference == "on_the_fly"


def needs_reference(config: RunConfig) -> bool:
    """Whether the loss of `dpo` compares the policy with the one it starts from."""
    return PREFERENCE_LOSSES.traits(config.dpo.loss, AnswerLossTraits()).reference
