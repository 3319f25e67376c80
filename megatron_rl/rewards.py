"""What answers are worth: the rule's score, and those of the reward models, which score beside whatever else runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron_rl.config.roles import RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.dispatch import Future
from megatron_rl.experience.assemble import assemble
from megatron_rl.observe.clock import Clock
from megatron_rl.records import Generations, Prompts, SequenceScores, known, row_lengths
from megatron_rl.reward.combined import ModelScores, combine
from megatron_rl.reward.overlong import overlong_penalty
from megatron_rl.reward.rule import NoRule, RuleReward, Scored
from megatron_rl.roles.reward_model import RewardModel

Pending = list[tuple[RoleSpec, Future[SequenceScores]]]
"""Scores of reward models that are under way."""


class Rewards:
    """Scores answers. models: every reward model and its handle. warn: says a line that nobody should miss."""

    def __init__(
        self,
        config: RunConfig,
        rules: RuleReward | NoRule,
        models: list[tuple[RoleSpec, RewardModel]],
        warn: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self.config, self.rules, self.models = config, rules, models
        self._warn, self._clock = warn, clock

    def start(self, prompts: Prompts, generations: Generations) -> Pending:
        """Have every reward model score answers, beside whatever else happens."""
        if not self.models:
            return []
        sequences = assemble(prompts, generations).sequences()
        return [(spec, model.scores(sequences)) for spec, model in self.models]

    def task_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> Scored:
        """The scores of answers, by the rule while reward models do; says so when the rule could not score some.

        Raises RewardError when it could score none, or when a reward model gives no number.
        """
        with self._clock.phase("reward"):
            scored, config = self.rules(prompts, generations), self.config.reward_model
            if scored.first_failure is not None:
                failed = sum(outcome.failure != "" for outcome in scored.outcomes)
                first = scored.first_failure
                self._warn(f"{failed} of {len(scored.outcomes)} samples could not be scored; the first: {first}")
            of_models = [ModelScores(spec.name, future.get().scores, spec.settings.weight) for spec, future in pending]
            return combine(scored, of_models, config.rule_weight)

    def training_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> Scored:
        """What training rewards: the task's scores, less the penalty of overlong answers if configured."""
        scored, overlong = self.task_scores(prompts, generations, pending), self.config.reward_model.overlong_buffer
        if not overlong.enable:
            return scored
        lengths, longest = row_lengths(generations.response_ids), self.config.data.max_response_length
        penalty = overlong_penalty(lengths, longest, overlong.len, overlong.penalty_factor)
        return dataclasses.replace(scored, scores=scored.scores + penalty)

    def components(self, scored: Scored) -> torch.Tensor:
        """float32 [B, K]: of each answer the numbers that `algorithm.gdpo_reward_keys` names. Raises RewardError."""
        keys, failed = self.config.algorithm.gdpo_reward_keys or [], self.config.reward_model.failed_score
        return torch.tensor([scored.numbers(key, failed) for key in keys], dtype=torch.float32).T.contiguous()

    def greedy_scores(self, prompts: Prompts, generations: Generations, pending: Pending) -> torch.Tensor:
        """float32 [B]: for each row of `prompts` the score of its group's answer, in the order of `one_per_group`."""
        _, group = known(prompts.uid).unique(return_inverse=True)
        return self.training_scores(prompts.one_per_group(), generations, pending).scores[group]
