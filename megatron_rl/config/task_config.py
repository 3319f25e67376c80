"""The configuration of a task that does not generate: sft, reward or dpo.

A task takes one optimizer step per step, on `data.train_batch_size` examples. Its file may have the keys of PPO, too:
one file serves all commands.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from megatron_rl.config.batch_sizes import BatchSizes, ExampleSizes
from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES, AnswerLossTraits
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.tasks import DPO, PPO, REWARD

IGNORED_KEYS = frozenset(
    {
        "data.max_prompt_length",
        "data.max_response_length",
        "data.gen_batch_size",
        "data.ground_truth_key",
        "data.default_data_source",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.ppo_epochs",
        "actor_rollout_ref.actor.shuffle",
        "actor_rollout_ref.actor.megatron.param_offload",
        "actor_rollout_ref.actor.router_replay.mode",
        "actor_rollout_ref.actor.mtp_loss_scaling_factor",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.temperature",
        "actor_rollout_ref.rollout.async_scheduling",
        "actor_rollout_ref.rollout.disable_custom_all_reduce",
        "critic.ppo_mini_batch_size",
        "critic.ppo_epochs",
        "critic.shuffle",
        "algorithm.filter_groups.enable",
        "reward_model.enable",
        "reward_model.enable_resource_pool",
        "ptx.coef",
        "ptx.files",
        "trainer.recorded_prompts",
        "trainer.rollouts_from",
        "trainer.rollout_ahead",
        "trainer.critic_warmup",
        "async_training.partial_rollout",
    }
)
"""Keys whose values do not matter to a task: they are not checked, and a change of one is not reported."""


@dataclass
class TaskConfig(RunConfig):
    """Keys of a task, from `for_task`: `trainer.stage` names the task, and `data.max_length` is set."""

    @property
    def generates(self) -> bool:
        """False."""
        return False

    @property
    def batch_sizes(self) -> BatchSizes:
        """Examples of a step, which are those of its one optimizer step."""
        batch = max(1, self.data.train_batch_size)  # a smaller one is that key's own fault
        return ExampleSizes(batch, batch, samples_per_prompt=1)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest example, at least 2."""
        return max(2, self.data.max_length or 0)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response: the prompt may be one token."""
        return self.longest_sequence - 1

    @property
    def temperature(self) -> float:
        """1: the policy's distribution is the model's own."""
        return 1.0

    @property
    def may_be_stale(self) -> bool:
        """False."""
        return False

    @property
    def loss_traits(self) -> AnswerLossTraits:
        """What the losses read together; an undeclared loss is taken to compare responses."""
        if self.trainer.stage == REWARD:
            return REWARD_MODEL_LOSSES.traits(self.reward_training.loss, AnswerLossTraits())
        if self.trainer.stage == DPO:
            traits = [PREFERENCE_LOSSES.traits(name, AnswerLossTraits()) for name in self.dpo.loss]
            reads = tuple(dict.fromkeys(column for one in traits for column in one.reads))
            return AnswerLossTraits(reads=reads, alone=any(one.alone for one in traits))
        return AnswerLossTraits(alone=True)

    @property
    def answers_together(self) -> int:
        """Responses to one prompt that plans never split: 2, a pair, if the loss compares responses, else 1."""
        return 1 if self.loss_traits.alone else 2

    @property
    def needs_reference(self) -> bool:
        """Whether the loss of `dpo` compares the policy with the one it starts from."""
        return self.trainer.stage == DPO and "given" in self.loss_traits.reads

    @property
    def holds_reference(self) -> bool:
        """Whether a frozen copy of the policy scores every batch of `dpo`."""
        return self.needs_reference and self.dpo.reference == "on_the_fly"

    def ignores(self, key: str) -> bool:
        """Whether the task does not read a dotted key."""
        return key in IGNORED_KEYS or key.startswith(("reward_models.", "custom_scorers.", "distillation."))


def for_task(config: RunConfig, task: str) -> RunConfig:
    """Return a deep copy for a task: a RunConfig for PPO, else a TaskConfig.

    Its longest example is that of `data.max_length`, or else PPO's longest prompt and response. Without a number of
    steps or epochs it has one epoch.
    """
    changed = copy.deepcopy(config)
    changed.trainer.stage = task
    if task == PPO:
        return changed
    data, trainer = changed.data, changed.trainer
    if data.max_length is None:
        data.max_length = data.max_prompt_length + data.max_response_length
    if trainer.total_epochs is None and trainer.total_training_steps is None:
        trainer.total_epochs = 1
    return TaskConfig(**vars(changed))
