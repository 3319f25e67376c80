"""Checks of a judge's keys, without its files and its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megatron_rl.config.judge_keys import FIELDS, GROUND_TRUTH, GROUP, PAIRWISE, QUESTION, places_of
from megatron_rl.config.reward_keys import HELD_OUT, RUNNING, ScoringModelConfig, scoring_key
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation


def judge_problems(config: RunConfig) -> Iterator[Violation]:
    """Violations of the keys of every judge."""
    yield from _scale_problems("reward_model", config.reward_model)
    for name, further in config.reward_models.items():
        yield from _scale_problems(f"reward_models.{name}", further)
    for name, settings in config.judges.items():
        group = scoring_key(name)
        if settings.judge.form in FIELDS:  # else the key's own check reports it
            yield from _of_judge(group, settings)
            yield from _of_comparison(config, group, settings.judge.form)
        if settings.asks_policy:
            yield from _of_policy(config, group, settings)


def _scale_problems(group: str, settings: ScoringModelConfig) -> Iterator[Violation]:
    scale, key = settings.judge.scale, f"{group}.judge.scale"
    if scale is not None and not (len(scale) == 2 and all(map(math.isfinite, scale)) and scale[0] < scale[1]):
        wrong = "must be [lowest, highest], both finite and the first below the second"
        yield Violation({key: scale}, wrong, {key: [0.0, 10.0]})


def _of_comparison(config: RunConfig, group: str, form: str) -> Iterable[Violation]:
    """Forms that compare need two responses to a prompt, or every score is the same."""
    if form in (PAIRWISE, GROUP) and config.batch_sizes.samples_per_prompt < 2:
        key = "actor_rollout_ref.rollout.n"
        yield Violation({key: 1}, f"must be at least 2, as {group}.judge.form={form} compares responses", {key: 2})


def _of_judge(group: str, settings: ScoringModelConfig) -> Iterator[Violation]:
    keys, key = settings.judge, f"{group}.judge"
    problems = prompt_problems(keys.prompt or "", keys.form)
    for problem in problems:
        rule = f"{problem}, as {key}.form={keys.form}"
        yield Violation({f"{key}.prompt": keys.prompt}, rule)
    if settings.model.input_tokenizer is not None:
        rule = f"is of no use with {key}.prompt: a judge reads the prompt, in tokens of its own folder"
        tokenizer = f"{group}.model.input_tokenizer"
        yield Violation({tokenizer: settings.model.input_tokenizer}, rule, {tokenizer: None})
    if settings.normalize_reward == HELD_OUT:
        rule = f"is of a classifier, whose folder has statistics of its scores; with {key}.prompt it is a judge"
        normalised = f"{group}.normalize_reward"
        yield Violation({normalised: HELD_OUT}, rule, {normalised: RUNNING})
    scale = keys.scale
    if keys.verdicts and (scale is not None or keys.form == GROUP):
        reason = f"{key}.scale={scale}" if scale is not None else f"{key}.form={GROUP}"
        yield Violation({f"{key}.verdicts": keys.verdicts}, f"must be {{}}, as {reason}: the verdict is a number")
    odd = {word: score for word, score in keys.verdicts.items() if not _is_score(keys.form, word, score)}
    if odd:
        most = "from 0 to 1" if keys.form == PAIRWISE else "that are finite"
        yield Violation({f"{key}.verdicts": keys.verdicts}, f"must be words with scores {most}; it has {odd}")


def _is_score(form: str, word: object, score: object) -> bool:
    is_number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
    within = form != PAIRWISE or (is_number and 0 <= score <= 1)  # type: ignore[operator]
    return isinstance(word, str) and word.strip() == word != "" and is_number and within


def _of_policy(config: RunConfig, group: str, settings: ScoringModelConfig) -> Iterable[Violation]:
    """The policy's engine has room for the policy's sequences."""
    keys, room = settings.judge, config.longest_sequence
    prompt, response = f"{group}.judge.max_prompt_length", f"{group}.judge.max_response_length"
    if keys.max_prompt_length + keys.max_response_length <= room:
        return
    rule = f"must be <= data.max_prompt_length + data.max_response_length = {room} together, as {group}.model.path=self"
    nearest = {prompt: room - keys.max_response_length} if room > keys.max_response_length else {}
    yield Violation({prompt: keys.max_prompt_length, response: keys.max_response_length}, rule, nearest)


def prompt_problems(prompt: str, form: str) -> list[str]:
    """Return what is wrong with the places of a prompt."""
    given, needed = places_of(prompt), FIELDS[form]
    allowed = {*needed, QUESTION, GROUND_TRUTH}
    missing = [f"{{{name}}}" for name in needed if name not in given]
    other = [f"{{{name}}}" for name in dict.fromkeys(given) if name not in allowed]
    problems = [f"must have {' and '.join(missing)} where these go"] if missing else []
    return problems + ([f"cannot have {' and '.join(other)}"] if other else [])
