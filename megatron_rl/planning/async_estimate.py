"""Generation that runs asynchronously: the run's own scheduler on a simulated clock, at planned seconds.

A large run is simulated as a smaller one that takes as long: a few replicas, each with a few requests that stand for
all of its own, and slices of at least a twenty-fourth of a batch. Every batch has the same lengths in another order:
those at even quantiles of the planner's distribution (`time.Lengths`), one of them as long as the longest of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from random import Random
from typing import Any

from megatron_rl.config.roles import ROLLOUT
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.answer_lengths import Lengths as Distribution
from megatron_rl.planning.memory import GEN, RESHARD
from megatron_rl.planning.run_models import RunModels
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import StepTime
from megatron_rl.planning.time import Estimator
from megatron_rl.sampling.engine_model import Costs
from megatron_rl.sampling.schedule_types import ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler
from megatron_rl.sampling.simulate import Lengths, SimulatedRun, optimum, simulate, synchronous

MOST_REPLICAS, MOST_ROWS = 4, 32
"""Most replicas, and rows of one batch on one replica, that are simulated."""
MOST_SLICES = 24
"""Most slices of one batch on one replica."""
IDLE = 0.1
"""A side that idles more than this share of the time waits; so do both if a step is longer than either by it."""


@dataclass(frozen=True)
class Sides:
    """Ranks of training and of rollout. grain: ranks of one rollout replica."""

    training: int
    rollout: int
    grain: int = 1

    def __str__(self) -> str:
        return f"{self.training} : {self.rollout}"

    def balanced(self, trainer_s: float, rollout_s: float) -> Sides:
        """Return the split of the same ranks with which both sides need equal time, if speed is proportional to ranks.

        trainer_s, rollout_s: seconds that they need with this split. Each side keeps at least one replica's ranks.
        """
        total = self.training + self.rollout
        share = rollout_s * self.rollout / (rollout_s * self.rollout + trainer_s * self.training)
        replicas = min(max(1, round(share * total / self.grain)), max(1, (total - 1) // self.grain))
        return Sides(total - replicas * self.grain, replicas * self.grain, self.grain)


@dataclass(frozen=True)
class AsyncEstimate:
    """The planned effect of running ahead.

    in_turns_s, ahead_s: seconds of a synchronous and of an asynchronous step. trainer_idle, rollout_idle: shares of the
    time. mean_staleness, most_staleness: steps, of the mean and of the oldest token. trainer_s, rollout_s: seconds
    that each side would need for a step if it never waited.
    """

    ahead: int
    is_partial: bool
    in_turns_s: float
    ahead_s: float
    trainer_idle: float
    rollout_idle: float
    mean_staleness: float
    most_staleness: int
    trainer_s: float
    rollout_s: float
    sides: Sides

    @classmethod
    def of(
        cls, rules: ScheduleConfig, num_replicas: int, lengths: Lengths, costs: Costs, sides: Sides
    ) -> AsyncEstimate:
        """Simulate the steps of `rules` and measure the middle ones.

        The first `ahead` + 2 steps have little generated ahead, and the last `ahead` + 1 have nothing left to generate.
        """
        outcome = simulate(Scheduler(rules, num_replicas), rules, num_replicas, lengths, costs)
        first, last = rules.ahead + 2, rules.num_steps_total - rules.ahead - 1
        start, stop = outcome.steps[first - 1], outcome.steps[last - 1]
        seconds = (stop - start) / (last - first)
        tokens = _staleness(outcome, rules, range(first + 1, last + 1))
        trainer_s = costs.train_seconds + costs.exposed_seconds / rules.sync_every
        idle = [max(0.0, outcome.idle_share(f"replica {number}", start, stop)) for number in range(num_replicas)]
        alone = replace(costs, train_seconds=0.0, exposed_seconds=0.0)
        return cls(
            ahead=rules.ahead,
            is_partial=rules.partial,
            in_turns_s=synchronous(rules, num_replicas, lengths, costs),
            ahead_s=seconds,
            trainer_idle=max(0.0, 1 - trainer_s / seconds),
            rollout_idle=sum(idle) / num_replicas,
            mean_staleness=sum(age * num for age, num in tokens.items()) / sum(tokens.values()),
            most_staleness=max(tokens),
            trainer_s=trainer_s,
            rollout_s=optimum(rules, num_replicas, lengths, alone),
            sides=sides,
        )

    @cached_property
    def advice(self) -> str:
        """A sentence that says which side waits, and what would change that."""
        if max(self.trainer_s, self.rollout_s) < (1 - IDLE) * self.ahead_s:
            shorter = "" if self.is_partial else " or set async_training.partial_rollout=true"
            return (
                "the longest responses delay both sides, which another split of the ranks hardly changes: raise "
                f"trainer.rollout_ahead above {self.ahead}{shorter}, if that staleness is acceptable"
            )
        now, better = self.sides, self.sides.balanced(self.trainer_s, self.rollout_s)
        if max(self.trainer_idle, self.rollout_idle) <= IDLE:
            return f"training and rollout are balanced at {now} ranks"
        sides = ("training", "the rollout")
        waits, other = sides if self.trainer_idle > self.rollout_idle else sides[::-1]
        if better == now:
            return f"{waits} waits for {other}, and no other share of these ranks is nearer to balance than {now}"
        return (
            f"{waits} waits for {other}: about {better} ranks (training : rollout) in place of {now} would balance them"
        )

    def as_json(self) -> dict[str, Any]:
        """Seconds, shares, steps and ranks."""
        better = self.sides.balanced(self.trainer_s, self.rollout_s)
        return {
            "rollout_ahead": self.ahead,
            "step_seconds_in_turns": self.in_turns_s,
            "step_seconds_ahead": self.ahead_s,
            "training_idle_share": self.trainer_idle,
            "rollout_idle_share": self.rollout_idle,
            "mean_staleness": self.mean_staleness,
            "most_staleness": self.most_staleness,
            "training_ranks": self.sides.training,
            "rollout_ranks": self.sides.rollout,
            "balanced_training_ranks": better.training,
            "balanced_rollout_ranks": better.rollout,
            "advice": self.advice,
        }

    def rows(self) -> list[tuple[str, object, str]]:
        """Rows of the table."""
        faster = self.in_turns_s / self.ahead_s
        return [
            ("synchronous step", f"{self.in_turns_s:.2f} s", "generation, then training, on the same pools"),
            (
                "asynchronous step",
                f"{self.ahead_s:.2f} s",
                f"{faster:.2f} times as fast, with rollout_ahead={self.ahead}",
            ),
            ("training idle", f"{self.trainer_idle:.0%}", f"of the time; it needs {self.trainer_s:.2f} s a step"),
            ("rollout idle", f"{self.rollout_idle:.0%}", f"of the time; it needs {self.rollout_s:.2f} s a step"),
            (
                "staleness",
                f"{self.mean_staleness:.1f} steps",
                f"of a token, in the mean; at most {self.most_staleness}",
            ),
        ]


def ahead_plan(
    config: RunConfig, models: RunModels, estimator: Estimator, load: Load, time: StepTime
) -> AsyncEstimate | None:
    """Return the plan of a run that generates ahead on ranks of its own, else None.

    estimator: of generation. load, time: of a step.
    """
    placement, rollout = models.placement, config.actor_rollout_ref.rollout
    if not config.trainer.rollout_ahead or placement.is_colocated:
        return None
    grain, num_ranks = rollout.replica_size, placement.pool_of(ROLLOUT).world_size
    num_replicas = num_ranks // grain
    lengths = batch_lengths(load, min(num_replicas, MOST_REPLICAS), num_replicas)
    rules = simulated_rules(config, load, num_replicas)
    costs = simulated_costs(rules, lengths, estimator, load, time, num_replicas)
    sides = Sides(placement.world_size - num_ranks, num_ranks, grain)
    return AsyncEstimate.of(rules, min(num_replicas, MOST_REPLICAS), lengths, costs, sides)


def batch_lengths(load: Load, num_replicas: int, of_replicas: int) -> Lengths:
    """Return the lengths of rows for `num_replicas` simulated replicas, which stand for `of_replicas`.

    Every batch has the same lengths in an order of its own.
    """
    num_rows = num_replicas * rows_of_replica(load, of_replicas)
    known = Distribution.with_mean(load.response, load.max_response)
    shares = [(row + 0.5) / num_rows for row in range(num_rows - 1)] + [load.num_samples / (load.num_samples + 1)]
    lengths = [max(1, round(known.quantile(share))) for share in shares]

    @cache
    def order(batch: int) -> Sequence[int]:
        return Random(batch).sample(lengths, num_rows)

    def length(request: int, attempt: int) -> int:
        batch, row = divmod(request, num_rows)
        return order(batch)[row]

    return length


def rows_of_replica(load: Load, num_replicas: int) -> int:
    """Return the simulated rows of a batch on each replica."""
    return max(1, min(MOST_ROWS, math.ceil(load.num_samples / num_replicas)))


def simulated_rules(config: RunConfig, load: Load, num_replicas: int) -> ScheduleConfig:
    """Return the rules of the run for fewer replicas with fewer rows each."""
    given, ahead = config.async_training, config.trainer.rollout_ahead
    rows = rows_of_replica(load, num_replicas)
    max_running = max(1, round(load.max_seqs * rows * num_replicas / load.num_samples))
    steps_of_batch = load.response * max(1.0, rows / max_running)
    slice_steps = max(given.slice_steps, math.ceil(steps_of_batch / MOST_SLICES))
    return ScheduleConfig(
        batch_rows=rows * min(num_replicas, MOST_REPLICAS),
        num_steps_total=2 * ahead + 11,
        ahead=ahead,
        sync_every=given.trigger_parameter_sync_step,
        slice_steps=slice_steps,
        max_running=max_running,
        # A longer slice must not leave slots empty for longer.
        max_queued=max_running // 4 if slice_steps > given.slice_steps else 0,
        partial=given.partial_rollout,
        recompute_kv=given.kv_cache == "recompute",
        deterministic=given.deterministic,
    )


def simulated_costs(
    rules: ScheduleConfig, lengths: Lengths, estimator: Estimator, load: Load, time: StepTime, num_replicas: int
) -> Costs:
    """Return costs with which a synchronous batch takes as long as planned. The trainer waits for every transfer."""
    stands_for = load.num_samples / num_replicas / rows_of_replica(load, num_replicas)
    known = {
        running: estimator.token_seconds(load, running * stands_for) for running in range(1, rules.max_running + 1)
    }
    costs = Costs(known.__getitem__, 0.0)
    factor = time.seconds[GEN] / synchronous(rules, min(num_replicas, MOST_REPLICAS), lengths, costs)
    seconds = {running: factor * each for running, each in known.items()}
    reshard = time.seconds[RESHARD]
    train = time.total - time.seconds[GEN] - reshard
    return Costs(seconds.__getitem__, train, transfer_seconds=reshard, exposed_seconds=reshard)


def _staleness(outcome: SimulatedRun, rules: ScheduleConfig, steps: range) -> dict[int, int]:
    """Steps of staleness -> tokens, of the batches of `steps`."""
    tokens: dict[int, int] = {}
    for step in steps:
        for request in rules.requests_of(step):
            for version, num in outcome.answers[request]:
                tokens[step - 1 - version] = tokens.get(step - 1 - version, 0) + num
    return tokens
