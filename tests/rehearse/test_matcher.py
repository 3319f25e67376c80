"""Calls of all ranks, matched in a simulation: what fits, and what is said of planted faults; no processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.rehearse.group_calls import RECEIVE, SEND, GroupCall, Size
from megatron_rl.rehearse.matcher import match_calls

TP, DP = ((0, 1), (2, 3)), ((0, 2), (1, 3))
"""Groups of four ranks."""


def reduced(group, numel=8, line="a.py:1", name="allreduce", dtype="float32"):
    return GroupCall("update_actor", name, group, (Size(numel, dtype, "cuda"),), line)


def message(name, peer, group, numel=4, batch=None, line="p.py:1"):
    return GroupCall("update_actor", name, group, (Size(numel, "bfloat16", "cuda"),), line, None, peer, batch)


def of(groups, rank):
    return next(group for group in groups if rank in group)


def step_of(rank):
    """A sum over TP, two over DP, and a gather over all, with lines of their own."""
    return [
        reduced(of(TP, rank), line="tp.py:1"),
        reduced(of(DP, rank), 16, line="dp.py:1"),
        reduced(of(DP, rank), 16, "dp.py:2", "reduce_scatter_base"),
        reduced((0, 1, 2, 3), 2, "all.py:1", "allgather_base"),
    ]


def all_ranks():
    return {rank: step_of(rank) for rank in range(4)}


def test_calls_of_equal_ranks_fit():
    """16 calls. Would not catch calls that differ in their values."""
    match = match_calls(all_ranks())
    assert match.fits and match.num_calls == 16 and not match.sentences() and match.ended == {0, 1, 2, 3}


def test_a_dropped_call_is_named():
    """Rank 3 leaves its sum over TP out: rank 2 waits for it there. Would not catch a call that all ranks drop."""
    calls = all_ranks()
    del calls[3][0]
    match = match_calls(calls)
    assert not match.fits and match.num_calls == 6  # over TP of ranks 0 and 1; twice over DP of ranks 1 and 3
    [at_tp] = [one for one in match.waiting if one.at.rank == 2]
    assert at_tp.at.call.line == "tp.py:1" and at_tp.absent == (3,)
    text = " ".join(match.sentences())
    assert "rank 2's allreduce of 8 float32 on cuda at tp.py:1 in update_actor waits for rank 3" in text
    assert "rank 0's allreduce of 16 float32 on cuda at dp.py:1 in update_actor waits for rank 2" in text
    assert "rank 3's allgather_base of 2 float32 on cuda at all.py:1 in update_actor waits for ranks 0, 2" in text


def test_the_last_call_dropped_leaves_an_ended_rank():
    """Rank 1 has ended; who waits for it comes first. Would not catch a rank that ends before its first call."""
    calls = all_ranks()
    del calls[1][3]
    match = match_calls(calls)
    assert match.ended == {1} and match.sentences()[0].endswith("at all.py:1 in update_actor waits for rank 1")


@pytest.mark.parametrize(
    "change",
    [{"sizes": (Size(9, "float32", "cuda"),)}, {"sizes": (Size(8, "float64", "cuda"),)}, {"root": 1}],
    ids=["resized", "another type", "another root"],
)
def test_a_changed_call_is_named_with_both_lines(change):
    """All end, one pair differs. Would not catch a collective that may be uneven."""
    calls = all_ranks()
    calls[2][0] = replace(calls[2][0], line="wrong.py:7", **change)
    match = match_calls(calls)
    [difference] = match.differences
    assert not match.waiting and (difference.first.rank, difference.second.rank) == (2, 3)
    assert "wrong.py:7 in update_actor meets rank 3's" in str(difference) and "tp.py:1" in str(difference)


def test_two_operations_of_one_group_swapped_in_one_rank():
    """Each meets the other one. Would not catch two equal calls that are swapped, which is none."""
    calls = all_ranks()
    calls[1][1], calls[1][2] = calls[1][2], calls[1][1]
    match = match_calls(calls)
    assert [(one.first.call.line, one.second.call.line) for one in match.differences] == [
        ("dp.py:2", "dp.py:1"),
        ("dp.py:1", "dp.py:2"),
    ]


def test_a_cycle_over_groups_is_named():
    """Ranks 0 and 3 come to TP first, 1 and 2 to DP: each waits for the next. Would not catch a cycle of streams."""
    calls = {rank: [reduced(of(TP, rank)), reduced(of(DP, rank))] for rank in range(4)}
    for rank in (1, 2):
        calls[rank].reverse()
    match = match_calls(calls)
    cycle = [one.at.rank for one in match.cycle()]
    assert sorted(cycle) == [0, 1, 2, 3] and match.num_calls == 0
    assert match.sentences()[0].startswith("ranks 0, 1, 3, 2 wait for each other, the last one for the first: rank 0's")
    assert len(match.sentences()) == 1


def test_messages_that_are_posted_at_once_pass_each_other():
    """Both send and receive in one batch; one after the other both would wait. Would not catch buffered sends."""
    group = (0, 1)

    def calls(batch):
        return {
            rank: [
                message(SEND, 1 - rank, group, batch=batch),
                message(RECEIVE, 1 - rank, group, batch=batch),
                reduced(group),
            ]
            for rank in range(2)
        }

    assert match_calls(calls(1)).fits and match_calls(calls(1)).num_calls == 6
    alone = match_calls(calls(None))
    assert [one.at.rank for one in alone.cycle()] == [0, 1]


def test_messages_meet_in_their_order_and_size():
    """Two messages of rank 0 to rank 1, received in the other order. Would not catch equal sizes swapped."""
    group = (0, 1)
    calls = {
        0: [message(SEND, 1, group, 4, line="s.py:1"), message(SEND, 1, group, 6, line="s.py:2")],
        1: [message(RECEIVE, 0, group, 6, line="r.py:1"), message(RECEIVE, 0, group, 4, line="r.py:2")],
    }
    match = match_calls(calls)
    lines = {(one.first.call.line, one.second.call.line) for one in match.differences}
    assert {frozenset(pair) for pair in lines} == {frozenset({"s.py:1", "r.py:1"}), frozenset({"s.py:2", "r.py:2"})}


def test_a_message_that_nobody_receives():
    """Would not catch a message that is left over after the last step of a rank that does not wait for it."""
    match = match_calls({0: [message(SEND, 1, (0, 1))], 1: [reduced((1,))]})
    assert match.sentences() == ["rank 0's send of 4 bfloat16 on cuda at p.py:1 in update_actor waits for rank 1"]


def test_ranks_that_are_not_there_agree():
    """Two of four ranks: what they do with each other is looked at. Would not catch what the others do."""
    calls = all_ranks()
    few = {rank: [*calls[rank], message(SEND, 3 - rank, (rank, 3 - rank))] for rank in (0, 1)}
    assert match_calls(few).fits
    few[1][0] = replace(few[1][0], name="allgather_base")
    assert len(match_calls(few).differences) == 1


def test_uneven_collectives_may_differ_in_elements():
    """Tokens that go to experts. Would not catch splits that do not add up."""
    calls = {rank: [reduced((0, 1), 4 + rank, name="alltoall_base")] for rank in range(2)}
    assert match_calls(calls).fits
    calls[1] = [reduced((0, 1), 4, name="alltoall_base", dtype="float64")]
    assert len(match_calls(calls).differences) == 1


def test_more_of_a_kind_are_counted():
    """64 ranks wait for one that ended at once. Would not catch a rank outside the group."""
    ranks = tuple(range(64))
    match = match_calls({rank: [reduced(ranks)] if rank else [] for rank in ranks})
    sentences = match.sentences(2)
    assert len(sentences) == 3 and sentences[-1] == "and 61 more like these"
