"""Choose how a run samples: between training steps on one pool, or on replicas while training runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.agents.episode import Reply
from megatron_rl.checkpoint.storage import storing
from megatron_rl.cluster.replicas import ReplicatedPool
from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.roles import ROLLOUT, Placement, elastic_pools
from megatron_rl.config.rollout_keys import DRAFT_KEYS, EARLIER, extra_groups
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.data.turn_images import FOLDER
from megatron_rl.errors import ConfigError
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.sampling.drain_notices import DRAIN_FILE, DrainNotices
from megatron_rl.sampling.filtered_replay import FilteredReplay
from megatron_rl.sampling.journal import (
    SCHEDULE_FILE,
    Began,
    EpisodeBegan,
    Event,
    Journal,
    Recorder,
    Resumed,
    TurnAnswered,
    read_events,
)
from megatron_rl.sampling.pool_sampler import PoolSampler
from megatron_rl.sampling.recorded_sampler import RecordedSampler, check_record
from megatron_rl.sampling.replay import Replay
from megatron_rl.sampling.replica_sampler import ReplicaSampler
from megatron_rl.sampling.request_scheduler import RequestScheduler
from megatron_rl.sampling.response_history import LengthHistory, ResponseHistory
from megatron_rl.sampling.rollout_checkpoint import read_schedule
from megatron_rl.sampling.sampler import Schedule, Sources
from megatron_rl.sampling.schedule_types import KeptGroups, ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler


def rules_of(config: RunConfig, placement: Placement, first_step: int) -> ScheduleConfig:
    """Rules of the schedule for a run whose next step is `first_step`; without `ahead` no response outlives its
    step."""
    ahead, rollout = config.async_training, config.actor_rollout_ref.rollout
    sizes, num_steps = config.batch_sizes, config.trainer.num_steps
    filters = config.algorithm.filter_groups
    reads_greedy = "greedy_scores" in estimator_traits(config).reads
    # Of a filtered batch greedy responses are generated when it is known which groups are trained.
    greedy = sizes.num_generated_prompts if reads_greedy and not filters.enable else 0
    most = filters.max_num_gen_batches * sizes.num_generated_prompts
    filtered = KeptGroups(sizes.num_prompts, most) if filters.enable else None
    batch_rows = sizes.num_generated_samples + greedy
    group_size = sizes.samples_per_prompt
    if greedy:  # a late group takes its greedy response along; else these follow all samples of a batch
        group_size = group_size + 1 if rollout.over_sample_rate and config.samples_ahead else 1
    if not config.samples_ahead:
        has_turns, scores_early = config.has_turns, config.reward_model.launch_reward_fn_async
        return ScheduleConfig(
            batch_rows=batch_rows,
            num_steps_total=num_steps,
            ahead=0,
            first_step=first_step,
            slice_steps=ahead.slice_steps if not filtered and (has_turns or scores_early) else None,
            has_turns=has_turns,
            awaits_turns=ahead.deterministic,
            group_size=group_size,
            filtered=filtered,
        )
    return ScheduleConfig(
        batch_rows=batch_rows,
        num_steps_total=num_steps,
        ahead=config.trainer.rollout_ahead,
        sync_every=ahead.trigger_parameter_sync_step,
        first_step=first_step,
        slice_steps=ahead.slice_steps,
        max_running=rollout.max_num_seqs * rollout.attention_dp_size,
        max_queued=rollout.max_num_seqs // 16,  # for places that become free in a slice
        partial=ahead.partial_rollout,
        recompute_kv=ahead.kv_cache == "recompute",
        deterministic=ahead.deterministic or placement.is_colocated,
        colocated=placement.is_colocated,
        straggler_policy=ahead.straggler_policy,
        straggler_slices=ahead.straggler_slices,
        straggler_attempts=ahead.straggler_attempts,
        has_turns=config.has_turns,
        awaits_turns=ahead.deterministic,
        extra_groups=extra_groups(sizes.num_prompts, rollout.over_sample_rate),
        group_size=group_size,
        filtered=filtered,
    )


def num_replicas_of(config: RunConfig, placement: Placement) -> int:
    """The replicas of the rollout, at most where they come and go."""
    pool = placement.pool_of(ROLLOUT)
    if (elastic := elastic_pools(config).get(pool.name)) is not None:
        return elastic.max_replicas
    return pool.world_size // config.actor_rollout_ref.rollout.replica_size


def with_all_replicas(config: RunConfig, replay: Path | None) -> RunConfig:
    """The configuration of a run, in a replay with all replicas from the start: a replay cannot lose one."""
    if replay is None or not (pools := elastic_pools(config)):
        return config
    (pool,) = pools.values()
    replayed = copy.deepcopy(config)
    replayed.actor_rollout_ref.rollout.min_replicas = pool.max_replicas
    return replayed


def settings_of(rules: ScheduleConfig, config: RunConfig) -> dict[str, Any]:
    """Settings that a replayed schedule must have in common with the run that recorded it."""
    # What awaits_turns says follows from others, which older schedules have.
    left_out = {"first_step", "awaits_turns", *(() if rules.has_turns else ("has_turns",))}
    left_out |= {"group_size", *(() if rules.extra_groups else ("extra_groups",))}  # older schedules have neither
    left_out |= set() if rules.filtered else {"filtered"}
    settings = {name: value for name, value in asdict(rules).items() if name not in left_out}
    order = config.actor_rollout_ref.rollout.longest_first or None
    return settings | {"seed": config.trainer.seed, "drafts": drafts_of(config), "longest_first": order}


def drafts_of(config: RunConfig) -> dict[str, Any] | None:
    """The keys of speculative decoding, which decide how many tokens an engine step brings; None without it."""
    keys = config.actor_rollout_ref.rollout
    return {key: getattr(keys, key) for key in DRAFT_KEYS} if keys.speculative else None


def refuse_other_settings(run: Path, events: Sequence[Event], settings: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the names, if a schedule was recorded with other settings."""
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


def refuse_other_verdicts(saved: Mapping[str, Any] | None, rules: ScheduleConfig, checkpoint: Path | None) -> None:
    """Raise ConfigError where only one of a checkpoint's run and this one filters groups: begun batches differ."""
    if saved is None or ("groups" in saved) == bool(rules.kept_groups):
        return
    key, was = "algorithm.filter_groups.enable", "groups" in saved
    raise ConfigError(
        f"{key}={bool(rules.kept_groups)} cannot continue the responses of {checkpoint}, which began with {key}={was}; "
        f"try: {key}={was}, or trainer.rollout_ahead=0 and async_training.partial_rollout=false, which drops them"
    )


def open_journal(folder: RunFolder, schedule: Mapping[str, Any] | None, settings: dict[str, Any]) -> Journal:
    """Open the run's schedule.jsonl, cut to the length the checkpoint recorded. Raises StorageError."""
    with storing(SCHEDULE_FILE, folder.path):
        journal = Journal(folder.path / SCHEDULE_FILE, 0 if schedule is None else schedule["num_lines"])
        if not journal.num_lines:
            journal.append(Began(settings))
        if folder.resumed_step is not None:
            journal.append(Resumed(folder.resumed_step))
    return journal


def read_schedule_file(run: Path) -> list[Event]:
    """Read the recorded schedule of a run's folder. Raises ConfigError if there is none."""
    file = run / SCHEDULE_FILE
    try:
        return read_events(file)
    except OSError as error:
        rule = "has no schedule to repeat; runs with trainer.rollout_ahead or async_training.partial_rollout write one"
        raise ConfigError(f"{run} {rule}: {file} {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def open_schedule(
    config: RunConfig, placement: Placement, folder: RunFolder, opened: ExitStack, replay: Path | None = None
) -> Schedule:
    """Build the scheduler, new, resumed or replayed.

    replay: the folder of a run whose schedule is repeated. Raises ConfigError if it has none or one of other settings,
    and for a damaged checkpoint.
    """
    start = folder.start
    rules = rules_of(config, placement, start.step + 1)
    num_replicas = num_replicas_of(config, placement)
    if config.trainer.rollouts_from is not None:
        sizes = config.batch_sizes.num_samples
        check_record(Path(config.trainer.rollouts_from), rules.first_step, rules.num_steps_total, sizes)
    lengths = open_lengths(config, rules, start.path)
    former, expect = (open_earlier(config, rules, start.path), lengths), lengths.expected if lengths else None
    scheduler: RequestScheduler
    if not config.samples_ahead:
        scheduler = Scheduler(rules, num_replicas, None, expect)
        keys = (rules, scheduler, None, num_replicas, start.step, None, None, *former)
        return Schedule(*keys, image_folders=image_folders(config, folder, replay))
    settings, last_batch = settings_of(rules, config), rules.last_batch(start.step)
    saved = None if start.path is None else read_schedule(start.path)
    refuse_other_verdicts(saved, rules, start.path)
    replies: list[tuple[int, Reply]] | None = None
    if replay is None:
        scheduler = Scheduler(rules, num_replicas, saved, expect)
    else:
        events = read_schedule_file(replay)
        refuse_other_settings(replay, events, settings)
        scheduler = (FilteredReplay if rules.kept_groups else Replay)(rules, num_replicas, events)
        replies = [(event.request, event.reply) for event in events if isinstance(event, TurnAnswered | EpisodeBegan)]
    if saved is not None:
        last_batch = max(last_batch, rules.batch_of(saved.get("next_new", 0) - 1))
    journal = open_journal(folder, saved, settings)
    opened.callback(journal.close)
    checkpoint, first_group = (None, 0) if saved is None else (start.path, saved.get("first_group", 0))
    return Schedule(
        rules,
        Recorder(scheduler, journal),
        journal,
        num_replicas,
        last_batch,
        checkpoint,
        replies,
        *former,
        first_group,
        image_folders(config, folder, replay),
    )


def image_folders(config: RunConfig, folder: RunFolder, replay: Path | None) -> tuple[Path | None, Path | None]:
    """Return the folders of images that turns show: where this run keeps them, if another may repeat it, and where the
    run that it repeats has them.
    """
    trainer = config.trainer
    recorded = replay if trainer.rollouts_from is None else Path(trainer.rollouts_from)
    is_kept = config.samples_ahead or trainer.recorded_prompts == -1
    return folder.path / FOLDER if is_kept else None, None if recorded is None else recorded / FOLDER


def open_earlier(config: RunConfig, rules: ScheduleConfig, checkpoint: Path | None) -> ResponseHistory | None:
    """Return the store of responses from which rollouts draft, filled from a checkpoint; None: it draft tokens
    otherwise.

    Raises ConfigError for a damaged file.
    """
    keys = config.actor_rollout_ref.rollout
    if keys.speculative != EARLIER:
        return None
    earlier = ResponseHistory(keys.earlier_answers_per_prompt, keys.prompt_lookup_max, rules.ahead)
    if checkpoint is not None:
        earlier.read(checkpoint)
    return earlier


def open_lengths(config: RunConfig, rules: ScheduleConfig, checkpoint: Path | None) -> LengthHistory | None:
    """Return the store of lengths that order requests, filled from a checkpoint; None: the run orders none.

    Raises ConfigError for a damaged file.
    """
    if not config.actor_rollout_ref.rollout.longest_first:
        return None
    lengths = LengthHistory(rules)
    if checkpoint is not None:
        lengths.read(checkpoint)
    return lengths


def open_sampler(
    schedule: Schedule,
    sources: Sources,
    actor: Actor,
    rollout: Rollout | ReplicatedPool,
    checks: tuple[Callable[[], None], Callable[[], None]],
    opened: ExitStack,
) -> PoolSampler | ReplicaSampler:
    """Build the sampler, ready for `load_weights`. rollout: all its ranks, or its replicas if it has some.

    checks: called while the asynchronous sampler waits; one raises failures of pools, one raises if the run is to stop.
    """
    if not isinstance(rollout, ReplicatedPool):
        kind = PoolSampler
        if sources.config.trainer.rollouts_from is not None:
            kind = RecordedSampler
        return kind(schedule, sources, rollout, None if Placement.of(sources.config).is_colocated else actor)
    keys, folder = sources.config.actor_rollout_ref.rollout, Path(sources.config.trainer.default_local_dir)
    notices = opened.enter_context(DrainNotices(folder / DRAIN_FILE, keys.drain_url, sources.logger.warn))
    ahead = ReplicaSampler(schedule, sources, rollout.replicas, actor, *checks, notices)
    opened.enter_context(ahead.driver)
    ahead.weights.open()
    return ahead
