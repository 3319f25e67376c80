"""Rules of generation that runs asynchronously: `trainer.rollout_ahead` and `async_training`."""

from __future__ import annotations

from collections.abc import Iterable

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
    yield from _late_problems(config)
    yield from _elastic_problems(config)


def _sync_problems(config: RunConfig) -> Iterable[Violation]:
    ahead, every = config.trainer.rollout_ahead, config.async_training.trigger_parameter_sync_step
    if ahead < every - 1:
        rule = f"must be >= {SYNC} - 1 = {every - 1}: between two transfers the weights of the rollout get that old"
        yield Violation({AHEAD: ahead, SYNC: every}, rule, {SYNC: ahead + 1}, feature="rare_transfers")
        return
    for key, number in (
        ("trainer.test_freq", config.trainer.test_freq),
        ("trainer.save_freq", config.trainer.save_freq),
    ):
        if every > 1 and number > 0 and number % every:
            rule = f"must be a multiple of {SYNC}={every}: between two transfers the rollout has no new weights"
            yield Violation({key: number}, rule, {key: every * max(1, round(number / every))})


def _late_problems(config: RunConfig) -> Iterable[Violation]:
    """The staleness of groups that a batch leaves to the next one, on a rollout pool of its own."""
    rate, key = config.actor_rollout_ref.rollout.over_sample_rate, f"{ROLLOUT_KEY}.over_sample_rate"
    ahead, every = config.trainer.rollout_ahead, config.async_training.trigger_parameter_sync_step
    pools = {role.name: role.pool for role in roles_of(config)}
    if 0 < rate <= 0.5 and 0 < ahead <= every and pools[ROLLOUT] != pools[ACTOR]:
        rule = f"on a pool of its own needs {AHEAD} > {SYNC}={every}: a group that begins during training is that old"
        rule += ", and one step older if it is late"
        yield Violation({key: rate, AHEAD: ahead}, rule, {AHEAD: every + 1}, feature="over_sampling")


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
    if pools[ROLLOUT] == pools[ACTOR] or pools[ROLLOUT] not in sizes:
        return
    num_replicas = sizes[pools[ROLLOUT]].world_size // rollout.replica_size
    if rollout.min_replicas > (rollout.max_replicas or num_replicas):
        of = f"{high}={rollout.max_replicas}" if rollout.max_replicas else f"the {num_replicas} replicas of the pool"
        yield Violation({low: rollout.min_replicas}, f"must be <= {of}", {low: rollout.max_replicas or num_replicas})
