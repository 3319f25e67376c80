"""Samplers whose answers are generated in slices: on the actor's own ranks, or on replicas while training runs.

The scheduler decides which replica generates which requests with which weights. A sampler turns its decisions into
batches for the training loop. The prompt cursor of the run stays at the last trained batch, so that a checkpoint is the
same with and without batches that are already begun.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.cluster.replicas import Replica
from megatron_rl.config.steps import is_save_step, is_validation_step
from megatron_rl.records import Generations, Prompts, Sampling
from megatron_rl.roles.actor import Actor
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import Slice
from megatron_rl.sampling.async_metrics import AsyncMetrics, SpeedWarning
from megatron_rl.sampling.backlog import Backlog
from megatron_rl.sampling.driver import Driver
from megatron_rl.sampling.exclusive import generate_on
from megatron_rl.sampling.journal import Counted, Journal
from megatron_rl.sampling.open_answers import OpenAnswers
from megatron_rl.sampling.replica_states import ReplicaSlots
from megatron_rl.sampling.rules import Decider, Rules
from megatron_rl.sampling.sampler import SampledBatch, Sampler, Sources
from megatron_rl.sampling.saved_answers import ROLLOUTS_FILE, read_answers, write_rollouts
from megatron_rl.sampling.weight_sync import ReplicaWeights


@dataclass(frozen=True)
class Schedule:
    """The decider of a run and its state. checkpoint: the folder to resume from if it has answers, else None.

    last_batch: the last batch that is begun there, or that may be begun at once.
    """

    rules: Rules
    decider: Decider
    journal: Journal
    num_replicas: int
    last_batch: int
    checkpoint: Path | None


class SlicedSampler(Sampler):
    """Base of both kinds: draws prompts ahead of training. Raises as `read_answers`."""

    def __init__(self, schedule: Schedule, sources: Sources) -> None:
        super().__init__(sources)
        self.rules, self.journal = schedule.rules, schedule.journal
        self.answers = OpenAnswers(self.rules.batch_rows, partial(request_seed, self.config.trainer.seed))
        self._cursor_ahead, self._last_begun = copy.deepcopy(self.cursor), self.rules.first_step - 1
        self.begin_batches(schedule.last_batch)
        if schedule.checkpoint is not None:
            read_answers(schedule.checkpoint, self.answers)
        self.backlog = Backlog(schedule.decider, self.answers, schedule.num_replicas)

    def begin_batches(self, last: int) -> None:
        """Draw the prompts of all batches up to that of step `last`."""
        while self._last_begun < last:
            self._last_begun += 1
            prompts = self._next_prompts(self._cursor_ahead)
            greedy = prompts.one_per_group() if self.needs_greedy else None
            self.answers.add(self._last_begun, prompts, self.sampling(self._last_begun), greedy, self.greedy())

    def write(self, folder: Path, step: int) -> list[str]:
        schedule = self.backlog.decider.state_dict() | {"num_lines": self.journal.num_lines}
        write_rollouts(folder, self.answers, schedule, step)
        return [ROLLOUTS_FILE]

    def _take(self, step: int) -> SampledBatch:
        prompts, generations, greedy = self.backlog.batch(step)
        self.cursor.next_indices()  # these are the prompts of the batch: the cursor moves behind them
        return SampledBatch(prompts, generations, None, greedy, {})


class ColocatedSampler(SlicedSampler):
    """Generate on the actor's own ranks, in rounds of slices until a batch is complete.

    Unfinished answers of later batches continue in the next step, with newer weights. The ranks are in rollout mode
    only inside `next`.
    """

    def next(self, step: int) -> SampledBatch:
        self.begin_batches(self.rules.last_batch(step - 1))
        if not self.backlog.decider.is_complete(step):
            reports = self.rollout.enter().get()
            self._run_slices(step)
            self.rollout.exit().get()
            self.logger.note_transition(reports)
        return self._take(step)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        yield
        self.backlog.decider.saved(step)

    def _run_slices(self, step: int) -> None:
        """Generate until the batch of `step` is complete, then empty the engines, whose caches are released."""
        backlog, version = self.backlog, step - 1
        backlog.decider.version_ready(version)
        while not backlog.decider.is_complete(step):
            orders = {replica: backlog.next_slice(replica) for replica in range(len(backlog.engines))}
            slices = {replica: order for replica, order in orders.items() if order is not None}
            if not slices:
                raise RuntimeError(f"batch {step} is not complete and no replica has anything to do")
            for report in self.rollout.advance(slices).get():
                if report.replica in slices:
                    backlog.done(report)
        drops = {
            replica: Slice(version, 0, drops=tuple(sorted(engine)))
            for replica, engine in enumerate(backlog.engines)
            if engine
        }
        if drops:
            self.rollout.advance(drops).get()
        for engine in backlog.engines:
            engine.clear()


class AsyncSampler(SlicedSampler):
    """Generate on replicas of their own while the main thread trains. Enter `driver`, then call `weights.open()`."""

    def __init__(
        self,
        schedule: Schedule,
        sources: Sources,
        replicas: Sequence[Replica],
        actor: Actor,
        check_pools: Callable[[], None],
        check_stop: Callable[[], None],
    ) -> None:
        """check_pools: raises if another pool has failed. check_stop: raises if the run is to stop instead of
        waiting.
        """
        super().__init__(schedule, sources)
        keys = self.config.async_training
        slots = ReplicaSlots(replicas, keys.max_replica_restarts, self.logger.warn)
        self.driver = Driver(slots, self.backlog, check_pools, keys.second_buffer)
        self.weights = ReplicaWeights(actor, self.driver, keys.second_buffer, self.rules.first_step - 1)
        self.metrics = AsyncMetrics(slots, self.logger.clock.ran, self.backlog.decider.counts)
        self.speed_warning = SpeedWarning(self.rules.ahead)
        self._check_stop = check_stop

    def next(self, step: int) -> SampledBatch:
        """The batch of a step, once it is complete."""
        self._announce()
        start = time.time()
        self._wait_for(step)
        while not self.backlog.decider.is_complete(step):
            self.send_weights(step - 1)
            self._announce()
            self._wait_for(step)
        self.metrics.waited(start, time.time())
        with self.driver.locked():
            return self._take(step)

    def load_weights(self, step: int) -> None:
        """Send the weights after `step` while slices run, if the schedule sends them."""
        if not self.rules.sends(step):
            return
        self.driver.wait_until(lambda: self.backlog.decider.may_send(step))
        self.send_weights(step)
        # A save or validation after this step comes before the replicas take these weights.
        if not (self.rules.in_rounds and self._is_interrupted_after(step)):
            self._announce()

    def send_weights(self, version: int) -> None:
        """Send the weights after step `version` now, also to restarted replicas."""
        self.logger.note_transition(self.weights.send(version, self.backlog))

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """Answers to all prompt rows with the newest weights that were sent; open requests continue afterwards."""
        version, seed_of = self.weights.version, partial(request_seed, self.config.trainer.seed)
        with self.driver.holding(version, drained=not self.rules.partial):
            while True:
                answers = self.driver.ask(lambda: generate_on(self.driver, prompts, sampling, version, seed_of))
                if answers is not None:
                    break
                self.driver.wait_until(lambda: self.weights.is_wanted)
                self.send_weights(version)
            with self.driver.locked() as backlog:
                backlog.decider.saved(version, interrupted=True)
        return answers

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Wrap a checkpoint: no slice runs; unfinished requests restart afterwards, as they do after a resume."""
        with self.driver.holding(step):
            yield
            with self.driver.locked() as backlog:
                backlog.decider.saved(step)

    def describe(self) -> dict[str, float]:
        with self.driver.locked() as backlog:
            metrics = self.metrics.take(backlog)
            self.journal.append(Counted(dict(backlog.decider.counts)))
        warning = self.speed_warning.note(metrics["trainer/idle_share"], metrics["rollout/idle_share"])
        if warning is not None:
            self.logger.warn(warning)
        return metrics

    def _wait_for(self, step: int) -> None:
        """Wait until the batch is complete, or until a restarted replica can be given weights.

        Between two transfers the actor's weights are newer than those of the other replicas. A restarted replica then
        waits for the next transfer, unless no other replica is left.
        """
        decider, weights, slots = self.backlog.decider, self.weights, self.driver.slots

        def can_join() -> bool:
            return weights.is_wanted and (weights.version == step - 1 or not slots.generating)

        self.driver.wait_until(lambda: decider.is_complete(step) or can_join(), self._check_stop)

    def _announce(self) -> None:
        """Let replicas take the newest weights that were sent, and begin the batches that these allow."""
        version = self.weights.version
        with self.driver.locked() as backlog:
            self.begin_batches(self.rules.last_batch(version))
            backlog.decider.version_ready(version)

    def _is_interrupted_after(self, step: int) -> bool:
        trainer = self.config.trainer
        return is_save_step(trainer, step) or is_validation_step(trainer, step)
