"""Search the fastest placements: every set partition of the roles, every allocation of the ranks, the best layouts.

    pool with the actor, pool with the rollout (or one pool with both)   every pair of sizes
    all other pools                                                      best (scores, updates) of what is left, by
                                                                         dynamic programming over their sizes
A step takes reshard + gen + the longest scores + the longest updates of all pools. A layout that another one beats in
all of these is never part of a best placement, so the search is exact over its space. A lower bound (FLOPs of each
pool's roles on its ranks and the best generation, or the best layouts of the pool in each objective once they are
known) skips sizes that cannot reach the best placements so far. Where ranks share cores, as on CPUs, the work of a pool
is an objective, too; micro-batches are still the fastest of their pool.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_rl.config.roles import ACTOR, ROLLOUT
from megatron_rl.planning.layout_search.least_seconds import LeastSeconds, PoolSizes
from megatron_rl.planning.layout_search.partitions import Block, PoolNames, partitions
from megatron_rl.planning.layout_search.pools import PoolChoice, Pools, beats
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
        self.least = LeastSeconds(work, self.names)
        self._best: list[tuple[float, int, Placed]] = []
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
        for pools in self._allocations(partition):
            bounds = self.least.seconds(pools, ahead)
            self.num_skipped += int(np.count_nonzero(bounds >= self.threshold))
            for number in np.flatnonzero(bounds < self.threshold):
                fronts = self._fronts(pools.at(int(number)), ahead, bounds[number])
                if fronts is None:
                    self.num_skipped += 1
                    continue
                others = self.others(pools.rest)[int(pools.left[number])] if all(fronts) else []
                best = self._best_of(fronts, others, ahead)
                if best is not None:
                    self.num_placements += 1
                    self._keep(best)

    def _fronts(self, one: PoolSizes, ahead: int, bound: float) -> list[list[PoolChoice]] | None:
        """Return the layouts of the pools with actor and rollout in one size; None: a bound excludes the size, by
        FLOPs, or by the layouts of one of the pools. bound: the one known so far.
        """
        fronts = []
        for block, units in (*one.first, (one.last, int(one.sizes[0]))):
            if bound >= self.threshold:
                return None
            fronts.append(self.pools.front(block, units))
            if self.least.learn(block, units, fronts[-1]):
                bound = self.least.seconds(one, ahead)[0]
        return fronts

    def _allocations(self, partition: Sequence[Block]) -> Iterator[PoolSizes]:
        """Yield all sizes of the pools with actor and rollout, large first; those of the last pool together."""
        pools = sorted(
            (block for block in partition if ACTOR in block or ROLLOUT in block), key=lambda block: ACTOR not in block
        )
        rest = tuple(block for block in partition if block not in pools)
        *first, last = pools
        every = np.array(self.names.sizes(last)[::-1], dtype=np.int64)
        for units in itertools.product(*(reversed(self.names.sizes(block)) for block in first)):
            left = self.work.cluster.num_units - sum(units) - every
            if any(left >= 0):
                is_left = left >= 0
                yield PoolSizes(tuple(zip(first, units, strict=True)), last, every[is_left], rest, left[is_left])

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
        """Join the layouts of the last pool to those of the others.

        Only what more units bring counts: a layout that one of a smaller pool beats is part of no front, and a front
        of the other pools is joined where it is new. Others that alone take longer than the kept placements cannot be
        part of a better one.
        """
        total = self.work.cluster.num_units
        if not blocks:
            return self._learn_rest(blocks, [[Others(0.0, 0.0)]] * (total + 1))
        *earlier, last = blocks
        inner = self.others(tuple(earlier))
        fresh = [(units, front_of(inner, units)) for units in range(total + 1)]
        fresh = [(units, front) for units, front in fresh if front]
        made: dict[int, list[Others]] = {}
        for units, choices in self._useful(last, total - len(earlier)):
            for before_units, befores in fresh:
                if before_units + units > total:
                    break
                joined = (before.joined(choice) for before in befores for choice in choices)
                fast = [one for one in joined if one.score + one.update < self.threshold]
                if fast:
                    made.setdefault(before_units + units, []).extend(fast)
        fronts: list[list[Others]] = []
        for left in range(total + 1):
            before = fronts[-1] if fronts else []
            fronts.append(undominated_others([*before, *made.pop(left)]) if left in made else before)
        return self._learn_rest(blocks, fronts)

    def _learn_rest(self, blocks: tuple[Block, ...], fronts: list[list[Others]]) -> list[list[Others]]:
        least = [
            (
                min((one.score for one in front), default=math.inf),
                min((one.update for one in front), default=math.inf),
            )
            for front in fronts
        ]
        self.least.learn_rest(blocks, least)
        return fronts

    def _useful(self, block: Block, most: int) -> Iterator[tuple[int, list[PoolChoice]]]:
        """Yield sizes of a pool up to `most`, with the layouts that none of a smaller pool beats."""
        kept: list[PoolChoice] = []
        for units in self.names.sizes(block):
            # A pool that alone takes longer than the kept placements cannot be part of a better one.
            if units > most or sum(self.least.of_ranks(block, units)) >= self.threshold:
                continue
            new = [one for one in self.pools.front(block, units) if not any(is_beaten(one, other) for other in kept)]
            kept = [*(one for one in kept if not any(is_beaten(one, other) for other in new)), *new]
            if new:
                yield units, new

    @cached_property
    def lower_bound(self) -> float:
        """A lower bound of the seconds of every placement."""
        bounds = (
            float(np.min(self.least.seconds(pools, ahead, by_flops=True)))
            for partition in self.partitions
            for pools in self._allocations(partition)
            for ahead in self.aheads(partition)
        )
        return min(bounds, default=math.inf)


def is_beaten(one: PoolChoice, other: PoolChoice) -> bool:
    """Return whether the scores, updates and work of `other` are at most those of `one`."""
    return other.score <= one.score and other.update <= one.update and beats(other.work, one.work)


def front_of(fronts: Sequence[list[Others]], units: int) -> list[Others]:
    """Return what is in the front of `units` units and not in that of one unit less."""
    before = fronts[units - 1] if units else []
    if fronts[units] is before:
        return []
    known = {id(one) for one in before}
    return [one for one in fronts[units] if id(one) not in known]


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
