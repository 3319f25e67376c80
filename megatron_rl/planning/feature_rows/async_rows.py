"""Rows of asynchronous (off-policy) training and of recorded samples."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.planning.features import Feature, Relation, RunFacts, Use, where

AHEAD, PARTIAL = "trainer.rollout_ahead", "async_training.partial_rollout"
SYNC, DETERMINISTIC = "async_training.trigger_parameter_sync_step", "async_training.deterministic"
STRAGGLERS, BUFFER = "async_training.straggler_policy", "async_training.second_buffer"
RATE, LONGEST = f"{ROLLOUT}.over_sample_rate", f"{ROLLOUT}.longest_first"
LOW, HIGH, FROM = f"{ROLLOUT}.min_replicas", f"{ROLLOUT}.max_replicas", "trainer.rollouts_from"
HYBRID = "actor_rollout_ref.hybrid_engine"
FILTER = "algorithm.filter_groups.enable"


def _is_colocated(run: RunFacts) -> bool:
    return run.rollout_pool == run.config.actor_rollout_ref.actor.pool


def _goes_on(run: RunFacts) -> bool:
    return run.config.samples_ahead


def _buffer(run: RunFacts) -> Iterator[Use]:
    if run.config.samples_ahead and run.config.async_training.second_buffer:
        yield Use({BUFFER: True}, {BUFFER: False})


ROWS = (
    Feature("partial_rollout", "partial rollouts", {PARTIAL: True}, where(PARTIAL)),
    Feature(
        "rollout_ahead",
        "asynchronous training",
        {AHEAD: 1},
        where(AHEAD, 0, lambda steps: steps > 0),
        needs=(
            Relation(
                "own_pool",
                "on the actor's ranks nothing is generated while it trains, and only unfinished responses outlast a "
                "step",
                {PARTIAL: True},
                f"or give the rollout a pool of its own: {HYBRID}=false",
                when=lambda run: not run.config.async_training.partial_rollout,
            ),
            Relation("correction", "tokens are trained that older weights sampled, and nothing would correct for that"),
        ),
    ),
    Feature("second_buffer", "weights received during generation", {BUFFER: True}, _buffer, refused_unproven=True),
    Feature("deterministic", "a schedule without clocks", {DETERMINISTIC: True}, where(DETERMINISTIC)),
    Feature(
        "rare_transfers",
        "a weight transfer every few steps",
        {SYNC: 2},
        where(SYNC, 1, lambda steps: steps > 1),
        needs=(
            Relation(
                "own_pool",
                "the rollout reads the actor's own memory",
                gives_up=True,
                when=lambda run: run.config.may_be_stale,
            ),
        ),
    ),
    Feature(
        "stragglers",
        "cut or repeated stragglers",
        {STRAGGLERS: "truncate"},
        where(STRAGGLERS, "wait", lambda policy: policy != "wait"),
    ),
    Feature(
        "dynamic_sampling",
        "dynamic sampling",
        {FILTER: True},
        where(FILTER),
        excludes=(
            Relation("over_sampling", "a filtered group leaves its batch for its scores, and not for being late"),
            Relation(
                "greedy_baseline",
                "greedy responses are generated once it is known which groups are kept, after all others",
                when=_goes_on,
            ),
            Relation(
                "images",
                "replicas begin groups while the actor trains, which has to read their images before",
                when=lambda run: _goes_on(run) and run.rollout_pool != run.policy.pool,
            ),
        ),
    ),
    Feature(
        "longest_first",
        "long responses first",
        {LONGEST: True},
        where(LONGEST),
    ),
    Feature(
        "over_sampling",
        "over-sampling",
        {RATE: 0.2},
        where(RATE, 0.0, lambda rate: 0 < rate <= 0.5),
        needs=(
            Relation(
                "rollout_ahead",
                "a late group is trained in a later step, when its tokens are older than the weights",
                gives_up=True,
                hint=f"or set {AHEAD}=1",
            ),
        ),
        excludes=(
            Relation(
                "deterministic",
                "on a pool of its own the moment at which the trainer asks decides which groups are late",
                {DETERMINISTIC: False},
                when=lambda run: run.config.samples_ahead and not _is_colocated(run),
            ),
        ),
    ),
    Feature(
        "elastic_replicas",
        "replicas that join and leave",
        {LOW: 1},
        where(LOW, 0, lambda number: number > 0),
        needs=(
            Relation(
                "own_pool",
                "only a rollout pool of its own has replicas",
                hint=f"or set {HYBRID}=false",
                gives_up=True,
            ),
            Relation(
                "rollout_ahead",
                "a synchronous step waits for all replicas",
                gives_up=True,
                when=lambda run: not run.config.async_training.partial_rollout,
            ),
        ),
        excludes=(
            Relation("deterministic", "its schedule depends on the configuration alone", {DETERMINISTIC: False}),
        ),
    ),
    Feature(
        "recorded_samples",
        "samples of another run",
        {FROM: "outputs/other_run"},
        where(FROM, None),
        excludes=(Relation("elastic_replicas", "nothing is generated but for validation", {LOW: 0, HIGH: 0}),),
    ),
)
