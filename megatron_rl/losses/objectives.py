"""The configured loss of reward models or of preferences, in one shape: answers -> a loss per prompt.

Where a loss compares pairs and a prompt has several answers, its loss is the mean over all pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from megatron_rl.config.tasks import DPOConfig, RewardTrainingConfig
from megatron_rl.losses.rankings import mean_of_pairs, pairs_of
from megatron_rl.losses.terms import Answers, ItemTerms, Pairs

Objective = Callable[[Answers], ItemTerms]
"""Items are prompts; of kto and regression, where each has one answer, they are answers as well."""


def reward_objective(config: RewardTrainingConfig) -> Objective:
    """Return the objective of `megatron-rl reward`. Raises KeyError for a name that no loss has."""
    loss = REWARD_MODEL_LOSSES[config.loss].function
    return lambda answers: loss(answers, config)


def preference_objective(config: DPOConfig) -> Objective:
    """Return the objective of `megatron-rl dpo`. Raises KeyError for a name that no loss has."""
    declared = PREFERENCE_LOSSES[config.loss]
    loss = declared.function
    if declared.traits.alone:
        return lambda answers: loss(answers, config)

    def over_pairs(answers: Answers) -> ItemTerms:
        better, worse, prompt = pairs_of(answers.sizes)
        numbers, given = answers.numbers, answers.given
        terms: ItemTerms = loss(Pairs(numbers[better], numbers[worse], given[better], given[worse]), config)
        return ItemTerms(mean_of_pairs(terms.loss, prompt, answers.sizes), terms.metrics)

    return over_pairs
