"""Rules of the algorithm's keys: names that exist, in the user's files too, and what each choice needs of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.declarations import ESTIMATORS, POLICY_LOSSES, EstimatorTraits
from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.problems import nearest_name, violations_of
from megatron_rl.config.reward_keys import OVERLONG
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.user_functions import functions_in
from megatron_rl.errors import ConfigError, Violation, shown
from megatron_rl.planning.correction_rules import correction_problems

SAMPLES = f"{ROLLOUT}.n"


def algorithm_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation; files of the user's are parsed and not run."""
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    for violation in _name_problems(
        "algorithm.adv_estimator",
        algorithm.adv_estimator,
        tuple(ESTIMATORS),
        "algorithm.custom_adv_estimator.path",
        algorithm.custom_adv_estimator.path,
    ):
        yield replace(violation, nearest=violation.nearest | _needed(config, violation.nearest))
    loss_key = f"{ACTOR}.policy_loss"
    yield from _name_problems(
        f"{loss_key}.loss_mode", loss.loss_mode, tuple(POLICY_LOSSES), f"{loss_key}.custom.path", loss.custom.path
    )
    yield from _estimator_problems(config)
    yield from _component_problems(config)
    yield from _loss_problems(config)
    yield from correction_problems(config)
    yield from _overlong_problems(config)
    yield from _sampling_problems(config)


def _needed(config: RunConfig, nearest: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that the suggested estimator needs and the configuration does not have."""
    traits = ESTIMATORS.traits(nearest.get("algorithm.adv_estimator", ""), EstimatorTraits())
    needed: dict[str, Any] = {SAMPLES: 2} if traits.second and config.actor_rollout_ref.rollout.n == 1 else {}
    if "components" in traits.reads:
        needed |= {"algorithm.gdpo_reward_keys": _components(config)}
        needed |= {"algorithm.use_kl_in_reward": False} if config.algorithm.use_kl_in_reward else {}
    return needed | ({"critic.enable": None} if "old_values" in traits.reads and config.critic.enable is False else {})


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
        yield Violation({key: name}, rule, {key: nearest_name(name, known)}, wrong_name=True)
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
    traits = estimator_traits(config)
    if traits.second and samples == 1:
        rule = f"must be >= 2: algorithm.adv_estimator={name} compares the best sample of a prompt with the second"
        yield Violation({SAMPLES: samples}, rule, {SAMPLES: 2})


def _loss_problems(config: RunConfig) -> Iterable[Violation]:
    loss, key = config.actor_rollout_ref.actor.policy_loss, f"{ACTOR}.policy_loss"
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        rule = "must be set with loss_mode=dro: the weight of its penalty has no default"
        yield Violation({f"{key}.dro_beta": None}, rule, {f"{key}.dro_beta": 0.1})
    if loss.loss_mode == "clip_cov" and not loss.clip_cov_lb < loss.clip_cov_ub:
        rule = f"must be below clip_cov_ub={shown(loss.clip_cov_ub)}, or no token could be chosen"
        yield Violation({f"{key}.clip_cov_lb": loss.clip_cov_lb}, rule, {f"{key}.clip_cov_lb": loss.clip_cov_ub - 1})


def _component_problems(config: RunConfig) -> Iterable[Violation]:
    """Faults of the keys of GDPO, which rewards components of the score."""
    algorithm = config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    keys_key, weights_key = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    if "components" not in estimator_traits(config).reads:
        return
    name = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if not keys:
        rule = f"must name at least one number that the reward function returns beside its score, because of {name}"
        yield Violation({keys_key: keys}, rule, {keys_key: _components(config)})
    elif weights is not None and len(weights) != len(keys):
        rule = f"must be one number for each of {keys_key}, of which there are {len(keys)}"
        yield Violation({weights_key: weights}, rule, {weights_key: None})


def _components(config: RunConfig) -> list[str]:
    """The configured components of the score, or the score alone, with the overlong penalty where there is one."""
    keys = config.algorithm.gdpo_reward_keys or ["score"]
    return keys if OVERLONG in keys or not config.reward_model.overlong_buffer.enable else [*keys, OVERLONG]


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
        if samples == 1 and not estimator_traits(config).second:
            rule = "must be >= 2: algorithm.filter_groups.enable=true compares the samples of a prompt"
            yield Violation({SAMPLES: samples}, rule, {SAMPLES: 2})
    elif data.gen_batch_size != data.train_batch_size:
        rule = f"must equal data.train_batch_size={data.train_batch_size} without algorithm.filter_groups.enable=true"
        yield Violation(size, rule, {"data.gen_batch_size": data.train_batch_size})
