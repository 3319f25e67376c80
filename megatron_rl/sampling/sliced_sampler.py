"""Batches whose answers are drawn in slices: ahead of training on replicas of their own, or in turns with it.

What is drawn by whom with which weights is decided in `stream`; here the decisions meet the loop. The cursor of the
prompts stays where training stands, so that a checkpoint says the same with and without batches that were begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.cluster.replicas import Replica
from megatron_rl.config.steps import is_save_step, is_validation_step
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.records import Generations, Prompts, Sampling
from megatron_rl.roles.actor import Actor
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.sampling.async_metrics import SliceMetrics
from megatron_rl.sampling.backlog import Backlog
from megatron_rl.sampling.colocated import ColocatedSlices
from megatron_rl.sampling.driver import Driver
from megatron_rl.sampling.exclusive import generate_on
from megatron_rl.sampling.journal import Counted, Journal
from megatron_rl.sampling.open_answers import OpenAnswers
from megatron_rl.sampling.prompt_batches import ROLLOUTS_FILE, PromptBatches, read_answers, write_rollouts
from megatron_rl.sampling.replica_states import ReplicaSlots
from megatron_rl.sampling.rules import Decides, Rules
from megatron_rl.sampling.sampler import SampledBatch, Sampler, Sources
from megatron_rl.sampling.speed_warning import SpeedWarning
from megatron_rl.sampling.weight_sync import ReplicaWeights


@dataclass(frozen=True)
class Schedule:
    """Who decides, and what it goes on from. checkpoint: its folder where it has drawn answers, else None.

    last_batch: the last that is begun there, or that may be begun at once.
    """

    rules: Rules
    decider: Decides
    journal: Journal
    num_replicas: int
    last_batch: int
    checkpoint: Path | None


class SlicedSampler(Sampler):
    """What both kinds share: batches that are begun before they are needed. Raises as `read_answers`."""

    def __init__(self, schedule: Schedule, sources: Sources) -> None:
        super().__init__(sources)
        self.rules, self.journal = schedule.rules, schedule.journal
        answers = OpenAnswers(self.rules.batch_rows, partial(request_seed, self.config.trainer.seed))
        trained = self.rules.first_step - 1
        self.prompt_batches = PromptBatches(answers, self.cursor, trained, self._ask, self.sampling, self.greedy())
        self.prompt_batches.draw(schedule.last_batch)
        if schedule.checkpoint is not None:
            read_answers(schedule.checkpoint, answers)
        self.work = Backlog(schedule.decider, answers, schedule.num_replicas)

    def write(self, folder: Path, step: int) -> list[str]:
        schedule = self.work.decider.state_dict() | {"num_lines": self.journal.num_lines}
        write_rollouts(folder, self.work.answers, schedule, step)
        return [ROLLOUTS_FILE]

    def _take(self, step: int) -> SampledBatch:
        prompts, generations, greedy = self.work.batch(step)
        self.cursor.next_indices()  # what `prompt_batches` has drawn: training stands behind it now
        return SampledBatch(prompts, generations, None, greedy, {})

    def _ask(self, cursor: MixtureCursor) -> tuple[Prompts, Prompts | None]:
        prompts = self._next_prompts(cursor)
        return prompts, prompts.one_per_group() if self.needs_greedy else None


class ColocatedSampler(SlicedSampler):
    """On the actor's own ranks: unfinished answers of later batches go on in the next turn, with newer weights."""

    def next(self, step: int) -> SampledBatch:
        self.prompt_batches.draw(self.rules.last_batch(step - 1))
        if not self.work.decider.is_complete(step):
            reports = self.rollout.enter().get()
            ColocatedSlices(self.rollout, self.work).until_complete(step)
            self.rollout.exit().get()
            self.logger.note_transition(reports)
        return self._take(step)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        yield
        self.work.decider.saved(step)


class AsyncSampler(SlicedSampler):
    """On replicas of their own, which draw while the main thread trains. Enter `driver`, then `bridge.open()`."""

    def __init__(
        self,
        schedule: Schedule,
        sources: Sources,
        replicas: Sequence[Replica],
        actor: Actor,
        look: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        """look: raises where another pool has failed. stop: raises where the run is to stop instead of waiting on."""
        super().__init__(schedule, sources)
        keys = self.config.async_training
        slots = ReplicaSlots(replicas, keys.max_replica_restarts, self.logger.warn)
        self.driver = Driver(slots, self.work, look, keys.second_buffer)
        self.bridge = ReplicaWeights(actor, self.driver, keys.second_buffer, self.rules.first_step - 1)
        self.measured = SliceMetrics(slots, self.logger.clock.ran, self.work.decider.counts)
        self.worth = SpeedWarning(self.rules.ahead)
        self._stop = stop

    def next(self, step: int) -> SampledBatch:
        """The batch of a step, once it is complete."""
        self._announce()
        start = time.time()
        self._wait_for(step)
        while not self.work.decider.is_complete(step):
            self.load(step - 1)
            self._announce()
            self._wait_for(step)
        self.measured.waited(start, time.time())
        with self.driver.locked():
            return self._take(step)

    def load_weights(self, step: int) -> None:
        """Send the weights after `step`, where that is due, while slices go on."""
        if not self.rules.sends(step):
            return
        self.driver.wait_until(lambda: self.work.decider.may_send(step))
        self.load(step)
        # A place of the schedule that is interrupted comes before these weights are taken.
        if not (self.rules.in_rounds and self._is_interrupted_after(step)):
            self._announce()

    def load(self, version: int) -> None:
        """Send the weights after step `version` now, also to replicas that have started again."""
        self.logger.note_transition(self.bridge.send(version, self.work))

    def generate(self, prompts: Prompts, sampling: Sampling) -> Generations:
        """Answers to all prompt rows by the newest weights that were sent; unfinished requests go on afterwards."""
        version, seed_of = self.bridge.version, partial(request_seed, self.config.trainer.seed)
        with self.driver.holding(version, drained=not self.rules.partial):
            while True:
                answers = self.driver.ask(lambda: generate_on(self.driver, prompts, sampling, version, seed_of))
                if answers is not None:
                    break
                self.driver.wait_until(lambda: self.bridge.is_wanted)
                self.load(version)
            with self.driver.locked() as work:
                work.decider.saved(version, interrupted=True)
        return answers

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Round a checkpoint: no slice is under way; what is unfinished begins anew afterwards, as after a resume."""
        with self.driver.holding(step):
            yield
            with self.driver.locked() as work:
                work.decider.saved(step)

    def describe(self) -> dict[str, float]:
        with self.driver.locked() as work:
            metrics = self.measured.take(work)
            self.journal.append(Counted(dict(work.decider.counts)))
        said = self.worth.note(metrics["trainer/idle_share"], metrics["rollout/idle_share"])
        if said is not None:
            self.logger.warn(said)
        return metrics

    def _wait_for(self, step: int) -> None:
        """Until the batch is complete, or a replica that has started again can be given weights.

        Between two transfers the actor's weights are newer than those of the others: it then waits for the next one,
        unless no other is left.
        """
        decider, bridge, slots = self.work.decider, self.bridge, self.driver.slots

        def can_join() -> bool:
            return bridge.is_wanted and (bridge.version == step - 1 or not slots.living)

        self.driver.wait_until(lambda: decider.is_complete(step) or can_join(), self._stop)

    def _announce(self) -> None:
        """Let replicas take the newest weights that have come, and begin what these allow."""
        version = self.bridge.version
        with self.driver.locked() as work:
            self.prompt_batches.draw(self.rules.last_batch(version))
            work.decider.version_ready(version)

    def _is_interrupted_after(self, step: int) -> bool:
        trainer = self.config.trainer
        return is_save_step(trainer, step) or is_validation_step(trainer, step)
