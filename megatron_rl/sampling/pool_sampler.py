"""Sample on one pool, in rounds of slices until a batch is complete: the actor's own ranks, or ranks that it sends to.

Without responses that outlive a step a batch is one round, in which each replica generates its share to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.records import Batch, Sampling, one_per_group, prompts_of
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.rollout.slices import Drawn, Slice, Start, largest_cache_usage
from megatron_rl.sampling.questions import PolicyQuestions
from megatron_rl.sampling.sampler import TURNS, Sampler, Schedule, Sources
from megatron_rl.sampling.unscheduled_requests import UnscheduledRequests
from megatron_rl.scoring.sampled_batch import SampledBatch


class PoolSampler(Sampler):
    """Generate between two training steps. The ranks are in rollout mode only inside `next` and `answer`.

    sender: the actor, if the rollout has weights of its own, which it receives. Unfinished responses of later batches
    continue in the next step, with newer weights.
    """

    def __init__(self, schedule: Schedule, sources: Sources, rollout: Rollout, sender: Actor | None = None) -> None:
        super().__init__(schedule, sources)
        self.rollout, self._sender = rollout, sender
        self._version = self.rules.first_step - 1

    def next(self, step: int) -> SampledBatch:
        """The batch of a step, which is generated now as far as it is not yet complete."""
        self.begin_batches(self.rules.last_batch(step - 1))
        while not self.queue.scheduler.is_complete(step):
            if self._images is not None:  # groups begin before their images are read
                self.queue.open_groups()
            self._read_images()
            with self.awaited.waiting(self._sampled_episodes(step)), self._rollout_mode():
                self._run_slices(step)
            if self._groups is not None:
                self._groups.judge_finished()
        batch = self.take(step)
        if self._groups is not None and self.needs_greedy:
            batch.greedy = self.answer(one_per_group(prompts_of(batch.rows)), self.greedy())
        return batch

    def load_weights(self, step: int) -> None:
        """Send the weights after `step` to the rollout, unless it is in the actor's pool and reads them there."""
        self._version = step
        self._weights_changed()
        if self._sender is not None:
            sending, receiving = self._sender.send_weights(step), self.rollout.receive_weights()
            self.logger.note_transition(receiving.get())
            sending.get()

    def answer(self, prompts: Batch, sampling: Sampling, step: int | None = None) -> Batch:
        """step: of training, whose responses are generated with draft tokens from earlier ones."""
        earlier = [] if step is None else [self.earlier_of(index, step) for index in prompts["index"].tolist()]
        how = (self.rules.awaits_turns, earlier, self._images_of)
        asked = UnscheduledRequests(prompts, sampling, self.seed_of, self.episodes, *how)
        asked.begin()
        self._read_images(asked.images)
        with self.awaited.waiting(asked.episodes), self._rollout_mode():
            while not asked.is_answered:
                shares = asked.shares(len(self.queue.engines))
                slices = {
                    replica: Slice(self._version, None, share, keeps_prefixes=True)
                    for replica, share in enumerate(shares)
                    if share
                }
                if slices:
                    asked.note(self.rollout.advance(slices).get())
                asked.take_replies(waits=not slices)
                self._read_images(asked.images)
        return self._with_images(asked.rows())

    def ask(self, starts: Sequence[Start]) -> dict[int, Drawn]:
        """Have the policy reply to questions that are no prompts of the run: number -> reply."""
        asked = PolicyQuestions(starts)
        with self._rollout_mode():
            shares = enumerate(asked.shares(len(self.queue.engines)))
            slices = {replica: Slice(self._version, None, share) for replica, share in shares if share}
            asked.note(self.rollout.advance(slices).get())
        return asked.replies

    def describe(self) -> dict[str, float]:
        reports, self.queue.reports = self.queue.reports, []
        return super().describe() | largest_cache_usage(reports)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        yield
        self.queue.scheduler.saved(step)

    @contextmanager
    def _rollout_mode(self) -> Iterator[None]:
        reports = self.rollout.enter().get()
        yield
        self.rollout.exit().get()
        if self._sender is None:
            self.logger.note_transition(reports)

    def _take_replies(self, waits: bool) -> None:
        """Take replies to turns, and have the features of images that they show."""
        if self.queue.take_replies(waits) and self.answers.shown is not None:
            self._read_images()

    def _run_slices(self, step: int) -> None:
        """Generate until the batch of `step` is complete, or until groups must be scored that need ranks for it or that
        end a batch of generation; then empty the engines, whose caches are released.
        """
        queue = self.queue
        queue.scheduler.version_ready(self._version)
        while not queue.scheduler.is_complete(step):
            if self._groups is not None and queue.scheduler.verdicts.unjudged:
                if not self.rules.ahead or self._groups.judge.needs_ranks or self._images is not None:
                    break
                self._groups.judge_finished()
                continue
            orders = {replica: queue.next_slice(replica) for replica in range(len(queue.engines))}
            slices = {replica: order for replica, order in orders.items() if order is not None}
            if not slices and queue.has_turns_open:
                with self.logger.clock.phase(TURNS):
                    self._take_replies(waits=True)
                continue
            if not slices:
                raise RuntimeError(f"batch {step} is not complete and no replica has anything to do")
            running = self.rollout.advance(slices)
            self.scores_ended()
            for report in running.get():
                if report.replica in slices:
                    queue.done(report)
            self._take_replies(waits=False)
        drops = {
            replica: Slice(self._version, 0, drops=tuple(sorted(engine)))
            for replica, engine in enumerate(queue.engines)
            if engine
        }
        if drops:
            self.rollout.advance(drops).get()
        for engine in queue.engines:
            engine.clear()
