"""Rules of the algorithm's keys: names that exist, in the user's files too, and what each choice needs of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.algorithms import ADV_ESTIMATORS, POLICY_LOSSES, needs_of, uses_critic
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.user_functions import functions_in
from megatron_rl.config.validate import ACTOR, CORRECTION, ROLLOUT
from megatron_rl.errors import ConfigError


def algorithm_problems(config: RunConfig) -> Iterable[str]:
    """Every violation; files of the user's are parsed and not run."""
    algorithm, loss = config.algorithm, config.actor_rollout_ref.actor.policy_loss
    yield from _name_problems(
        "algorithm.adv_estimator",
        algorithm.adv_estimator,
        tuple(ADV_ESTIMATORS),
        "algorithm.custom_adv_estimator.path",
        algorithm.custom_adv_estimator.path,
    )
    loss_key = f"{ACTOR}.policy_loss"
    yield from _name_problems(
        f"{loss_key}.loss_mode", loss.loss_mode, POLICY_LOSSES, f"{loss_key}.custom.path", loss.custom.path
    )
    yield from _estimator_problems(config)
    yield from _loss_problems(config)
    yield from _overlong_problems(config)
    yield from _sampling_problems(config)


def _name_problems(key: str, name: str, built_in: Sequence[str], path_key: str, path: str | None) -> Iterable[str]:
    own: list[str] = []
    if path is not None:
        try:
            own = functions_in(path, path_key)
        except ConfigError as error:
            yield str(error)
            return
    known = [*built_in, *own]
    if name not in known:
        yield (
            f"{key}={name} must be one of {', '.join(known)}, or a function of the file {path_key}={path or 'null'}; "
            f"nearest: {nearest_name(name, known)}"
        )
    elif path is not None and name in built_in:
        yield (
            f"{path_key}={path} is of no use, because {key}={name} is built in; nearest: {path_key}=null, or another "
            f"name: {', '.join(other for other in own if other not in built_in) or 'the file has none'}"
        )


def _estimator_problems(config: RunConfig) -> Iterable[str]:
    name, samples = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    needs = needs_of(config)
    if needs.group and samples < 2:
        yield (
            f"algorithm.adv_estimator={name} compares the samples of a prompt with each other, so {ROLLOUT}.n="
            f"{samples} must be >= 2; nearest: {ROLLOUT}.n=2"
        )
    if needs.critic and not uses_critic(config):
        yield f"critic.enable=false: algorithm.adv_estimator={name} needs a critic's values; nearest: null"


def _loss_problems(config: RunConfig) -> Iterable[str]:
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    if actor.policy_loss.loss_mode == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode}: the objective of loss_mode=gspo is a mean over answers; "
            "nearest: seq-mean-token-mean"
        )
    high, low = correction.rollout_rs_threshold, correction.rollout_rs_threshold_lower
    high = correction.rollout_is_threshold if high is None else high
    if correction.rollout_rs is not None and (high <= 1 if low is None else low > high):
        given = f"{CORRECTION}.rollout_rs_threshold={high:g}"
        if low is None:
            yield f"{given} must be > 1, as rollout_rs_threshold_lower is 1 / it; nearest: 2"
        else:
            yield f"{given} must be >= rollout_rs_threshold_lower={low:g}; nearest: {max(1.0, low):g}"


def _overlong_problems(config: RunConfig) -> Iterable[str]:
    overlong, longest = config.reward_model.overlong_buffer, config.data.max_response_length
    if overlong.enable and not 1 <= overlong.len <= longest:
        nearest = min(max(overlong.len, 1), longest)
        yield (
            f"reward_model.overlong_buffer.len={overlong.len} must be >= 1 and <= data.max_response_length={longest}; "
            f"nearest: {nearest}"
        )


def _sampling_problems(config: RunConfig) -> Iterable[str]:
    data, samples = config.data, config.actor_rollout_ref.rollout.n
    if config.algorithm.filter_groups.enable:
        most = config.algorithm.filter_groups.max_num_gen_batches
        if most > 0 and 0 < most * data.gen_batch_size < data.train_batch_size:
            yield (
                f"algorithm.filter_groups.max_num_gen_batches={most} * data.gen_batch_size={data.gen_batch_size} must "
                f"be >= data.train_batch_size={data.train_batch_size}, or no step could be filled; nearest: "
                f"max_num_gen_batches={-(-data.train_batch_size // data.gen_batch_size)}"
            )
        if samples < 2:
            yield (
                f"algorithm.filter_groups.enable=true compares the samples of a prompt, so {ROLLOUT}.n={samples} must "
                f"be >= 2; nearest: {ROLLOUT}.n=2"
            )
    elif data.gen_batch_size != data.train_batch_size:
        yield (
            f"data.gen_batch_size={data.gen_batch_size} must equal data.train_batch_size={data.train_batch_size} "
            f"without algorithm.filter_groups.enable=true; nearest: {data.train_batch_size}"
        )
