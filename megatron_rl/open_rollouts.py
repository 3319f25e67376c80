"""The rollouts of a run: in turns with training, in slices on the same ranks, or ahead of it on replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.book import Book
from megatron_rl.checkpoint.storage import storing
from megatron_rl.cluster.replicas import ReplicatedPool
from megatron_rl.config.algorithms import needs_of
from megatron_rl.config.roles import ROLLOUT, Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import ConfigError
from megatron_rl.generation.coming import read_schedule
from megatron_rl.prompts.dataset import PromptDataset
from megatron_rl.prompts.mixture import MixtureCursor
from megatron_rl.rewards import Rewards
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.rollouts import Rollouts
from megatron_rl.run_folder import RunFolder
from megatron_rl.sliced_rollouts import RolloutsAhead, RolloutsInTurns, Schedule
from megatron_rl.stream.journal import SCHEDULE_FILE, Began, Event, Journal, Recorder, Resumed, read_events
from megatron_rl.stream.replay import Replay
from megatron_rl.stream.rules import Decides, Rules
from megatron_rl.stream.scheduler import Scheduler


@dataclass(frozen=True)
class Parts:
    """What rollouts are made of. rollout: of the pool that generates; None where it is cut into `replicas`.

    look: raises where a pool has failed that nobody calls now. stop: raises where the run is to stop.
    """

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
    look: Callable[[], None]
    stop: Callable[[], None]


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
        max_queued=rollout.max_num_seqs // 16,  # for places that become free in a slice
        partial=ahead.partial_rollout,
        recompute_kv=ahead.kv_cache == "recompute",
        deterministic=ahead.deterministic or placement.is_colocated,
        colocated=placement.is_colocated,
        straggler_policy=ahead.straggler_policy,
        straggler_slices=ahead.straggler_slices,
        straggler_attempts=ahead.straggler_attempts,
    )


def settings_of(rules: Rules, config: RunConfig) -> dict[str, Any]:
    """What a schedule can only be repeated with."""
    return {name: value for name, value in asdict(rules).items() if name != "first_step"} | {
        "seed": config.trainer.seed
    }


def refuse_other_settings(run: Path, events: Sequence[Event], settings: Mapping[str, Any]) -> None:
    """Raises ConfigError where a schedule was recorded with other settings, naming them."""
    recorded = next((event.settings for event in events if isinstance(event, Began)), None)
    if recorded is None:
        raise ConfigError(f"{run / SCHEDULE_FILE} does not begin with the settings of its run")
    different = [
        f"{name} was {recorded.get(name)}, is {value}"
        for name, value in settings.items()
        if recorded.get(name) != value
    ]
    if different:
        raise ConfigError(f"the schedule of {run} is of a run with other settings: {', '.join(different)}")


def open_journal(folder: RunFolder, schedule: Mapping[str, Any] | None, settings: dict[str, Any]) -> Journal:
    """The run's schedule.jsonl, with what the checkpoint knows of it. Raises StorageError."""
    with storing(SCHEDULE_FILE, folder.path):
        journal = Journal(folder.path / SCHEDULE_FILE, 0 if schedule is None else schedule["num_lines"])
        if not journal.num_lines:
            journal.append(Began(settings))
        if folder.resumed_step is not None:
            journal.append(Resumed(folder.resumed_step))
    return journal


def read_schedule_file(run: Path) -> list[Event]:
    """The recorded schedule of a run's folder. Raises ConfigError where it has none."""
    file = run / SCHEDULE_FILE
    try:
        return read_events(file)
    except OSError as error:
        rule = "has no schedule to repeat; runs with trainer.rollout_ahead or async_training.partial_rollout write one"
        raise ConfigError(f"{run} {rule}: {file} {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def open_rollouts(parts: Parts, opened: ExitStack, replay: Path | None = None) -> Rollouts:
    """Made and ready for `load_weights`.

    replay: the folder of a run whose schedule is repeated. Raises ConfigError where there is none.
    """
    config, placement = parts.config, parts.placement
    common = (config, parts.data, parts.cursor, parts.rollout, parts.rewards, parts.book)
    if not config.samples_in_slices:
        return Rollouts(*common, None if placement.is_colocated else parts.actor)
    start = parts.folder.start
    rules = rules_of(config, placement, start.step + 1)
    num_replicas = placement.pool_of(ROLLOUT).world_size // config.actor_rollout_ref.rollout.tensor_model_parallel_size
    schedule = None if start.path is None else read_schedule(start.path)
    journal = open_journal(parts.folder, schedule, settings_of(rules, config))
    opened.callback(journal.close)
    decider: Decides = Scheduler(rules, num_replicas, schedule)
    if replay is not None:
        events = read_schedule_file(replay)
        refuse_other_settings(replay, events, settings_of(rules, config))
        decider = Replay(rules, num_replicas, events)
    begun = Schedule(rules, Recorder(decider, journal), journal, num_replicas, start.path)
    if parts.replicas is None:
        return RolloutsInTurns(begun, *common)
    replicas = parts.replicas.replicas
    ahead = RolloutsAhead(
        begun,
        config,
        parts.data,
        parts.cursor,
        parts.rewards,
        parts.book,
        replicas,
        parts.actor,
        parts.look,
        parts.stop,
    )
    opened.enter_context(ahead.driver)
    ahead.bridge.connect()
    return ahead
