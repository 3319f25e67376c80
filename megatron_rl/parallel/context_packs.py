"""Which context-parallel ranks share which sequences: a plan in which every pass has a size of its own.

A sequence is cut over no more ranks than its tokens need, 1, 2, 4 ... `largest` of them; short ones are not cut at all,
and then ranks work on other sequences. Ranks that share a pack are neighbours, from a multiple of their number on:

    8 ranks, largest 4      ranks 0-3   4-5   6-7          pass 0: one long sequence, two shorter ones
                            0  1  2  3  4  5  6  7         pass 1: short ones, one rank each

Packs of a rank come the most shared first, so that all ranks of a pack come to it after the same passes. Every rank
gets the same number of passes, some of which may be idle: what joins more ranks than those of a pack, as the exchange
between experts does, is then done by all. Pure and torch-free; equal inputs give equal plans on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.parallel.balance import pack

ENOUGH = 0.05
"""Work of the busiest rank may be above the mean by this share before sequences are cut further to even it out."""


@dataclass(frozen=True)
class ContextPack:
    """Sequences of one pass, by number, none where it is idle, and who shares it: `size` ranks from `first` on."""

    rows: tuple[int, ...]
    first: int
    size: int

    @property
    def ranks(self) -> range:
        """Those that share it."""
        return range(self.first, self.first + self.size)


@dataclass(frozen=True)
class ContextPlan:
    """Packs of `num_ranks` ranks."""

    packs: tuple[ContextPack, ...]
    num_ranks: int

    def of_rank(self, rank: int) -> list[ContextPack]:
        """Its passes in order, idle ones last; as many for every rank."""
        mine = self._packs_of_ranks[rank]
        return mine + [ContextPack((), rank, 1)] * (self.num_passes - len(mine))

    @property
    def num_passes(self) -> int:
        """Of every rank."""
        return max(map(len, self._packs_of_ranks))

    def most_tokens(self, lengths: Sequence[int]) -> int:
        """Of any pack on one rank."""
        return max(sum(tokens_of_rank(lengths[row], one.size) for row in one.rows) for one in self.packs)

    @cached_property
    def _packs_of_ranks(self) -> list[list[ContextPack]]:
        found: list[list[ContextPack]] = [[] for _ in range(self.num_ranks)]
        for one in self.packs:
            for rank in one.ranks:
                found[rank].append(one)
        return found

    def work_of_ranks(self, work: Sequence[float]) -> list[float]:
        """What each rank does, of sequences with this work: that of a pack is shared evenly."""
        return [sum(sum(work[row] for row in one.rows) / one.size for one in packs) for packs in self._packs_of_ranks]


def pack_sizes(largest: int) -> list[int]:
    """Numbers of ranks that may share a pack, ascending. Raises ValueError where `largest` is no power of two."""
    if largest < 1 or largest & (largest - 1):
        raise ValueError(f"packs are shared by a power of two of ranks, not by up to {largest}")
    return [1 << power for power in range(largest.bit_length())]


def tokens_of_rank(length: int, size: int) -> int:
    """Tokens that each of `size` ranks has of a sequence, filled up to 2 * size equal chunks where it is cut."""
    return length if size == 1 else -(-length // (2 * size)) * 2


def most_tokens(limit: int, size: int) -> int:
    """Tokens of a pack that a rank may have; chunks come in twos where it is cut, for which there is always room."""
    return limit if size == 1 else limit + limit % 2


def needed_size(length: int, limit: int, largest: int) -> int:
    """The fewest ranks over which a sequence fits; raises ValueError where `largest` of them are not enough."""
    for size in pack_sizes(largest):
        if tokens_of_rank(length, size) <= most_tokens(limit, size):
            return size
    raise ValueError(f"a sequence of {length} tokens does not fit into {limit} tokens on each of {largest} ranks")


def plan_packs(lengths: Sequence[int], work: Sequence[float], limit: int, num_ranks: int, largest: int) -> ContextPlan:
    """Every sequence in one pack, with at most `limit` tokens of it on a rank, and about equal work of all ranks.

    largest: the most ranks that share a pack, a power of two that divides num_ranks. Sequences are cut no further than
    they have to, unless that leaves ranks uneven: then the heaviest, or all, are cut over more.
    Raises ValueError for a sequence that does not fit, and for sizes that do not divide.
    """
    if num_ranks % largest:
        raise ValueError(f"packs of up to {largest} ranks do not divide {num_ranks} ranks")
    needed = [needed_size(length, limit, largest) for length in lengths]
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
    return ContextPlan(tuple(packed(best, lengths, work, limit)), num_ranks)


def wider_sizes(needed: Sequence[int], work: Sequence[float], num_ranks: int, largest: int) -> Iterator[list[int]]:
    """Sizes of all sequences: as needed, then some of the heaviest shared by more ranks, then all by more."""
    yield list(needed)
    heaviest = sorted(range(len(needed)), key=lambda row: (-work[row] / needed[row], row))
    wider = [size for size in pack_sizes(largest) if size > 1]
    counts = [count for count in range(1, min(len(needed), 2 * num_ranks)) if count <= 4 or count % 4 == 0]
    # Few sequences are all that can be uneven, and many would take long to try.
    for count in counts[:12]:
        for size in wider:
            chosen = set(heaviest[:count])
            yield [max(own, size) if row in chosen else own for row, own in enumerate(needed)]
    for size in wider:
        yield [max(own, size) for own in needed]


Groups = dict[tuple[int, int], list[int]]
"""(first rank, size) -> the sequences that these ranks share."""


def spread(sizes: Sequence[int], work: Sequence[float], num_ranks: int, largest: int) -> Groups:
    """Sequences of these sizes to groups of so many ranks: the most shared first, the heaviest first among these, each
    to the group that has least to do.

    No rank is further above the mean than one sequence's share: the group chosen is never above it before.
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
    """What the rank with most work does."""
    done = [0.0] * num_ranks
    for (first, size), rows in groups.items():
        share = sum(work[row] for row in rows) / size
        for rank in range(first, first + size):
            done[rank] += share
    return max(done)


def packed(groups: Groups, lengths: Sequence[int], work: Sequence[float], limit: int) -> Iterator[ContextPack]:
    """The sequences of each group in as few passes as hold them, the most shared first, heavy passes before light."""
    for (first, size), rows in sorted(groups.items(), key=lambda item: (-item[0][1], item[0][0])):
        tokens = [tokens_of_rank(lengths[row], size) for row in rows]
        works = [work[row] for row in rows]
        parts = pack(tokens, works, most_tokens(limit, size))
        parts.sort(key=lambda part: (-sum(works[item] for item in part), part))
        for part in parts:
            yield ContextPack(tuple(sorted(rows[item] for item in part)), first, size)
