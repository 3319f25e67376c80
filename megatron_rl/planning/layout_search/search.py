"""Search the fastest placements: every set partition of the roles, every allocation of the ranks, the best layouts.

    pool with the actor, pool with the rollout (or one pool with both)   every pair of sizes
    all other pools                                                      best (scores, updates) of what is left, by
                                                                         dynamic programming over their sizes
A step takes reshard + gen + the longest scores + the longest updates of all pools. A layout that another one beats in
all of these is never part of a best placement, so the search is exact over its space. A lower bound (FLOPs of each
pool's roles on its ranks, and the best generation) skips sizes that cannot reach the best placements so far. Where
ranks share cores, as on CPUs, the work of a pool is an objective, too; micro-batches are still the fastest of their
pool.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.planning.layout_search.partitions import Block, PoolNames, partitions
from megatron_rl.planning.layout_search.pools import PoolChoice, Pools
from megatron_rl.planning.layout_search.search_problem import SearchProblem

KEPT = 24
"""Number of placements that are counted exactly at the end; ten are shown."""


@dataclass(frozen=True)
class Placed:
    """One placement: a layout of every pool, the actor's first. seconds: by closed forms. ahead: steps of
    generation.
    """

    choices: tuple[PoolChoice, ...]
    seconds: float
    ahead: int = 0

    @property
    def units(self) -> int:
        return sum(choice.units for choice in self.choices)

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies its partition and allocation."""
        return (self.ahead, *((choice.block, choice.units) for choice in self.choices))


class PoolUnits(NamedTuple):
    """Pools and their units: first the actor's, then a separate rollout's; the last generates. rest: the pools of all
    other roles, which share the `left` units.
    """

    pools: tuple[tuple[Block, int], ...]
    rest: tuple[Block, ...]
    left: int


@dataclass(frozen=True)
class Others:
    """Pools with neither actor nor rollout. score, update: the longest of them, in seconds. work: the sum of
    `PoolChoice.work`.
    """

    score: float
    update: float
    choices: tuple[PoolChoice, ...] = ()
    work: tuple[float, float] = (0.0, 0.0)

    def joined(self, choice: PoolChoice) -> Others:
        """Return these pools and one more."""
        work = (self.work[0] + choice.work[0], self.work[1] + choice.work[1])
        return Others(max(self.score, choice.score), max(self.update, choice.update), (*self.choices, choice), work)


class Search:
    """One search over partitions, allocations and layouts; `run` returns the best placements."""

    def __init__(self, work: SearchProblem) -> None:
        self.work = work
        self.pools = Pools(work)
        self.names = PoolNames(work)
        self.num_placements = 0
        self.num_skipped = 0
        self._best: list[tuple[float, int, Placed]] = []
        self._found: dict[tuple[object, ...], float] = {}
        self._others: dict[tuple[Block, ...], list[list[Others]]] = {}

    def run(self) -> list[Placed]:
        """Return the best placements by closed forms, fastest first. Few pools come first, as their times bound the
        rest.
        """
        for partition in sorted(self.partitions, key=len):
            for ahead in self.aheads(partition):
                self._place(partition, ahead)
        return [placed for _, _, placed in sorted(self._best, key=lambda entry: (-entry[0], len(entry[2].choices)))]

    @cached_property
    def partitions(self) -> list[tuple[Block, ...]]:
        """The partitions that kept values allow."""
        return [partition for partition in partitions(self.work.names) if self.names.allows(partition)]

    def aheads(self, partition: Sequence[Block]) -> list[int]:
        """Return the steps that generation may run ahead: above 0 only on its own ranks with corrected stale tokens."""
        together = any(ACTOR in block and ROLLOUT in block for block in partition)
        tried = [0, 1] if self.work.may_run_ahead and not together else [0]
        late = self.work.config.async_training.trigger_parameter_sync_step - 1
        return [ahead for ahead in tried if ahead >= late and self.work.keeps.allow({"trainer.rollout_ahead": ahead})]

    @property
    def threshold(self) -> float:
        """Seconds that a placement must beat to be kept."""
        return -self._best[0][0] if len(self._best) >= KEPT else math.inf

    def _place(self, partition: tuple[Block, ...], ahead: int) -> None:
        for allocation in self._allocations(partition):
            if allocation.left < len(allocation.rest) or self._least(allocation, ahead) >= self.threshold:
                self.num_skipped += 1
                continue
            fronts = [self.pools.front(block, units) for block, units in allocation.pools]
            best = self._best_of(fronts, self.others(allocation.rest)[allocation.left], ahead) if all(fronts) else None
            if best is not None:
                self.num_placements += 1
                self._keep(best)

    def _allocations(self, partition: Sequence[Block]) -> Iterator[PoolUnits]:
        """Yield all sizes of the pools with actor and rollout, large first."""
        pools = sorted(
            (block for block in partition if ACTOR in block or ROLLOUT in block), key=lambda block: ACTOR not in block
        )
        rest = tuple(block for block in partition if block not in pools)
        for sizes in itertools.product(*(reversed(self.names.sizes(block)) for block in pools)):
            left = self.work.cluster.num_units - sum(sizes)
            if left >= 0:
                yield PoolUnits(tuple(zip(pools, sizes, strict=True)), rest, left)

    def _best_of(self, fronts: Sequence[Sequence[PoolChoice]], others: Sequence[Others], ahead: int) -> Placed | None:
        """Return the fastest placement. fronts: of the actor's pool and of a separate rollout's."""
        best: tuple[float, tuple[PoolChoice, ...]] | None = None
        shared = self.work.hardware.parallel_ranks
        for choices in itertools.product(*fronts):
            trainer, drawer = choices[0], choices[-1]
            reshard, gen = max(trainer.reshard, drawer.reshard), drawer.gen
            score, update = max(trainer.score, drawer.score), max(trainer.update, drawer.update)
            works = [choice.work for choice in choices]
            for other in others:
                train = max(score, other.score) + max(update, other.update)
                if shared:
                    # Pools that share cores take at least as long as all of their work together.
                    scoring, updating = map(sum, zip(*works, other.work, strict=True))
                    train = max(score, other.score, scoring / shared) + max(update, other.update, updating / shared)
                seconds = reshard + gen + train
                if ahead and drawer.generation is not None:
                    seconds = max(reshard + train, drawer.generation.steady)
                if best is None or seconds < best[0]:
                    best = (seconds, (*choices, *other.choices))
        return None if best is None else Placed(best[1], best[0], ahead)

    def _keep(self, placed: Placed) -> None:
        if placed.seconds >= self.threshold:
            return
        entry = (-placed.seconds, self.num_placements, placed)
        if len(self._best) < KEPT:
            heapq.heappush(self._best, entry)
        else:
            heapq.heapreplace(self._best, entry)

    # Pools of other roles

    def others(self, blocks: tuple[Block, ...]) -> list[list[Others]]:
        """Return for every number of units the Pareto front of (scores, updates, work) of these pools within them."""
        if blocks not in self._others:
            self._others[blocks] = self._merged(blocks)
        return self._others[blocks]

    def _merged(self, blocks: tuple[Block, ...]) -> list[list[Others]]:
        total = self.work.cluster.num_units
        if not blocks:
            return [[Others(0.0, 0.0)] for _ in range(total + 1)]
        *earlier, last = blocks
        fronts = {}
        for units in self.names.sizes(last):
            if units <= total - len(earlier):
                # A pool that alone takes longer than the kept placements cannot be part of a better one.
                score, update = self._least_of(last, units)
                fronts[units] = [] if score + update >= self.threshold else self.pools.front(last, units)
        inner = self.others(tuple(earlier))
        fronts_of_units: list[list[Others]] = []
        for left in range(total + 1):
            made: list[Others] = list(fronts_of_units[-1]) if fronts_of_units else []
            for units, front in fronts.items():
                if units <= left and (earlier or units == left):
                    made += [before.joined(choice) for before in inner[left - units] for choice in front]
            fronts_of_units.append(undominated_others(made))
        return fronts_of_units

    # Lower bounds

    def _least_of(self, block: Block, units: int) -> tuple[float, float]:
        ranks = units * self.work.cluster.unit
        work = [self.work.least_work[name] for name in block if name in self.work.roles]
        return sum(score for score, _ in work) / ranks, sum(update for _, update in work) / ranks

    def _least(self, allocation: PoolUnits, ahead: int) -> float:
        """Return a lower bound of the seconds over all layouts of these pools."""
        bounds = [self._least_of(block, units) for block, units in allocation.pools]
        if allocation.rest:
            bounds.append(self._least_of(tuple(itertools.chain(*allocation.rest)), allocation.left))
        train = max(score for score, _ in bounds) + max(update for _, update in bounds)
        return train if ahead else train + self.work.least_generation(allocation.pools[-1][1])

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound of the seconds of every placement."""
        bounds = (
            self._least(allocation, ahead)
            for partition in self.partitions
            for allocation in self._allocations(partition)
            if allocation.left >= len(allocation.rest)
            for ahead in self.aheads(partition)
        )
        return min(bounds, default=math.inf)


def undominated_others(others: Sequence[Others]) -> list[Others]:
    """Return the Pareto front of score, update and work."""
    kept: list[Others] = []
    for one in sorted(others, key=lambda other: (other.score, other.update, other.work)):
        beaten = (
            before.update <= one.update and before.work[0] <= one.work[0] and before.work[1] <= one.work[1]
            for before in reversed(kept)
        )
        if not any(beaten):
            kept.append(one)
    return kept
