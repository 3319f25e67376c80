"""Rules of the algorithm's keys: names that exist, in the user's files too, and what each choice needs of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.algorithms import ADV_ESTIMATORS, POLICY_LOSSES, Needs, needs_of, uses_critic
from megatron_rl.config.problems import nearest_name, violations_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.user_functions import functions_in
from megatron_rl.config.value_tables import ACTOR, CORRECTION, ROLLOUT
from megatron_rl.errors import ConfigError, Violation, shown

SAMPLES = f"{ROLLOUT}.n"


def algorithm_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation; files of the user's are parsed and not run."""
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    for violation in _name_problems(
        "algorithm.adv_estimator",
        algorithm.adv_estimator,
        tuple(ADV_ESTIMATORS),
        "algorithm.custom_adv_estimator.path",
        algorithm.custom_adv_estimator.path,
    ):
        yield replace(violation, nearest=violation.nearest | _needed(config, violation.nearest))
    loss_key = f"{ACTOR}.policy_loss"
    yield from _name_problems(
        f"{loss_key}.loss_mode", loss.loss_mode, POLICY_LOSSES, f"{loss_key}.custom.path", loss.custom.path
    )
    yield from _estimator_problems(config)
    yield from _loss_problems(config)
    yield from _overlong_problems(config)
    yield from _sampling_problems(config)


def _needed(config: RunConfig, nearest: Mapping[str, Any]) -> dict[str, Any]:
    """What the estimator that is offered needs and the configuration has not."""
    needs = ADV_ESTIMATORS.get(nearest.get("algorithm.adv_estimator", ""), Needs())
    found: dict[str, Any] = {SAMPLES: 2} if needs.group and config.actor_rollout_ref.rollout.n == 1 else {}
    return found | ({"critic.enable": None} if needs.critic and config.critic.enable is False else {})


def _name_problems(
    key: str, name: str, built_in: Sequence[str], path_key: str, path: str | None
) -> Iterable[Violation]:
    own: list[str] = []
    if path is not None:
        try:
            own = functions_in(path, path_key)
        except ConfigError as error:
            yield from violations_of(error)
            return
    known = [*built_in, *own]
    if name not in known:
        rule = f"must be one of {', '.join(known)}, or a function of the file {path_key}={shown(path)}"
        yield Violation({key: name}, rule, {key: nearest_name(name, known)})
    elif path is not None and name in built_in:
        others = ", ".join(other for other in own if other not in built_in) or "the file has none"
        yield Violation(
            {path_key: path},
            f"is of no use, because {key}={name} is built in",
            {path_key: None},
            f"other names: {others}",
        )


def _estimator_problems(config: RunConfig) -> Iterable[Violation]:
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    needs = needs_of(config)
    if needs.group and samples == 1:
        rule = f"must be >= 2: algorithm.adv_estimator={name} compares the samples of a prompt with each other"
        yield Violation({SAMPLES: samples}, rule, {SAMPLES: 2})
    if needs.critic and not uses_critic(config):
        rule = f"must be null or true: algorithm.adv_estimator={name} needs a critic's values"
        yield Violation({"critic.enable": False}, rule, {"critic.enable": None})


def _loss_problems(config: RunConfig) -> Iterable[Violation]:
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if actor.policy_loss.loss_mode == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        key = f"{ACTOR}.loss_agg_mode"
        rule = "must be seq-mean-token-mean: the objective of loss_mode=gspo is a mean over answers"
        yield Violation({key: actor.loss_agg_mode}, rule, {key: "seq-mean-token-mean"})
    high, low = correction.rollout_rs_threshold, correction.rollout_rs_threshold_lower
    if correction.rollout_rs is None or (high is not None and high <= 1):
        return  # the latter breaks its own rule
    high_key = f"{CORRECTION}.rollout_rs_threshold"
    named = {high_key: high}
    if high is None:
        high = correction.rollout_is_threshold
        named |= {f"{CORRECTION}.rollout_is_threshold": high}
    if low is None and high <= 1:
        yield Violation(named, "must be > 1, as rollout_rs_threshold_lower is 1 / it", {high_key: 2.0})
    elif low is not None and low > high:
        nearest = {high_key: low if low > 1 else 2.0}
        yield Violation(named, f"must be >= rollout_rs_threshold_lower={shown(low)}", nearest)


def _overlong_problems(config: RunConfig) -> Iterable[Violation]:
    overlong, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if overlong.enable and longest >= 1 and overlong.len >= 0 and not 1 <= overlong.len <= longest:
        key = "reward_model.overlong_buffer.len"
        rule = f"must be >= 1 and <= data.max_response_length={longest}"
        yield Violation({key: overlong.len}, rule, {key: min(max(overlong.len, 1), longest)})


def _sampling_problems(config: RunConfig) -> Iterable[Violation]:
    data, samples = config.data, config.actor_rollout_ref.rollout.n
    size = {"data.gen_batch_size": data.gen_batch_size}
    if min(data.gen_batch_size, data.train_batch_size) < 1:
        return
    if config.algorithm.filter_groups.enable:
        most, key = config.algorithm.filter_groups.max_num_gen_batches, "algorithm.filter_groups.max_num_gen_batches"
        if most > 0 and most * data.gen_batch_size < data.train_batch_size:
            rule = (
                f"must give at least data.train_batch_size={data.train_batch_size} prompts, or no step could be filled"
            )
            yield Violation({key: most} | size, rule, {key: -(-data.train_batch_size // data.gen_batch_size)})
        if samples == 1 and not needs_of(config).group:
            rule = "must be >= 2: algorithm.filter_groups.enable=true compares the samples of a prompt"
            yield Violation({SAMPLES: samples}, rule, {SAMPLES: 2})
    elif data.gen_batch_size != data.train_batch_size:
        rule = f"must equal data.train_batch_size={data.train_batch_size} without algorithm.filter_groups.enable=true"
        yield Violation(size, rule, {"data.gen_batch_size": data.train_batch_size})
