"""Sample batches: prompts in their order, responses from the rollout, and weights sent to the rollout.

The scheduler decides which replica generates which requests with which weights. A sampler turns its decisions into
batches for the training loop. The prompt cursor of the run stays at the last trained batch, so that a checkpoint is the
same with and without batches that are already begun.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
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
from megatron_rl.observe.phase_clock import PhaseClock
from megatron_rl.records import Batch, Sampling, one_per_group, repeated
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import DraftCounts
from megatron_rl.sampling.filtered_batches import FilteredBatches, GroupPrompts
from megatron_rl.sampling.group_judge import GroupJudge, keeps_of
from megatron_rl.sampling.in_flight import InFlightBatches
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
    """The episodes that are waited for, if any. in_rounds: they are generated in several rounds of the engines, between
    which the driver learns of them; else only the engines know.
    """

    def __init__(self, in_rounds: bool) -> None:
        self._in_rounds = in_rounds
        self._episodes: Sequence[Episode] = ()

    @contextmanager
    def waiting(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Wait for these inside."""
        self._episodes = episodes
        try:
            yield
        finally:
            self._episodes = ()

    def progress(self, phase: str = "") -> list[str]:
        """Return how many are complete, and how many wait for their environment; any thread may ask."""
        episodes = self._episodes
        if not (episodes and self._in_rounds):
            return []
        complete, waiting = sum(one.finish != "" for one in episodes), sum(one.waits for one in episodes)
        known = [f"{complete} of {len(episodes)} responses complete"]
        return [*known, f"{waiting} wait for their environment"] if waiting else known


TURNS = "turns"
"""The phase in which nothing but environments, tools and agents is waited for."""
FIXED_SALT = -1
"""Validation samples, where they are sampled, use the same seeds every time."""


def draft_metrics(counts: DraftCounts) -> dict[str, float]:
    """Tokens that a request got in an engine step, and the share of draft tokens that were right; none without draft
    tokens."""
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
    """Sources of batches. scorer: of responses, which may begin before their batch is complete. episodes: answers
    turns; None: the first turn of a response is its last. verdicts: the user's, on groups; None: their scores decide.
    """

    config: RunConfig
    train_data: PromptDataset
    cursor: MixtureCursor | PromptSampler
    scorer: RewardScorer
    logger: SamplingLogger
    episodes: Episodes | None = None
    verdicts: UserVerdicts | None = None


@dataclass(frozen=True)
class Schedule:
    """The scheduler of a run and its state. checkpoint: the folder to resume from if it has responses, else None.

    last_batch: the last batch that the checkpoint has begun. journal: None if no response outlives its step: then
    nothing is recorded or saved. replies: the replies to turns of a schedule that is repeated, by request, in their
    order. earlier: responses from which rollouts draft, with those of the checkpoint; None: they do not. lengths: of
    former responses, by which requests are ordered; None: they are not. first_group: with
    verdicts, the group whose prompt the cursor gives next.
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


class Sampler:
    """Base of samplers: samples prompts as far ahead of training as the settings allow. Raises as `read_answers`.

    Subclasses define `next`, `load_weights`, `answer` and `saving`. version: of the newest weights that the rollout
    has, in training steps.
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
        self._earlier = schedule.earlier
        self.answers = InFlightBatches(
            self.rules.batch_rows,
            self.seed_of,
            self.journal is not None,
            limits,
            self.earlier_of,
            schedule.scheduler.groups,
        )
        self._cursor_ahead, self._last_begun = self.cursor.ahead(), self.rules.first_step - 1
        self._verdicts = sources.verdicts
        self._groups: FilteredBatches | None = None
        if self.rules.kept_groups:
            self._groups = self._filtered_batches(schedule, sources)
            self._groups.begin(schedule.scheduler.verdicts.take_joined())
        self.draw_prompts(schedule.last_batch)
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
        if self.rules.slice_steps is not None:  # otherwise all responses of a batch come together
            self.queue.on_end = sources.scorer.begin
        if self._groups is not None:
            self._groups.serve(self.queue)
        self._begin_episodes()

    def _filtered_batches(self, schedule: Schedule, sources: Sources) -> FilteredBatches:
        """What verdicts on groups need; without responses that outlive a step, batches are scored as a whole."""
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
        """What answers turns: as recorded where a schedule is repeated. Every response goes to the journal."""
        if live is None:
            return None
        episodes = live if schedule.replies is None else RecordedEpisodes(live.limits, schedule.replies)
        journal = schedule.journal
        if journal is not None:
            episodes.record = lambda request, reply: journal.append(reply_event(request, reply))
        return episodes

    def next(self, step: int) -> SampledBatch:
        """The batch of a step, once it is complete."""
        raise NotImplementedError

    def load_weights(self, step: int) -> None:
        """Let generation have the weights after `step`."""
        raise NotImplementedError

    def answer(self, prompts: Batch, sampling: Sampling) -> Batch:
        """The prompts as their episodes have begun, with responses to all of them, now and outside of the schedule,
        by the newest weights that the rollout has.
        """
        raise NotImplementedError

    def saving(self, step: int) -> AbstractContextManager[None]:
        """Wrap a checkpoint after `step`: responses of later steps do not change inside."""
        raise NotImplementedError

    def describe(self) -> dict[str, float]:
        """Metrics of a step's sampling."""
        return {}

    def begin_batches(self, last: int) -> None:
        """Generate the prompts of all batches up to that of step `last`, and wait until environments have begun their
        episodes.
        """
        self.draw_prompts(last)
        self._begin_episodes()

    def _begin_episodes(self) -> None:
        self.queue.begin_episodes()
        while not self.queue.is_begun:
            with self.logger.clock.phase(TURNS):
                self.queue.take_replies(waits=True)

    def draw_prompts(self, last: int) -> None:
        """Generate the prompts of all batches up to that of step `last`, unless verdicts decide which they are."""
        while self._groups is None and self._last_begun < last:
            self._last_begun += 1
            prompts = self.next_prompts(self._cursor_ahead)
            greedy = one_per_group(prompts) if self.needs_greedy else None
            self.answers.add(self._last_begun, prompts, self.sampling(self._last_begun), greedy, self.greedy())

    def write(self, folder: Path, step: int) -> list[str]:
        """Write the responses of steps after `step` to a checkpoint; returns file names. Call inside `saving`."""
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
        """Earlier responses that requests of a prompt and a batch name: see `Start`."""
        return () if self._earlier is None else self._earlier.of(index, batch)

    def keep(self, step: int, rows: Batch) -> None:
        """Keep a step's responses for draft tokens of later steps, if rollouts draft from them, and their lengths."""
        if self._lengths is not None:
            self._lengths.add(step, rows["index"], rows)
        if self._earlier is not None:
            self._earlier.add(step, rows["index"], rows)

    def _prompts_numbered(self, numbers: Sequence[int]) -> Batch:
        """Prompts by their rows over all files. Raises ValueError for one that is none of the usable prompts."""
        places = self.train_data.places(numbers)
        if None in places:
            raise ValueError(f"rows {list(numbers)} are not all prompts of this run")
        return self.train_data.batch([place for place in places if place is not None])

    def next_prompts(self, cursor: PromptCursor) -> Batch:
        """The next training prompts of a cursor, each `rollout.n` times."""
        return repeated(self.train_data.batch(cursor.next_indices()), self.config.batch_sizes.samples_per_prompt)

    def sampling(self, salt: int) -> Sampling:
        """Sampling parameters of training."""
        rollout, longest = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        experts = self.config.returns_experts
        return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, longest, salt, experts)

    def greedy(self) -> Sampling:
        """Sampling parameters of greedy baseline responses, where the seed has no effect."""
        return Sampling(0.0, 1.0, -1, self.config.data.max_response_length, FIXED_SALT)

    def val_sampling(self) -> Sampling:
        """Sampling parameters of validation: greedy unless `val_kwargs.do_sample`."""
        kwargs = self.config.actor_rollout_ref.rollout.val_kwargs
        if not kwargs.do_sample:
            return self.greedy()
        longest = self.config.data.max_response_length
        return Sampling(kwargs.temperature, kwargs.top_p, kwargs.top_k, longest, FIXED_SALT)

    def take(self, step: int) -> SampledBatch:
        """The complete batch of a step, which is trained now."""
        if self._groups is not None:
            batch, rows = self._groups.take(step, self.queue)
            batch.metrics |= {} if self._verdicts is None else self._verdicts.metrics()
            self.keep(step, rows)
            batch.metrics |= self._describe_responses(step)
            return batch
        rows, greedy = self.queue.batch(step)
        self.cursor.next_indices()  # these are the prompts of the batch: the cursor moves behind them
        self.keep(step, rows)
        requests, compared = self.answers.requests_of(step)
        batch = SampledBatch(step, rows, greedy, requests=requests, greedy_requests=compared)
        batch.metrics |= self._describe_responses(step)
        if self.rules.extra_groups:
            batch.metrics["rollout/late_groups"] = float(self.queue.num_late // self.rules.group_size)
        return batch

    def _sampled_episodes(self, step: int) -> list[Episode]:
        """The episodes of a step's rows, without greedy responses; none of a batch that is not begun."""
        return [self.answers.episode(request) for request in self.answers.requests_of(step)[0]]

    def _describe_responses(self, step: int) -> dict[str, float]:
        """Metrics of draft tokens and episodes. Warns of failed ones; raises RewardError where too many have failed."""
        drafts = draft_metrics(self.answers.drafts(step))
        if self.episodes is None:
            return drafts
        episodes = self._sampled_episodes(step)
        metrics, most = (
            drafts | episode_metrics(episodes),
            self.config.actor_rollout_ref.rollout.multi_turn.max_failed_ratio,
        )
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        while self.episodes.late_notes:
            self.logger.warn(self.episodes.late_notes.pop(0))
        if failures:
            first = f"{len(failures)} of {len(episodes)} episodes failed; the first: {failures[0].reason}"
            if len(failures) > most * len(episodes):
                raise RewardError(f"{first}; at most {most:.0%} may fail (multi_turn.max_failed_ratio)")
            self.logger.warn(first)
        return metrics
