"""Sample on replicas of their own, in slices, while training runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.cluster.replicas import Replica
from megatron_rl.config.steps import is_save_step, is_validation_step
from megatron_rl.records import Batch, Sampling
from megatron_rl.roles.actor import Actor
from megatron_rl.rollout.slices import Drawn, Start
from megatron_rl.sampling.async_metrics import AsyncMetrics, SpeedWarning
from megatron_rl.sampling.drain_notices import DrainNotices
from megatron_rl.sampling.driver import Driver
from megatron_rl.sampling.image_features import pieces_of
from megatron_rl.sampling.journal import Counted
from megatron_rl.sampling.questions import PolicyQuestions
from megatron_rl.sampling.replica_states import Elastic, ReplicaSlots
from megatron_rl.sampling.sampler import Sampler, Schedule, Sources
from megatron_rl.sampling.unscheduled_requests import UnscheduledRequests, generate_now
from megatron_rl.sampling.weight_sync import ReplicaWeights
from megatron_rl.scoring.sampled_batch import SampledBatch


class ReplicaSampler(Sampler):
    """Generate on replicas of their own while the main thread trains. Enter `driver`, then call `weights.open()`."""

    def __init__(
        self,
        schedule: Schedule,
        sources: Sources,
        replicas: Sequence[Replica],
        actor: Actor,
        check_pools: Callable[[], None],
        check_stop: Callable[[], None],
        notices: DrainNotices,
    ) -> None:
        """check_pools: raises if another pool has failed. check_stop: raises if the run is to stop instead of
        waiting. notices: say which replicas of an elastic pool are to leave.
        """
        super().__init__(schedule, sources)
        keys = self.config.async_training
        rollout, wait_s = self.config.actor_rollout_ref.rollout, self.config.trainer.repair_wait_s
        elastic = Elastic(rollout.min_replicas, notices, wait_s, rollout.drain_s) if rollout.is_elastic else None
        slots = ReplicaSlots(replicas, keys.max_replica_restarts, self.logger.warn, elastic)
        self.driver = Driver(slots, self.queue, check_pools, keys.second_buffer)
        self.weights = ReplicaWeights(actor, self.driver, keys.second_buffer, self.rules.first_step - 1)
        self.metrics = AsyncMetrics(slots, self.logger.clock.ran, self.queue.scheduler.counts)
        self.speed_warning = SpeedWarning(self.rules.ahead)
        self._check_stop = check_stop
        self._asked: UnscheduledRequests | None = None
        self.driver.while_waiting = self.scores_ended
        if self._images is not None and self.answers.shown is not None:
            self.queue.has_features = self._images.has
            self.driver.while_waiting = self._read_late_images

    def next(self, step: int) -> SampledBatch:
        """The batch of a step, once it is complete."""
        self._announce()
        start = time.time()
        with self.logger.clock.waiting("gen"):
            self._wait_for(step)
            while not self.queue.scheduler.is_complete(step):
                if self._judges_here():
                    self._judge()
                else:
                    self.send_weights(step - 1)
                    self._announce()
                self._wait_for(step)
        self.metrics.waited(start, time.time())
        with self.driver.locked():
            return self.take(step)

    def _read_late_images(self) -> None:
        """Have the features of images that replies to turns show; the actor is idle, and the lock is this thread's."""
        self.scores_ended()
        asked = () if self._asked is None else self._asked.unread
        if self.queue.unread or asked:
            self._read_images([*(reply.images for _, reply in self.queue.unread), *asked])
            self.queue.take_replies()

    def _judges_here(self) -> bool:
        """Whether groups wait for scores of reward models, which this thread asks for."""
        needs_ranks = self._groups is not None and self._groups.judge.needs_ranks
        return needs_ranks and bool(self.queue.scheduler.verdicts.unjudged)

    def _judge(self) -> None:
        with self.driver.locked():
            if self._groups is not None:
                self._groups.judge_finished()

    def load_weights(self, step: int) -> None:
        """Send the weights after `step` while slices run, if the schedule sends them."""
        self._weights_changed()
        if not self.rules.sends(step):
            return
        self.driver.wait_until(lambda: self.queue.scheduler.may_send(step))
        self.send_weights(step)
        # A save or validation after this step comes before the replicas take these weights.
        if not (self.rules.in_rounds and self._is_interrupted_after(step)):
            self._announce()

    def send_weights(self, version: int) -> None:
        """Send the weights after step `version` now, also to restarted replicas."""
        self._read_images()  # of batches that a checkpoint has begun
        self.logger.note_transition(self.weights.send(version, self.queue))

    def answer(self, prompts: Batch, sampling: Sampling) -> Batch:
        """Responses to all prompt rows; open requests continue afterwards."""
        version = self.weights.version
        self._read_images(pieces_of(prompts))
        how = (self.rules.awaits_turns, (), self._images_of)
        asked = UnscheduledRequests(prompts, sampling, self.seed_of, self.episodes, *how)
        if self._images is not None and self.answers.shown is not None:
            asked.has_features, self._asked = self._images.has, asked
        with self.awaited.waiting(asked.episodes):
            self._generate_now(asked, version, asked.begin)
        return self._with_images(asked.rows())

    def ask(self, starts: Sequence[Start]) -> dict[int, Drawn]:
        """Reply as `PoolSampler.ask`; open requests continue afterwards."""
        asked = PolicyQuestions(starts)
        self._generate_now(asked, self.weights.version)
        return asked.replies

    def _generate_now(
        self, asked: UnscheduledRequests | PolicyQuestions, version: int, begin: Callable[[], None] = lambda: None
    ) -> None:
        with self.driver.holding(version, drained=not self.rules.partial):
            self.driver.ask(begin)
            while not self.driver.ask(lambda: generate_now(self.driver, asked, version)):
                self.driver.wait_until(lambda: self.weights.is_wanted)
                self.send_weights(version)
            self._asked = None
            with self.driver.locked() as queue:
                queue.scheduler.saved(version, interrupted=True)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Wrap a checkpoint: no slice runs; unfinished requests restart afterwards, as they do after a resume."""
        with self.driver.holding(step):
            yield
            with self.driver.locked() as queue:
                queue.scheduler.saved(step)

    def describe(self) -> dict[str, float]:
        with self.driver.locked() as queue:
            metrics = self.metrics.take(queue)
            if self.journal is not None:
                self.journal.append(Counted(dict(queue.scheduler.counts)))
        warning = self.speed_warning.note(metrics["trainer/idle_share"], metrics["rollout/idle_share"])
        if warning is not None:
            self.logger.warn(warning)
        return metrics

    def _wait_for(self, step: int) -> None:
        """Wait until the batch is complete, or until a restarted replica can be given weights.

        Between two transfers the actor's weights are newer than those of the other replicas. A restarted replica then
        waits for the next transfer, unless no other replica is left.
        """
        scheduler, weights, slots = self.queue.scheduler, self.weights, self.driver.slots

        def can_join() -> bool:
            return weights.is_wanted and (weights.version == step - 1 or not slots.generating)

        with self.awaited.waiting(self._sampled_episodes(step)):
            self.driver.wait_until(
                lambda: scheduler.is_complete(step) or can_join() or self._judges_here(), self._check_stop
            )

    def _announce(self) -> None:
        """Let replicas take the newest weights that were sent, and begin the batches that these allow.

        Environments begin the episodes of these batches while replicas generate those of earlier ones.
        """
        version = self.weights.version
        with self.driver.locked() as queue:
            self.add_prompts(self.rules.last_batch(version))
            self._read_images()  # replicas may begin these requests as soon as the lock is free
            queue.begin_episodes()
        self.driver.wait_until(lambda: self.queue.is_begun)
        with self.driver.locked():
            self._read_images()  # with which environments have begun episodes
        with self.driver.locked() as queue:
            queue.scheduler.version_ready(version)

    def _is_interrupted_after(self, step: int) -> bool:
        trainer = self.config.trainer
        return is_save_step(trainer, step) or is_validation_step(trainer, step)
