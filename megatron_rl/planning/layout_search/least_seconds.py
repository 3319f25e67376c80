"""Lower bounds of the seconds of placements, for all sizes of a pool at once: by FLOPs, then by layouts that are known.

Each row of a table is one objective, each column a number of units. A bound is added up in the order in which the
seconds of a placement are, so that it is never above them by rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_rl.config.roles import ROLLOUT
from megatron_rl.planning.layout_search.partitions import Block, PoolNames
from megatron_rl.planning.layout_search.pools import PoolChoice
from megatron_rl.planning.layout_search.search_problem import SearchProblem

Table = npt.NDArray[np.float64]
SCORE, UPDATE, GEN, RESHARD, STEADY = range(5)
"""Rows of a table. STEADY: generation's seconds without waiting for training."""


class PoolSizes(NamedTuple):
    """The pool that generates, in some sizes, next to the actor's in one. rest: the other pools, in the units `left`.

    first: the actor's pool and its units; (): it generates itself.
    """

    first: tuple[tuple[Block, int], ...]
    last: Block
    sizes: npt.NDArray[np.int64]
    rest: tuple[Block, ...]
    left: npt.NDArray[np.int64]

    def at(self, number: int) -> PoolSizes:
        """Return one of the sizes."""
        here = slice(number, number + 1)
        return self._replace(sizes=self.sizes[here], left=self.left[here])


class LeastSeconds:
    """Tables of lower bounds of every block, by FLOPs and the best generation; `learn` raises them to known layouts."""

    def __init__(self, work: SearchProblem, names: PoolNames) -> None:
        self.work, self.names = work, names
        self._flops: dict[Block, Table] = {}
        self._known: dict[Block, Table] = {}
        self._learned: set[tuple[Block, int]] = set()
        self._rest: dict[tuple[Block, ...], Table] = {}

    def of_flops(self, block: Block) -> Table:
        """Return the table of a block that FLOPs alone give; of sizes that a pool cannot have, infinite."""
        if block not in self._flops:
            table = np.full((5, self.work.cluster.num_units + 1), np.inf)
            for units in self.names.sizes(block):
                gen = self.work.least_generation(units) if ROLLOUT in block else 0.0
                table[:, units] = (*self.of_ranks(block, units), gen, 0.0, 0.0)
            self._flops[block] = table
        return self._flops[block]

    def of_ranks(self, block: Sequence[str], units: int) -> tuple[float, float]:
        """Return the FLOPs of a block's scores and updates in seconds, spread over all ranks of `units` units."""
        ranks = units * self.work.cluster.unit
        work = [self.work.least_work[name] for name in block if name in self.work.roles]
        return sum(score for score, _ in work) / ranks, sum(update for _, update in work) / ranks

    def _of(self, block: Block) -> Table:
        if block not in self._known:
            self._known[block] = self.of_flops(block).copy()
        return self._known[block]

    def learn(self, block: Block, units: int, front: Sequence[PoolChoice]) -> bool:
        """Raise the bounds of one size to its layouts, all of which are in `front`; return whether that is new."""
        if (block, units) in self._learned:
            return False
        self._learned.add((block, units))
        column = self._of(block)[:, units]
        column[:] = np.inf
        for one in front:
            steady = 0.0 if one.generation is None else one.generation.steady
            np.minimum(column, (one.score, one.update, one.gen, one.reshard, steady), out=column)
        return True

    def learn_rest(self, rest: tuple[Block, ...], least: Sequence[tuple[float, float]]) -> None:
        """Raise the bounds of pools without actor and rollout. least: scores and updates for each number of units."""
        self._rest[rest] = np.array(least, dtype=np.float64).T

    def _rest_of(self, rest: tuple[Block, ...], left: npt.NDArray[np.int64], *, by_flops: bool) -> Table:
        if not by_flops and rest in self._rest:
            return self._rest[rest][:, left]
        if not rest:
            return np.zeros((2, len(left)))
        ranks = left * self.work.cluster.unit
        work = [self.work.least_work[name] for name in itertools.chain(*rest)]
        totals = sum(score for score, _ in work), sum(update for _, update in work)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.array([total / ranks for total in totals])

    def seconds(self, pools: PoolSizes, ahead: int, *, by_flops: bool = False) -> Table:
        """Return a bound for each size of the last pool. by_flops: of FLOPs and the best generation alone."""
        table: Callable[[Block], Table] = self.of_flops if by_flops else self._of
        last = table(pools.last)[:, pools.sizes]
        rest = self._rest_of(pools.rest, pools.left, by_flops=by_flops)
        score, update = np.maximum(last[SCORE], rest[SCORE]), np.maximum(last[UPDATE], rest[UPDATE])
        reshard = last[RESHARD]
        for block, units in pools.first:
            first = table(block)[:, units]
            score, update = np.maximum(score, first[SCORE]), np.maximum(update, first[UPDATE])
            reshard = np.maximum(reshard, first[RESHARD])
        train = score + update
        found = np.maximum(reshard + train, last[STEADY]) if ahead else reshard + last[GEN] + train
        return np.where(pools.left >= len(pools.rest), found, np.inf)
