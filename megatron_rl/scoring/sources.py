"""Check which reward model scores which responses, where models select prompts by their `data_source`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from megatron_rl.config.algorithms import trains_on_rule, uses_rule
from megatron_rl.config.problems import nearest_name, raise_problems
from megatron_rl.config.reward_keys import ScoringModelConfig, scoring_key
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation

Named = Mapping[str, ScoringModelConfig]
"""Reward models that name their sources, by name."""


def check_sources(config: RunConfig, sources: Collection[str]) -> list[str]:
    """Return a note for each source that no reward model scores. sources: of all training and held-out prompts.

    Raises ConfigError for a source whose responses nothing scores, and for a source that a reward model names and that
    no prompt has.
    """
    models = config.scoring_models
    named = {name: model for name, model in models.items() if model.data_sources is not None}
    if not named:
        return []
    has_rule = trains_on_rule(config) and config.reward_model.rule_weight != 0
    alone = sorted(set(sources) - scored_sources(models.values(), sources))
    problems = [*_unknown(named, config, sources), *(() if has_rule else _unscored(named, config, alone))]
    raise_problems("this run cannot start", problems)
    return [f"responses to prompts of data source {source} are scored only by the reward function" for source in alone]


def scored_sources(models: Iterable[ScoringModelConfig], sources: Collection[str]) -> set[str]:
    """Return the sources that a reward model with a weight other than 0 scores."""
    counting = [model.data_sources for model in models if model.weight != 0]
    return {source for source in sources if any(own is None or source in own for own in counting)}


def _unknown(named: Named, config: RunConfig, sources: Collection[str]) -> Iterable[Violation]:
    for name, model in named.items():
        own, key = model.data_sources or [], f"{scoring_key(name)}.data_sources"
        wrong = [source for source in own if source not in sources]
        if wrong:
            column = f"data.reward_fn_key={config.data.reward_fn_key}"
            there = ", ".join(sorted(sources))
            rule = f"must be sources of prompts, and none has {', '.join(wrong)} in column {column}; there are {there}"
            nearest = [nearest_name(source, sorted(sources)) if source in wrong else source for source in own]
            yield Violation({key: own}, rule, {key: list(dict.fromkeys(nearest))}, wrong_name=True)


def _unscored(named: Named, config: RunConfig, alone: list[str]) -> Iterable[Violation]:
    if not alone:
        return
    settings = {f"{scoring_key(name)}.data_sources": model.data_sources or [] for name, model in named.items()}
    why = "reward_model.rule_weight=0" if trains_on_rule(config) else "there is no reward function"
    if uses_rule(config) and not trains_on_rule(config):
        why = "custom_reward_function.validation_only=true"
    rule = f"leave responses to prompts of {', '.join(alone)} without a score: no reward model scores them, and {why}"
    key, own = next(iter(settings.items()))
    yield Violation(settings, rule, {key: [*own, *alone]})
