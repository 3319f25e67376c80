"""Scorers: whatever turns a batch into columns, and how a step asks all of them.

Where a scorer runs is its own affair: on ranks, in processes of rules, behind a server. Training, a filter of groups
and validation ask their scorers in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_rl.dispatch import Future
from megatron_rl.records import Batch
from megatron_rl.scoring.rewards import Pending, Rewards, turn_rewards
from megatron_rl.scoring.rule import Ended
from megatron_rl.scoring.sampled_batch import SampledBatch


class Scorer(Protocol):
    """Adds columns to batches, of which it has one at a time."""

    def start(self, batch: SampledBatch) -> None:
        """Begin to score a batch, and do not wait for ranks or servers. May add to `batch.metrics`, here or later."""

    def take(self) -> Batch:
        """Wait, and return the columns of the batch that was started; their names are those of `columns.COLUMNS`."""


def score(scorers: Sequence[Scorer], batch: SampledBatch) -> None:
    """Start all scorers, then take the columns of all.

    Those that were started last are taken first: they may work here, while ranks work for the others.
    """
    for scorer in scorers:
        scorer.start(batch)
    for scorer in reversed(scorers):
        batch.rows.add(scorer.take())


class RoleScorer:
    """The columns that a role makes of a batch, in every step. call: the role's method. reads: as in `PassCall`."""

    def __init__(self, call: Callable[[Batch], Future[Batch]], reads: Sequence[str]) -> None:
        self._call, self._reads = call, reads

    def start(self, batch: SampledBatch) -> None:
        self._columns = self._call(batch.rows.read_by(*self._reads))

    def take(self) -> Batch:
        return self._columns.get()


class RewardScorer:
    """`scores` of rule and reward models, and `components` and `greedy_scores` where the estimator reads them; what
    process reward models add to `turn_rewards`.

    Also fills `SampledBatch.scored`; a batch that comes with it is not scored again.
    """

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards
        self._pending: Pending = []
        self._greedy: Pending = []

    def begin(self, answer: Ended) -> None:
        """Score a response whose batch is not complete, as far as that needs no rank; `take` has its outcome. A
        function of groups is called as the last response of a group ends.
        """
        self.rewards.begin(answer)

    def proceed(self) -> None:
        """Have judges work on what has begun, while others are generated; in the thread that takes batches."""
        self.rewards.proceed()

    def start(self, batch: SampledBatch) -> None:
        """Raises RewardError as `Rewards.start`."""
        self._batch, start = batch, self.rewards.start
        if batch.scored is None:
            self._pending = start(batch.rows)
        if batch.greedy is not None:
            self._greedy = start(batch.greedy)

    def take(self) -> Batch:
        """Raises RewardError as `Rewards.training_scores`."""
        batch, rewards = self._batch, self.rewards
        if batch.scored is None:
            batch.scored = rewards.training_scores(batch.rows, self._pending, numbers=batch.requests)
        greedy = None
        if batch.greedy is not None:
            greedy = rewards.greedy_scores(batch.rows, batch.greedy, self._greedy, batch.greedy_requests)
        batch.metrics |= rewards.shaping.metrics()
        components = rewards.components(batch.scored)
        turns = turn_rewards(batch.rows, batch.scored)
        return Batch(scores=batch.scored.scores, components=components, greedy_scores=greedy, turn_rewards=turns)


class HeldOutScorer:
    """`scores` of responses to held-out prompts, not shaped and without penalties. Also fills `SampledBatch.scored`."""

    def __init__(self, rewards: Rewards) -> None:
        self.rewards = rewards

    def start(self, batch: SampledBatch) -> None:
        """Raises RewardError as `Rewards.start`."""
        self._batch, self._pending = batch, self.rewards.start(batch.rows)

    def take(self) -> Batch:
        """Raises RewardError as `Rewards.task_scores`."""
        batch = self._batch
        batch.scored = self.rewards.task_scores(batch.rows, self._pending)
        return Batch(scores=batch.scored.scores)
