"""Batches that only kept groups complete, as a sampler makes them (dynamic sampling): prompts, verdicts and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_rl.data.prompt_mixture import MixtureCursor, PromptCursor
from megatron_rl.data.prompt_sampler import PromptSampler
from megatron_rl.errors import RewardError
from megatron_rl.records import Batch, Sampling
from megatron_rl.sampling.filtered_requests import FilteredGroups
from megatron_rl.sampling.group_judge import GroupJudge
from megatron_rl.sampling.group_map import requests_of_groups
from megatron_rl.sampling.in_flight import InFlightBatches
from megatron_rl.sampling.request_queue import RequestQueue
from megatron_rl.sampling.schedule_types import GroupsJoined, ScheduleConfig
from megatron_rl.scoring.sampled_batch import SampledBatch


class GroupPrompts:
    """Group number g has the g-th prompt of the run. The run's cursor stays at the batch of generation with the first
    group that is not trained, so that a checkpoint has all that begins or continues later.
    """

    def __init__(
        self,
        cursor: MixtureCursor | PromptSampler,
        read: Callable[[PromptCursor], Batch],
        num_groups: int,
        first_group: int,
    ) -> None:
        """Begin at `first_group`, where `cursor` stands. read: returns the next batch of generation of a cursor,
        `num_groups` groups.
        """
        self._cursor, self._ahead, self._read = cursor, cursor.ahead(), read
        self._num_groups, self._first, self._next = num_groups, first_group, first_group
        self._batches: dict[int, Batch] = {}
        self._first_after: dict[int, int] = {}

    def of(self, group: int) -> tuple[Batch, range]:
        """Return the prompts of a group's batch of generation, and the group's rows there."""
        while self._next <= group:
            self._batches[self._next] = self._read(self._ahead)
            self._next += self._num_groups
        first = group // self._num_groups * self._num_groups
        prompts = self._batches[first]
        size = len(prompts) // self._num_groups
        return prompts, range((group - first) * size, (group - first + 1) * size)

    def trained(self, step: int, first_live: int) -> None:
        """Move the run's cursor. first_live: the first group that a later step may train."""
        while self._first + self._num_groups <= first_live:
            self._cursor.next_indices()
            self._batches.pop(self._first, None)
            self._first += self._num_groups
        self._first_after = {old: at for old, at in self._first_after.items() if old >= step - 1} | {step: self._first}

    def first_after(self, step: int) -> int:
        """Return the group at which the run's cursor stood after a step: the last one, or the one before."""
        return self._first_after.get(step, self._first)


KEYS = "algorithm.filter_groups"


class FilteredBatches:
    """What a sampler needs in addition where verdicts decide what is trained.

    judge: scores groups. prompts: of groups. sampling: salt -> parameters. warn: shows a sentence.
    """

    def __init__(
        self,
        rules: ScheduleConfig,
        answers: InFlightBatches,
        prompts: GroupPrompts,
        judge: GroupJudge,
        sampling: Callable[[int], Sampling],
        warn: Callable[[str], None],
        stops: bool,
        num_prompts: int,
    ) -> None:
        """stops: a batch without a single score ends the run. num_prompts: usable ones of the run."""
        self.rules, self.answers, self.prompts, self.judge = rules, answers, prompts, judge
        self._sampling, self._warn, self._stops = sampling, warn, stops
        self._num_prompts = num_prompts

    @property
    def groups(self) -> FilteredGroups:
        """The batch of every group."""
        assert isinstance(self.answers.groups, FilteredGroups)  # as kept_groups asks for
        return self.answers.groups

    def begin(self, joined: Sequence[GroupsJoined]) -> None:
        """Add the prompts of groups that begin."""
        for event in joined:
            for group in range(event.first, event.first + event.num):
                prompts, rows = self.prompts.of(group)
                self.answers.add_group(group * self.rules.group_size, prompts, rows, self._sampling(event.salt))

    def serve(self, queue: RequestQueue) -> None:
        """Let a queue begin groups, and judge them where that needs no rank."""
        queue.begin_groups = self.begin
        if self.rules.ahead and not self.judge.needs_ranks:
            queue.judge = self._judge_scored

    def judge_finished(self) -> bool:
        """Judge all finished groups, waiting for their scores; return whether there was one. Raises RewardError as
        `GroupJudge.judge`, and where no step can be filled.
        """
        return self._checked(self.judge.judge())

    def _judge_scored(self) -> bool:
        return self._checked(self.judge.judge_scored())

    def _checked(self, has_judged: bool) -> bool:
        """Raise RewardError where nothing bounds the groups of a batch, and none of all training prompts is kept."""
        for batch in {at for _, at in self.groups.moved} if has_judged and not self.rules.max_groups else ():
            num_judged = self.groups.num_begun(batch) - len(self.groups.pending(batch))
            if num_judged >= self._num_prompts and not self.groups.kept(batch):
                num_batches = max(1, num_judged // self.rules.num_groups)
                raise RewardError(
                    f"{share_text(0, num_judged, num_batches)}, which have every training prompt: no step can be "
                    f"filled; try: {KEYS}.max_num_gen_batches={num_batches}, or another reward function or filter"
                )
        return has_judged

    def take(self, step: int, queue: RequestQueue) -> tuple[SampledBatch, Batch]:
        """The complete batch of a step, and the rows of all groups that were finished for it. Raises RewardError if
        nothing in the batch could be scored.
        """
        num_kept = len(self.groups.kept(step))
        if num_kept < self.rules.kept_groups and step == self.rules.first_step:
            begun = self.groups.num_begun(step)
            share = share_text(num_kept, begun, begun / self.rules.num_groups)
            self._warn(f"{share}: groups that are not kept fill up the {self.rules.kept_groups} of the step")
        rows, _ = queue.batch(step)
        chosen = self.groups.of(step)
        scored = self.judge.scores(chosen)
        if self._stops and all(outcome.failure for outcome in scored.outcomes):
            number = len(scored.outcomes)
            raise RewardError(f"none of {number} samples could be scored; the first: {scored.first_failure}")
        dropped = [group for group in self.groups.dropped(step) if group in self.groups.verdicts]
        ended = sorted([*chosen, *dropped])
        all_rows = self.answers.rows(requests_of_groups(ended, self.rules.group_size))
        num_trained, num_all = int(rows.num_sampled.sum()), int(all_rows.num_sampled.sum())
        metrics = {
            "train/num_gen_batches": self.groups.num_begun(step) / self.rules.num_groups,
            "train/differing_groups": min(num_kept, self.rules.kept_groups) / self.rules.kept_groups,
            "train/dropped_tokens": 1 - num_trained / num_all if num_all else 0.0,
        }
        self.judge.forget(ended)
        self.prompts.trained(step, self.groups.first_live(step))
        requests = self.groups.requests_of(step)
        return SampledBatch(step, rows, scored=scored, metrics=metrics, requests=requests), all_rows


def share_text(num_kept: int, num_groups: int, num_batches: float) -> str:
    """Return the share of groups that dynamic sampling has kept."""
    share = num_kept / num_groups
    return f"dynamic sampling keeps {num_kept} of {num_groups} groups ({share:.1%}) in {num_batches:g} batches"
