"""Plan which context-parallel ranks share which sequences, where every pass has a size of its own.

A sequence is split over no more ranks than its tokens need: 1, 2, 4 ... `largest` ranks. Short sequences are not split,
and the other ranks work on other sequences. Ranks that share a pack are neighbours, from a multiple of their number on:

    8 ranks, largest 4      ranks 0-3   4-5   6-7          pass 0: one long sequence, two shorter ones
                            0  1  2  3  4  5  6  7         pass 1: short ones, one rank each

The most shared packs of a rank come first, so that all ranks of a pack reach it after the same passes. Every rank gets
the same number of passes, some of them idle, because collectives over more ranks than those of a pack, such as the
exchange between experts, need all ranks. Pure and torch-free; equal inputs give equal plans on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from megatron_rl.parallel.balance import pack

ENOUGH = 0.05
"""Sequences are split further to balance work only if the busiest rank is above the mean by more than this share."""


@dataclass(frozen=True)
class ContextPack:
    """The sequences of one pass, by number, none if it is idle. `size` ranks from `first` on share it."""

    rows: tuple[int, ...]
    first: int
    size: int

    @property
    def ranks(self) -> range:
        """The ranks that share the pack."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class ContextPlan:
    """The packs of `num_ranks` ranks."""

    packs: tuple[ContextPack, ...]
    num_ranks: int

    def of_rank(self, rank: int) -> list[ContextPack]:
        """The passes of a rank in order, idle ones last; the same number for every rank."""
        mine = self._packs_of_ranks[rank]
        return mine + [ContextPack((), rank, 1)] * (self.num_passes - len(mine))

    @property
    def num_passes(self) -> int:
        """Number of passes of every rank."""
        return max(map(len, self._packs_of_ranks))

    def most_tokens(self, lengths: Sequence[int]) -> int:
        """The most tokens of a pack on one rank."""
        return max(sum(tokens_of_rank(lengths[row], pack.size) for row in pack.rows) for pack in self.packs)

    @cached_property
    def _packs_of_ranks(self) -> list[list[ContextPack]]:
        of_ranks: list[list[ContextPack]] = [[] for _ in range(self.num_ranks)]
        for shared in self.packs:
            for rank in shared.ranks:
                of_ranks[rank].append(shared)
        return of_ranks


def pack_sizes(largest: int) -> list[int]:
    """Numbers of ranks that may share a pack, ascending. Raises ValueError if `largest` is not a power of two."""
    if largest < 1 or largest & (largest - 1):
        raise ValueError(f"packs are shared by a power of two of ranks, not by up to {largest}")
    return [1 << power for power in range(largest.bit_length())]


def tokens_of_rank(length: int, size: int) -> int:
    """Tokens of a sequence on each of `size` ranks; a split sequence is padded to 2 * size equal chunks."""
    return length if size == 1 else -(-length // (2 * size)) * 2


def most_tokens(limit: int, size: int) -> int:
    """Most tokens of a pack on one rank. A split pack has two chunks per rank, so the limit is rounded up to even."""
    return limit if size == 1 else limit + limit % 2


def tokens_together(lengths: Iterable[int], size: int) -> int:
    """Tokens on each of `size` ranks of sequences that share a pack."""
    return sum(tokens_of_rank(length, size) for length in lengths)


def needed_size(lengths: Sequence[int], limit: int, largest: int) -> int:
    """The fewest ranks over which sequences of one pack fit; raises ValueError if `largest` ranks are not enough."""
    for size in pack_sizes(largest):
        if tokens_together(lengths, size) <= most_tokens(limit, size):
            return size
    tokens = " + ".join(map(str, lengths))
    raise ValueError(f"a sequence of {tokens} tokens does not fit into {limit} tokens on each of {largest} ranks")


def plan_packs(
    lengths: Sequence[int],
    work: Sequence[float],
    limit: int,
    num_ranks: int,
    largest: int,
    unit_sizes: Sequence[int] | None = None,
) -> ContextPlan:
    """Put every sequence into a pack with at most `limit` tokens on a rank, and balance the work of all ranks.

    largest: the most ranks that share a pack, a power of two that divides num_ranks. unit_sizes: of units of
    neighbouring sequences, which stay in one pack; None: each sequence is one. Units are split no further than needed,
    unless work is uneven: then the heaviest, or all, are split over more ranks. Raises ValueError for a unit that does
    not fit, and for sizes that do not divide.
    """
    if num_ranks % largest:
        raise ValueError(f"packs of up to {largest} ranks do not divide {num_ranks} ranks")
    ends = accumulate([1] * len(lengths) if unit_sizes is None else unit_sizes, initial=0)
    units = [range(start, stop) for start, stop in pairwise(ends)]
    needed = [needed_size([lengths[row] for row in unit], limit, largest) for unit in units]
    work = [sum(work[row] for row in unit) for unit in units]
    mean = sum(work) / num_ranks
    best, least = None, float("inf")
    for sizes in wider_sizes(needed, work, num_ranks, largest):
        groups = spread(sizes, work, num_ranks, largest)
        most = busiest(groups, work, num_ranks)
        if best is None or most < least - ENOUGH * mean:
            best, least = groups, most
        if least <= (1 + ENOUGH) * mean:
            break
    assert best is not None  # the first choice is always tried
    return ContextPlan(tuple(packed(best, units, lengths, work, limit)), num_ranks)


def wider_sizes(needed: Sequence[int], work: Sequence[float], num_ranks: int, largest: int) -> Iterator[list[int]]:
    """Candidate sizes of all units: as needed, then more ranks for some of the heaviest, then more for all."""
    yield list(needed)
    heaviest = sorted(range(len(needed)), key=lambda row: (-work[row] / needed[row], row))
    wider = [size for size in pack_sizes(largest) if size > 1]
    counts = [count for count in range(1, min(len(needed), 2 * num_ranks)) if count <= 4 or count % 4 == 0]
    # Few sequences make work uneven, and trying many would take long.
    for count in counts[:12]:
        for size in wider:
            chosen = set(heaviest[:count])
            yield [max(own, size) if row in chosen else own for row, own in enumerate(needed)]
    for size in wider:
        yield [max(own, size) for own in needed]


Groups = dict[tuple[int, int], list[int]]
"""(first rank, size) -> the units of sequences that these ranks share."""


def spread(sizes: Sequence[int], work: Sequence[float], num_ranks: int, largest: int) -> Groups:
    """Assign units of these sizes to groups of ranks: the most shared first, then the heaviest, each to the group
    with the least work.

    No rank is above the mean by more than one unit's share, because the chosen group is not above the mean before.
    """
    groups: Groups = {}
    done = [0.0] * (num_ranks // largest)
    for size in reversed(pack_sizes(largest)):
        if size < largest:
            done = [of_group for of_group in done for _ in range(2)]
        rows = sorted((row for row, own in enumerate(sizes) if own == size), key=lambda row: (-work[row], row))
        heap = [(of_group, group) for group, of_group in enumerate(done)]
        heapq.heapify(heap)
        for row in rows:
            of_group, group = heap[0]
            groups.setdefault((group * size, size), []).append(row)
            done[group] = of_group + work[row] / size
            heapq.heapreplace(heap, (done[group], group))
    return groups


def busiest(groups: Groups, work: Sequence[float], num_ranks: int) -> float:
    """The work of the rank with most work."""
    done = [0.0] * num_ranks
    for (first, size), rows in groups.items():
        share = sum(work[row] for row in rows) / size
        for rank in range(first, first + size):
            done[rank] += share
    return max(done)


def packed(
    groups: Groups, units: Sequence[range], lengths: Sequence[int], work: Sequence[float], limit: int
) -> Iterator[ContextPack]:
    """Pack the units of each group into few passes, the most shared first, heavy passes before light ones."""
    for (first, size), chosen in sorted(groups.items(), key=lambda item: (-item[0][1], item[0][0])):
        tokens = [tokens_together((lengths[row] for row in units[number]), size) for number in chosen]
        works = [work[number] for number in chosen]
        parts = pack(tokens, works, most_tokens(limit, size))
        parts.sort(key=lambda part: (-sum(works[item] for item in part), part))
        for part in parts:
            numbers = sorted(chosen[item] for item in part)
            yield ContextPack(tuple(row for number in numbers for row in units[number]), first, size)
