"""The configured loss of reward models or of preferences, in one shape: responses -> a loss per prompt.

Where a loss compares pairs and a prompt has several responses, its loss is the mean over all pairs of them.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.config.declarations import PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from megatron_rl.config.tasks import DPOConfig, RewardTrainingConfig
from megatron_rl.losses.rankings import mean_of_pairs, pairs_of
from megatron_rl.losses.terms import Answers, ItemTerms, Pairs, mean_metric

Objective = Callable[[Answers], ItemTerms]
"""Items are prompts; of kto and regression, where each has one response, they are responses as well."""


def reward_objective(config: RewardTrainingConfig) -> Objective:
    """Return the objective of `megatron-rl reward`. Raises KeyError for a name that no loss has."""
    loss = REWARD_MODEL_LOSSES[config.loss].function
    return lambda answers: loss(answers, config)


def preference_objective(config: DPOConfig) -> Objective:
    """Return the objective of `megatron-rl dpo`, to be given sums of log-probs: the weighted sum of its losses.

    Of several losses the metrics are each one's own, under its name, with its loss before the weight. Raises KeyError
    for a name that no loss has.
    """
    names, weights = config.loss, config.loss_weights or [1.0] * len(config.loss)
    objectives = {name: _of_one_loss(name, config) for name in names}

    def weighted(answers: Answers) -> ItemTerms:
        terms = {name: objective(answers) for name, objective in objectives.items()}
        first, *others = (weight * terms[name].loss for name, weight in zip(names, weights, strict=True))
        loss = sum(others, start=first)
        if len(terms) == 1:
            return ItemTerms(loss, terms[names[0]].metrics)
        metrics = {
            f"{name}/{metric}": pair
            for name, one in terms.items()
            for metric, pair in ({"loss": mean_metric(one.loss)} | dict(one.metrics)).items()
        }
        return ItemTerms(loss, metrics)

    return weighted


def _of_one_loss(name: str, config: DPOConfig) -> Objective:
    declared = PREFERENCE_LOSSES[name]
    loss, traits = declared.function, declared.traits
    if traits.alone:
        return lambda answers: loss(answers, config)

    def over_pairs(answers: Answers) -> ItemTerms:
        better, worse, prompt = pairs_of(answers.sizes)
        numbers, given = answers.numbers, answers.given
        if traits.means:
            numbers = numbers / answers.lengths.clamp(min=1)
        terms: ItemTerms = loss(Pairs(numbers[better], numbers[worse], given[better], given[worse]), config)
        return ItemTerms(mean_of_pairs(terms.loss, prompt, answers.sizes), terms.metrics)

    return over_pairs
