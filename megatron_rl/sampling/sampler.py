"""Give the training loop its batches: prompts in their order, with responses from the rollout.

The scheduler decides which replica generates which requests with which weights; a sampler turns its decisions into
batches, and sends weights to the rollout. The run's prompt cursor stays behind the last trained batch, and a cursor of
its own runs ahead, so that a checkpoint is the same with and without batches that are already begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from megatron_rl.agents.episode import Episode, Reply, episode_metrics
from megatron_rl.agents.episodes import Episodes, RecordedEpisodes
from megatron_rl.config.algorithms import estimator_traits
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.data.prompt_mixture import MixtureCursor, PromptCursor
from megatron_rl.data.prompt_sampler import PromptSampler
from megatron_rl.errors import RewardError
from megatron_rl.hybrid_engine.hybrid_engine import TransitionReport
from megatron_rl.images import Pieces
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Batch, Sampling, one_per_group, repeated
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import DraftCounts, ImageInput
from megatron_rl.sampling.filtered_batches import FilteredBatches, GroupPrompts
from megatron_rl.sampling.group_judge import GroupJudge, keeps_of
from megatron_rl.sampling.image_features import ImageFeatures, passes_metric
from megatron_rl.sampling.image_tensors import TurnImages
from megatron_rl.sampling.in_flight import InFlightBatches, images_in_flight
from megatron_rl.sampling.journal import Journal, reply_event
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.request_scheduler import RequestScheduler
from megatron_rl.sampling.response_history import EARLIER_FILE, LENGTHS_FILE, LengthHistory, ResponseHistory
from megatron_rl.sampling.rollout_checkpoint import ROLLOUTS_FILE, read_answers, write_rollouts
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.scoring.batch_scorers import RewardScorer
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.user_verdict import UserVerdicts


class Awaited:
    """The episodes that the trainer waits for, for the progress line.

    in_rounds: the driver learns of responses between rounds of the engines; else the engines alone know of them.
    """

    def __init__(self, in_rounds: bool) -> None:
        self._in_rounds = in_rounds
        self._episodes: Sequence[Episode] = ()

    @contextmanager
    def waiting(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Wait for these episodes inside."""
        self._episodes = episodes
        try:
            yield
        finally:
            self._episodes = ()

    def progress(self, phase: str = "") -> list[str]:
        """Return lines: how many are complete, and how many wait for their environment. Any thread may call."""
        episodes = self._episodes
        if not (episodes and self._in_rounds):
            return []
        complete, waiting = sum(one.finish != "" for one in episodes), sum(one.waits for one in episodes)
        known = [f"{complete} of {len(episodes)} responses complete"]
        return [*known, f"{waiting} wait for their environment"] if waiting else known


TURNS = "turns"
"""The phase in which the trainer waits for environments, tools and agents alone."""
FIXED_SALT = -1
"""Salt of seeds that are the same in every step: of validation, and of greedy responses."""


def draft_metrics(counts: DraftCounts) -> dict[str, float]:
    """Return the tokens of a request in an engine step, and the share of draft tokens that were accepted; {} without
    draft tokens.
    """
    if not counts.num_steps:
        return {}
    accepted = counts.num_tokens - counts.num_steps
    share = accepted / counts.num_drafted if counts.num_drafted else 0.0
    return {"rollout/tokens_per_step": counts.num_tokens / counts.num_steps, "rollout/drafts_accepted": share}


class SamplingLogger(Protocol):
    """The part of the run's logger that sampling uses."""

    clock: PhaseClock

    def warn(self, message: str) -> None: ...

    def note_transition(self, reports: Sequence[TransitionReport]) -> None: ...


@dataclass(frozen=True)
class Sources:
    """What batches are made of.

    train_data, cursor: the prompts, and the run's position in them. scorer: of responses, which may begin before their
    batch is complete. episodes: environments that answer turns; None: a response has one turn. verdicts: the user's
    function on groups; None: scores decide. images: features of those that prompts show; None: prompts are text.
    """

    config: RunConfig
    train_data: PromptDataset
    cursor: MixtureCursor | PromptSampler
    scorer: RewardScorer
    logger: SamplingLogger
    episodes: Episodes | None = None
    verdicts: UserVerdicts | None = None
    images: ImageFeatures | None = None


@dataclass(frozen=True)
class Schedule:
    """The scheduler of a run and its state.

    rules: settings of the schedule. journal: records it; None if no response outlives its step: then nothing is
    recorded or saved. last_batch: the last batch that the checkpoint has begun. checkpoint: its folder, if it has
    responses, else None. replies: those to turns of a schedule that is replayed, by request, in their order. earlier:
    responses of earlier steps, for draft tokens; None: not used. lengths: of responses of earlier steps, which order
    requests; None: not used. first_group: with verdicts, the number of the group whose prompt the cursor gives next.
    image_folders: of images that turns show, where this schedule keeps them and where the replayed one has them.
    """

    rules: ScheduleConfig
    scheduler: RequestScheduler
    journal: Journal | None
    num_replicas: int
    last_batch: int
    checkpoint: Path | None
    replies: Sequence[tuple[int, Reply]] | None = None
    earlier: ResponseHistory | None = None
    lengths: LengthHistory | None = None
    first_group: int = 0
    image_folders: tuple[Path | None, Path | None] = (None, None)


class Sampler:
    """Base of samplers: begins batches as early as the settings allow.

    Subclasses define `next`, `load_weights`, `answer` and `saving`. answers: the batches that are begun, with their
    responses. queue: their requests. needs_greedy: an estimator compares with greedy responses. Raises as
    `read_answers`.
    """

    def __init__(self, schedule: Schedule, sources: Sources) -> None:
        self.config, self.logger = sources.config, sources.logger
        self.train_data, self.cursor = sources.train_data, sources.cursor
        self.needs_greedy = "greedy_scores" in estimator_traits(sources.config).reads
        self.rules, self.journal = schedule.rules, schedule.journal
        self.seed_of = partial(request_seed, self.config.trainer.seed)
        self.episodes = self._episodes(sources.episodes, schedule)
        limits = None if self.episodes is None else self.episodes.limits
        self.awaited = Awaited(self.episodes is not None or self.rules.slice_steps is not None)
        self._earlier, self._images = schedule.earlier, sources.images
        self.answers = InFlightBatches(
            self.rules.batch_rows,
            self.seed_of,
            self.journal is not None,
            limits,
            self.earlier_of,
            schedule.scheduler.groups,
            self._images_of,
            self._turn_images(schedule),
            lambda request: self.episodes is not None and self.episodes.hears_cut(request),
        )
        self._cursor_ahead, self._last_begun = self.cursor.ahead(), self.rules.first_step - 1
        self._verdicts = sources.verdicts
        self._groups: FilteredBatches | None = None
        if self.rules.kept_groups:
            self._groups = self._filtered_batches(schedule, sources)
            self._groups.begin(schedule.scheduler.verdicts.take_joined())
        self.add_prompts(schedule.last_batch)
        if schedule.checkpoint is not None:
            read_answers(schedule.checkpoint, self.answers, self._prompts_numbered)
        self.answers.trained(self.rules.first_step - 1)  # groups that joined an earlier batch
        self.queue = RequestQueue(schedule.scheduler, self.answers, schedule.num_replicas, self.episodes)
        self.queue.lengths = self._lengths = schedule.lengths
        if schedule.lengths is not None:
            schedule.lengths.prompt_of = lambda request: int(self.answers.episode(request).row["index"])
            schedule.lengths.batch_of = schedule.scheduler.groups.batch_of
        # Where slices are recorded, a repeated one must find the same cache, whatever was lost meanwhile.
        self.queue.keeps_prefixes = self.journal is None
        self.scores_ended: Callable[[], None] = lambda: None
        if self.rules.slice_steps is not None:  # otherwise all responses of a batch come together
            self.queue.on_end, self.scores_ended = sources.scorer.begin, sources.scorer.proceed
        if self._groups is not None:
            self._groups.serve(self.queue)
        self._begin_episodes()

    def _filtered_batches(self, schedule: Schedule, sources: Sources) -> FilteredBatches:
        """Return what verdicts on groups need. Where a response may outlive its step, groups are scored one by one,
        with a scorer of their own; else batches are scored as a whole.
        """
        rewards, rules, user = sources.scorer.rewards, self.rules, sources.verdicts
        own = RewardScorer(rewards.for_groups()) if rules.ahead else sources.scorer
        if user is not None and rules.ahead:
            user.judges_single_groups()
        keeps = keeps_of(self.config.algorithm.filter_groups.metric, user)
        judge = GroupJudge(keeps, own, schedule.scheduler.verdicts, self.answers, rules.group_size)
        prompts = GroupPrompts(self.cursor, self.next_prompts, rules.num_groups, schedule.first_group)
        stops = rewards.stop_if_all_failed
        rest = (self.sampling, self.logger.warn, stops, len(self.train_data))
        return FilteredBatches(rules, self.answers, prompts, judge, *rest)

    def _episodes(self, live: Episodes | None, schedule: Schedule) -> Episodes | None:
        """Return what answers turns, a replayed schedule with its recorded replies. The journal gets each reply."""
        if live is None:
            return None
        episodes = live if schedule.replies is None else RecordedEpisodes(live.limits, schedule.replies)
        journal = schedule.journal
        if journal is None:
            return episodes

        def record(request: int, reply: Reply) -> None:
            if reply.images and self.train_data.images is not None:
                self.train_data.images.turns.record(reply.images)
            journal.append(reply_event(request, reply))

        episodes.record = record
        return episodes

    def _turn_images(self, schedule: Schedule) -> TurnImages | None:
        """Return the images of turns; None where turns are text."""
        if self.episodes is None or self._images is None or self.train_data.images is None:
            return None
        turns = self.train_data.images.turns
        turns.record_in(*schedule.image_folders)
        return turns

    def next(self, step: int) -> SampledBatch:
        """Return the batch of a step, once it is complete."""
        raise NotImplementedError

    def load_weights(self, step: int) -> None:
        """Give the weights after `step` to the rollout."""
        raise NotImplementedError

    def answer(self, prompts: Batch, sampling: Sampling) -> Batch:
        """Generate responses now, outside of the schedule, with the newest weights that the rollout has.

        Returns the prompts, as environments may have changed them, each with its response.
        """
        raise NotImplementedError

    def saving(self, step: int) -> AbstractContextManager[None]:
        """Hold responses of later steps still inside, while a checkpoint after `step` is written."""
        raise NotImplementedError

    def describe(self) -> dict[str, float]:
        """Return metrics of a step's sampling."""
        return {}

    def begin_batches(self, last: int) -> None:
        """Add the prompts of all batches up to that of step `last`, and wait until environments have begun their
        episodes.
        """
        self.add_prompts(last)
        self._begin_episodes()

    def _read_images(self, further: Iterable[Pieces] = ()) -> None:
        """Have the features of all images of requests in flight, and of further rows. The actor must not be amid a
        call.
        """
        if self._images is not None:
            self._images.need([*images_in_flight(self.answers), *further])

    def _weights_changed(self) -> None:
        """Note that the actor has learned: the features of a trained tower are others."""
        if self._images is not None:
            self._images.changed()

    def _images_of(self, pieces: Pieces) -> tuple[ImageInput, ...]:
        """Return the images of a request: see `Start`."""
        return () if self._images is None else self._images.inputs(pieces)

    def _with_images(self, rows: Batch) -> Batch:
        """Return rows with the columns of their images, which are in flight."""
        if self._images is not None:
            rows.add(self._images.columns(rows))
        if self.answers.shown is not None:
            pieces = chain.from_iterable(images_in_flight(self.answers))
            self.answers.shown.forget({piece.digest for piece in pieces})
        return rows

    def _begin_episodes(self) -> None:
        self.queue.begin_episodes()
        while not self.queue.is_begun:
            with self.logger.clock.phase(TURNS):
                self.queue.take_replies(waits=True)

    def add_prompts(self, last: int) -> None:
        """Add the prompts of all batches up to that of step `last` to `answers`. With verdicts on groups these say when
        a prompt is read.
        """
        while self._groups is None and self._last_begun < last:
            self._last_begun += 1
            prompts = self.next_prompts(self._cursor_ahead)
            greedy = one_per_group(prompts) if self.needs_greedy else None
            self.answers.add(self._last_begun, prompts, self.sampling(self._last_begun), greedy, self.greedy())

    def write(self, folder: Path, step: int) -> list[str]:
        """Write the responses of steps after `step` to a checkpoint; return its file names. Call inside `saving`."""
        files = []
        if self._earlier is not None:
            self._earlier.write(folder, step)
            files.append(EARLIER_FILE)
        if self._lengths is not None:
            self._lengths.write(folder, step)
            files.append(LENGTHS_FILE)
        if self.journal is not None:
            schedule = self.queue.scheduler.state_dict() | {"num_lines": self.journal.num_lines}
            if self._groups is not None:
                schedule["first_group"] = self._groups.prompts.first_after(step)
            write_rollouts(folder, self.answers, schedule, step)
            files.append(ROLLOUTS_FILE)
        return files

    def earlier_of(self, index: int, batch: int) -> tuple[bytes, ...]:
        """Return the responses of earlier steps to a prompt that a request of a batch may draft from: see `Start`."""
        return () if self._earlier is None else self._earlier.of(index, batch)

    def keep(self, step: int, rows: Batch) -> None:
        """Keep a step's responses for draft tokens, and their lengths for the order of requests, if they are used."""
        if self._lengths is not None:
            self._lengths.add(step, rows["index"], rows)
        if self._earlier is not None:
            self._earlier.add(step, rows["index"], rows)

    def _prompts_numbered(self, numbers: Sequence[int]) -> Batch:
        """Return prompts by their row numbers over all files. Raises ValueError for a row that is no usable prompt."""
        places = self.train_data.places(numbers)
        if None in places:
            raise ValueError(f"rows {list(numbers)} are not all prompts of this run")
        return self.train_data.batch([place for place in places if place is not None])

    def next_prompts(self, cursor: PromptCursor) -> Batch:
        """Return the next training prompts of a cursor, each `rollout.n` times."""
        return repeated(self.train_data.batch(cursor.next_indices()), self.config.batch_sizes.samples_per_prompt)

    def sampling(self, salt: int) -> Sampling:
        """Return the sampling parameters of training. salt: makes the seeds of a batch its own."""
        rollout, longest = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        experts = self.config.returns_experts
        return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, longest, salt, experts)

    def greedy(self) -> Sampling:
        """Return the sampling parameters of greedy responses, on which the seed has no effect."""
        return Sampling(0.0, 1.0, -1, self.config.data.max_response_length, FIXED_SALT)

    def val_sampling(self) -> Sampling:
        """Return the sampling parameters of validation: greedy unless `val_kwargs.do_sample`."""
        kwargs = self.config.actor_rollout_ref.rollout.val_kwargs
        if not kwargs.do_sample:
            return self.greedy()
        longest = self.config.data.max_response_length
        return Sampling(kwargs.temperature, kwargs.top_p, kwargs.top_k, longest, FIXED_SALT)

    def take(self, step: int) -> SampledBatch:
        """Hand the complete batch of a step to the trainer, and move the run's prompt cursor behind it."""
        if self._groups is not None:
            batch, rows = self._groups.take(step, self.queue)
            self._with_images(batch.rows)
            batch.metrics |= {} if self._verdicts is None else self._verdicts.metrics()
            self.keep(step, rows)
            batch.metrics |= self._describe_responses(step)
            return batch
        rows, greedy = self.queue.batch(step)
        rows = self._with_images(rows)
        self.cursor.next_indices()  # the prompts of this batch
        self.keep(step, rows)
        requests, compared = self.answers.requests_of(step)
        batch = SampledBatch(step, rows, greedy, requests=requests, greedy_requests=compared)
        batch.metrics |= self._describe_responses(step)
        if self.rules.extra_groups:
            batch.metrics["rollout/late_groups"] = float(self.queue.num_late // self.rules.group_size)
        return batch

    def _sampled_episodes(self, step: int) -> list[Episode]:
        """Return the episodes of a step's batch without greedy responses; [] if the batch is not begun."""
        return [self.answers.episode(request) for request in self.answers.requests_of(step)[0]]

    def _describe_responses(self, step: int) -> dict[str, float]:
        """Return metrics of draft tokens and episodes. Warn of failed episodes; raise RewardError for too many."""
        metrics = draft_metrics(self.answers.drafts(step)) | passes_metric(self._images)
        if self.episodes is None:
            return metrics
        episodes = self._sampled_episodes(step)
        metrics |= episode_metrics(episodes)
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        while self.episodes.late_notes:
            self.logger.warn(self.episodes.late_notes.pop(0))
        if failures:
            first = f"{len(failures)} of {len(episodes)} episodes failed; the first: {failures[0].reason}"
            most = self.config.actor_rollout_ref.rollout.multi_turn.max_failed_ratio
            if len(failures) > most * len(episodes):
                raise RewardError(f"{first}; at most {most:.0%} may fail (multi_turn.max_failed_ratio)")
            self.logger.warn(first)
        return metrics
