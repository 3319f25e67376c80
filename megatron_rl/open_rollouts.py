"""The rollouts of a run: in turns with training, in slices on the same ranks, or ahead of it on replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_rl.book import Book
from megatron_rl.cluster.replicas import ReplicatedPool
from megatron_rl.config.algorithms import needs_of
from megatron_rl.config.roles import ROLLOUT, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.generation.bridge import ReplicaBridge
from megatron_rl.generation.coming import read_schedule
from megatron_rl.generation.driver import Driver
from megatron_rl.generation.lanes import Lanes
from megatron_rl.generation.measured import SliceMetrics
from megatron_rl.prompts.dataset import PromptDataset
from megatron_rl.prompts.mixture import MixtureCursor
from megatron_rl.rewards import Rewards
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.rollouts import Rollouts
from megatron_rl.run_folder import RunFolder
from megatron_rl.sliced_rollouts import RolloutsAhead, RolloutsInTurns
from megatron_rl.stream.rules import Rules
from megatron_rl.stream.scheduler import Scheduler


@dataclass(frozen=True)
class Parts:
    """What rollouts are made of. rollout: of the pool that generates; None where it is cut into `replicas`."""

    config: RunConfig
    placement: Placement
    data: PromptDataset
    cursor: MixtureCursor
    actor: Actor
    rollout: Rollout | None
    replicas: ReplicatedPool | None
    rewards: Rewards
    book: Book
    folder: RunFolder


def replicated_pools(config: RunConfig, placement: Placement) -> dict[str, int]:
    """Pools that are cut into replicas, which may die and start again alone -> ranks of each."""
    if not config.samples_in_slices or placement.is_colocated:
        return {}
    role = placement.roles[ROLLOUT]
    return {role.pool: role.settings.tensor_model_parallel_size}


def rules_of(config: RunConfig, placement: Placement, first_step: int) -> Rules:
    """The rules of the schedule of a run that goes on with `first_step`."""
    ahead, rollout = config.async_training, config.actor_rollout_ref.rollout
    prompts = config.data.gen_batch_size
    return Rules(
        batch_rows=prompts * rollout.n + (prompts if needs_of(config).greedy else 0),
        num_steps_total=config.trainer.num_steps,
        ahead=config.trainer.rollout_ahead,
        sync_every=ahead.trigger_parameter_sync_step,
        first_step=first_step,
        slice_steps=ahead.slice_steps,
        max_running=rollout.max_num_seqs,
        partial=ahead.partial_rollout,
        recompute_kv=ahead.kv_cache == "recompute",
        deterministic=ahead.deterministic or placement.is_colocated,
        colocated=placement.is_colocated,
        straggler_policy=ahead.straggler_policy,
        straggler_slices=ahead.straggler_slices,
        straggler_attempts=ahead.straggler_attempts,
    )


def open_rollouts(parts: Parts, look: Callable[[], None], opened: ExitStack) -> Rollouts:
    """Made and ready for `load_weights`. look: raises for failures of other pools, and where the run is to stop."""
    config, placement = parts.config, parts.placement
    common = (config, parts.data, parts.cursor, parts.rollout, parts.rewards, parts.book)
    if not config.samples_in_slices:
        return Rollouts(*common, None if placement.is_colocated else parts.actor)
    start = parts.folder.start
    rules = rules_of(config, placement, start.step + 1)
    num_replicas = placement.pool_of(ROLLOUT).world_size // config.actor_rollout_ref.rollout.tensor_model_parallel_size
    schedule = None if start.path is None else read_schedule(start.path)
    decider = Scheduler(rules, num_replicas, schedule)
    if parts.replicas is None:
        in_turns = RolloutsInTurns(*common)
        in_turns.begin(rules, decider, parts.folder, num_replicas)
        return in_turns
    ahead = RolloutsAhead(*common)
    ahead.begin(rules, decider, parts.folder, num_replicas)
    lanes = Lanes(parts.replicas.replicas, config.async_training.max_replica_restarts, parts.book.warn)
    ahead.driver = opened.enter_context(Driver(lanes, ahead.work, look))
    ahead.bridge = ReplicaBridge(parts.actor, ahead.driver, config.async_training.second_buffer, start.step)
    ahead.measured = SliceMetrics(lanes, parts.book.clock.ran)
    ahead.bridge.connect()
    return ahead
