"""Packs that each have their own number of context-parallel ranks: the plan alone."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.parallel.context_packs import (
    ContextPack,
    ContextPlan,
    most_tokens,
    needed_size,
    plan_packs,
    tokens_of_rank,
)

modest = settings(max_examples=150, deadline=None)
WORK = SequenceWork(100.0)


@st.composite
def batches(draw):
    """(lengths, limit of a rank, ranks, most ranks of a pack), of which every sequence fits."""
    largest = draw(st.sampled_from([1, 2, 4, 8]))
    num_ranks = largest * draw(st.integers(1, 3))
    limit = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, limit * largest), min_size=1, max_size=40))
    return lengths, limit, num_ranks, largest


def planned(batch) -> tuple[ContextPlan, list[float]]:
    lengths, limit, num_ranks, largest = batch
    work = WORK(lengths)
    return plan_packs(lengths, work, limit, num_ranks, largest), work


def work_of_ranks(plan: ContextPlan, work: list[float]) -> list[float]:
    """The work of each rank; the work of a pack is shared evenly. work: of each sequence."""
    packs_of_ranks = [plan.of_rank(rank) for rank in range(plan.num_ranks)]
    return [sum(sum(work[row] for row in pack.rows) / pack.size for pack in packs) for packs in packs_of_ranks]


def test_sizes_that_a_sequence_needs():
    """10 tokens a rank: 20 are two fives on each of two ranks, 21 are 24 over four. Would not catch a slow plan."""
    assert [needed_size([length], 10, 4) for length in (10, 11, 20, 21, 40)] == [1, 2, 2, 4, 4]
    assert (tokens_of_rank(21, 1), tokens_of_rank(21, 2), tokens_of_rank(21, 4)) == (21, 12, 6)
    assert (most_tokens(5, 1), most_tokens(5, 2), most_tokens(6, 2)) == (5, 6, 6)
    with pytest.raises(ValueError, match="41 tokens does not fit into 10 tokens on each of 4 ranks"):
        needed_size([41], 10, 4)
    with pytest.raises(ValueError, match="power of two of ranks, not by up to 3"):
        plan_packs([1], [1.0], 10, 3, 3)
    with pytest.raises(ValueError, match="packs of up to 4 ranks do not divide 6 ranks"):
        plan_packs([1], [1.0], 10, 6, 4)


def test_one_long_sequence_beside_short_ones():
    """40 tokens on ranks 0-3, and tens for the others, of which four passes are as much work: by hand.

    Would not catch a plan that a long batch breaks.
    """
    lengths, work = [40] + [10] * 16, [160.0] + [10.0] * 16
    plan = plan_packs(lengths, work, 10, 8, 4)
    assert plan.packs[0] == ContextPack((0,), 0, 4) and plan.num_passes == 4
    assert [len(plan.of_rank(rank)) for rank in range(8)] == [4] * 8
    assert plan.of_rank(0) == [ContextPack((0,), 0, 4), *[ContextPack((), 0, 1)] * 3]
    assert work_of_ranks(plan, work) == [40.0] * 8


def test_what_would_be_uneven_is_cut_further():
    """Three sequences for four ranks, two ranks each: a third of the ranks would wait. Cut over four none does.

    Would not catch a cut that costs more than it saves.
    """
    plan = plan_packs([20, 20, 20], [8.0] * 3, 10, 4, 4)
    assert work_of_ranks(plan, [8.0] * 3) == [6.0] * 4
    assert sorted(one.size for one in plan.packs) == [2, 2, 4]


@modest
@given(batches())
def test_every_sequence_once(batch):
    """In one pack, over neighbours from a multiple of their number on. Would not catch uneven work."""
    lengths, _, num_ranks, largest = batch
    plan, _ = planned(batch)
    assert sorted(row for one in plan.packs for row in one.rows) == list(range(len(lengths)))
    for one in plan.packs:
        assert one.rows and one.size & (one.size - 1) == 0 and one.size <= largest
        assert one.first % one.size == 0 and one.first + one.size <= num_ranks
    assert planned(batch)[0] == plan


@modest
@given(batches(), st.integers(1, 4))
def test_sequences_of_a_unit_stay_in_one_pack(batch, most):
    """In their order, within the limit. Would not catch a unit that is cut further than it needs."""
    lengths, limit, num_ranks, largest = batch
    short = [max(1, length // (2 * most)) for length in lengths]
    sizes, limit = [], limit + 2 * most
    while sum(sizes) < len(short):
        sizes.append(min(1 + len(sizes) % most, len(short) - sum(sizes)))
    plan = plan_packs(short, WORK(short), limit, num_ranks, largest, sizes)
    assert sorted(row for one in plan.packs for row in one.rows) == list(range(len(short)))
    for one in plan.packs:
        assert list(one.rows) == sorted(one.rows)
        assert sum(tokens_of_rank(short[row], one.size) for row in one.rows) <= limit + limit % 2
    pack_of_row = {row: number for number, one in enumerate(plan.packs) for row in one.rows}
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    assert all(len({pack_of_row[row] for row in range(*unit)}) == 1 for unit in pairwise(ends))


@modest
@given(batches())
def test_ranks_that_share_a_pack_meet(batch):
    """All ranks run the same number of passes, and those of a pack come to it as their same pass, so that nobody waits
    for a rank that is elsewhere. Would not catch what the passes do.
    """
    plan, _ = planned(batch)
    passes = [plan.of_rank(rank) for rank in range(plan.num_ranks)]
    assert {len(mine) for mine in passes} == {plan.num_passes}
    for together in zip(*passes, strict=True):
        for rank, one in enumerate(together):
            assert rank in one.ranks and all(together[other] == one for other in one.ranks)


@modest
@given(batches())
def test_no_rank_holds_more_than_its_limit(batch):
    """Filler included. Would not catch a model that holds more than its tokens."""
    lengths, limit, *_ = batch
    plan, _ = planned(batch)
    for one in plan.packs:
        held = sum(tokens_of_rank(lengths[row], one.size) for row in one.rows)
        assert held <= limit + (limit % 2 if one.size > 1 else 0)


@modest
@given(batches())
def test_work_is_balanced(batch):
    """The busiest rank is above the mean by one sequence's share at most, and, where all could be cut over all ranks,
    by a twentieth. Would not catch the price of the exchange, which the plan keeps low by cutting little.
    """
    lengths, limit, num_ranks, largest = batch
    plan, work = planned(batch)
    done, mean = work_of_ranks(plan, work), sum(work) / num_ranks
    assert sum(done) == pytest.approx(sum(work))
    size_of = {row: one.size for one in plan.packs for row in one.rows}
    assert max(done) <= mean + max(work[row] / size for row, size in size_of.items()) + 1e-9
    if num_ranks == largest:
        assert max(done) <= 1.0501 * mean


def bimodal(num_rows: int) -> list[int]:
    rng = random.Random(1)
    return [
        int(min(max(rng.gauss(*((300, 60) if rng.random() < 0.7 else (5000, 800))), 2), 8192)) for _ in range(num_rows)
    ]


@pytest.mark.parametrize("num_rows", [64, 512])
def test_bimodal_lengths(num_rows):
    """Of the packing benchmark: ranks within 5% of each other, short sequences whole, in well under a second.

    Would not catch other lengths; the property above holds for any.
    """
    lengths = bimodal(num_rows)
    work = SequenceWork(49152.0)(lengths)
    start = time.process_time()
    plan = plan_packs(lengths, work, 2048, 8, 4)
    assert time.process_time() - start < 2.0
    done = work_of_ranks(plan, work)
    assert max(done) <= 1.05 * min(done)
    assert all(one.size == 1 for one in plan.packs for row in one.rows if lengths[row] <= 1000)
