"""Rules of generation that runs asynchronously: `trainer.rollout_ahead` and `async_training`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.keys import CORRECTION
from megatron_rl.config.keys import ROLLOUT as ROLLOUT_KEY
from megatron_rl.config.roles import ACTOR, ROLLOUT, pool_sizes, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.urls import shown_url, url_fault
from megatron_rl.errors import Violation

AHEAD = "trainer.rollout_ahead"
PARTIAL = "async_training.partial_rollout"
SYNC = "async_training.trigger_parameter_sync_step"
DETERMINISTIC = "async_training.deterministic"


def async_problems(config: RunConfig) -> Iterable[Violation]:
    """Every violation. Constraints report values out of their range."""
    if config.trainer.rollout_ahead < 0 or config.async_training.trigger_parameter_sync_step < 1:
        return
    yield from _sync_problems(config)
    yield from _elastic_problems(config)
    yield from _over_sample_problems(config)
    if config.actor_rollout_ref.rollout.longest_first and config.algorithm.filter_groups.enable:
        key = f"{ROLLOUT_KEY}.longest_first"
        rule = "must be false with algorithm.filter_groups.enable=true, whose batches are not part of the schedule"
        yield Violation({key: True}, rule, {key: False})
    if not config.may_be_stale:
        return
    yield from _stale_problems(config)
    if config.samples_ahead and config.algorithm.filter_groups.enable:
        key = "algorithm.filter_groups.enable"
        rule = f"must be false where generation continues over several steps ({asked_ahead(config)}): batches that are "
        yield Violation({key: True}, f"{rule}generated as replacements are not in its schedule", {key: False})


def _sync_problems(config: RunConfig) -> Iterable[Violation]:
    ahead, every = config.trainer.rollout_ahead, config.async_training.trigger_parameter_sync_step
    if ahead < every - 1:
        rule = f"must be >= {SYNC} - 1 = {every - 1}: between two transfers the weights of the rollout get that old"
        yield Violation({AHEAD: ahead, SYNC: every}, rule, {SYNC: ahead + 1})
        return
    for key, number in (
        ("trainer.test_freq", config.trainer.test_freq),
        ("trainer.save_freq", config.trainer.save_freq),
    ):
        if every > 1 and number > 0 and number % every:
            rule = f"must be a multiple of {SYNC}={every}: between two transfers the rollout has no new weights"
            yield Violation({key: number}, rule, {key: every * max(1, round(number / every))})


def _stale_problems(config: RunConfig) -> Iterable[Violation]:
    ahead, correction = config.trainer.rollout_ahead, config.algorithm.rollout_correction
    pools = {role.name: role.pool for role in roles_of(config)}
    is_colocated = pools[ROLLOUT] == pools[ACTOR]
    if ahead and is_colocated and config.samples_ahead and not config.async_training.partial_rollout:
        rule = (
            f"needs a pool of its own for the rollout (actor_rollout_ref.hybrid_engine=false), or {PARTIAL}=true: on "
            "the actor's ranks nothing is generated while it trains, and only unfinished responses outlast a step"
        )
        yield Violation({AHEAD: ahead, PARTIAL: False}, rule, {PARTIAL: True})
    if is_colocated and config.samples_ahead and config.async_training.trigger_parameter_sync_step > 1:
        every: Any = config.async_training.trigger_parameter_sync_step
        yield Violation({SYNC: every}, "must be 1 where the rollout reads the actor's own memory", {SYNC: 1})
    corrects = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    if ahead and not corrects:
        key = f"{CORRECTION}.rollout_is"
        rule = (
            f"must be token or sequence, or {CORRECTION}.rollout_rs or bypass_mode must be set: with {AHEAD}={ahead} "
            "tokens are trained that older weights sampled, and nothing would correct for that"
        )
        yield Violation({key: None}, rule, {key: "token"})


def _over_sample_problems(config: RunConfig) -> Iterable[Violation]:
    """Rules of batches that late groups leave."""
    rate, key = config.actor_rollout_ref.rollout.over_sample_rate, f"{ROLLOUT_KEY}.over_sample_rate"
    if not 0 < rate <= 0.5:
        return
    pools = {role.name: role.pool for role in roles_of(config)}
    if pools[ROLLOUT] != pools[ACTOR]:
        rule = "must be 0 where the rollout has a pool of its own: replicas continue with later batches without waiting"
        yield Violation({key: rate}, rule, {key: 0.0})
        return
    if not config.trainer.rollout_ahead:
        rule = f"needs {AHEAD} >= 1, the steps that a group may be late: its tokens are trained that many steps later"
        yield Violation({key: rate, AHEAD: 0}, rule, {key: 0.0})
    if config.has_turns:
        turns = f"{ROLLOUT_KEY}.multi_turn.enable"
        rule = "must be 0 with multi-turn episodes: an environment identifies an episode by its position in the batch"
        yield Violation({key: rate, turns: True}, rule, {key: 0.0})
    if "greedy_scores" in estimator_traits(config).reads:
        estimator = "algorithm.adv_estimator"
        rule = "must be 0 where an estimator compares with greedy responses, which are generated with their batch"
        yield Violation({key: rate, estimator: config.algorithm.adv_estimator}, rule, {key: 0.0})
    if (policy := config.async_training.straggler_policy) != "wait":
        straggler = "async_training.straggler_policy"
        rule = "must be wait with over_sample_rate: the last responses of a batch continue in the next step"
        yield Violation({straggler: policy}, rule, {straggler: "wait"})


def _elastic_problems(config: RunConfig) -> Iterable[Violation]:
    """Rules of replicas that join and leave."""
    rollout = config.actor_rollout_ref.rollout
    low, high = f"{ROLLOUT_KEY}.min_replicas", f"{ROLLOUT_KEY}.max_replicas"
    most = {low: rollout.min_replicas, high: rollout.max_replicas}
    fault = None if rollout.drain_url is None else url_fault(rollout.drain_url)
    if fault is not None:
        url = f"{ROLLOUT_KEY}.drain_url"
        yield Violation({url: shown_url(str(rollout.drain_url))}, f"{fault}: it is asked by HTTP", {url: None})
    if min(rollout.min_replicas, rollout.max_replicas) < 0:
        return
    if not rollout.is_elastic:
        if rollout.max_replicas:
            yield Violation(most, f"needs {low} >= 1: without it all replicas stay", {low: 1})
        return
    pools, sizes = {role.name: role.pool for role in roles_of(config)}, pool_sizes(config)
    if not config.may_be_stale or pools[ROLLOUT] == pools[ACTOR]:
        rule = f"needs a rollout pool of its own (actor_rollout_ref.hybrid_engine=false) and {AHEAD} >= 1"
        yield Violation({low: rollout.min_replicas}, f"{rule}: only there are replicas", {low: 0})
        return
    if config.async_training.deterministic:
        rule = f"must be 0 with {DETERMINISTIC}=true: that schedule depends on the configuration alone"
        yield Violation({low: rollout.min_replicas, DETERMINISTIC: True}, rule, {DETERMINISTIC: False})
    if pools[ROLLOUT] not in sizes:
        return
    num_replicas = sizes[pools[ROLLOUT]].world_size // rollout.tensor_model_parallel_size
    if rollout.min_replicas > (rollout.max_replicas or num_replicas):
        of = f"{high}={rollout.max_replicas}" if rollout.max_replicas else f"the {num_replicas} replicas of the pool"
        yield Violation({low: rollout.min_replicas}, f"must be <= {of}", {low: rollout.max_replicas or num_replicas})


def asked_ahead(config: RunConfig) -> str:
    """The setting that makes generation continue from step to step."""
    ahead = config.trainer.rollout_ahead
    return f"{AHEAD}={ahead}" if ahead else f"{PARTIAL}=true"
