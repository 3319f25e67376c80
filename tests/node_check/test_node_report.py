"""Which ranks measure an all-reduce together, and how what they have timed is joined; no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.node_check.node_report import (
    ACROSS,
    INSIDE,
    PAIR,
    MeasuredReduce,
    groups_of,
    joined,
    neighbour_rounds,
)


def test_groups_of_two_nodes():
    """By hand: two nodes of two ranks. Two neighbours are all nodes, so there are no pairs."""
    assert groups_of("aabb") == [(INSIDE, (0, 1)), (INSIDE, (2, 3)), (ACROSS, (0, 2)), (ACROSS, (1, 3))]


def test_groups_of_one_node_and_of_one_rank():
    assert groups_of("aaa") == [(INSIDE, (0, 1, 2))]
    assert groups_of("a") == []
    assert groups_of("ab") == [(ACROSS, (0, 1))]


def test_nodes_of_other_sizes_share_what_both_have():
    """Ray may put two bundles on one large machine."""
    assert groups_of("aaaab") == [(INSIDE, (0, 1, 2, 3)), (ACROSS, (0, 4))]


@given(st.integers(3, 40))
def test_rounds_of_neighbours(num_nodes):
    """Every node meets both neighbours, one at a time. Would not catch an order in which nodes wait needlessly."""
    rounds = neighbour_rounds(num_nodes)
    for pairs in rounds:
        flat = [node for pair in pairs for node in pair]
        assert len(flat) == len(set(flat))
    met = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert met == {frozenset((node, (node + 1) % num_nodes)) for node in range(num_nodes)}
    assert sum(map(len, rounds)) == num_nodes and len(rounds) == 2 + num_nodes % 2


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_ranks_run_their_groups_in_one_order(nodes):
    """Each rank runs its groups in the order of the list, so the first group that is left always has all its ranks
    ready. Would not catch a group that two ranks name differently.
    """
    left = {rank: [group for group in groups_of(nodes) if rank in group[1]] for rank in range(len(nodes))}
    while any(left.values()):
        ready = [mine[0] for mine in left.values() if mine]
        can_run = [group for group in ready if all(left[rank][0] == group for rank in group[1])]
        assert can_run
        for rank in can_run[0][1]:
            left[rank].pop(0)


def timed(kind, ranks, *rates):
    return [MeasuredReduce(kind, ranks, rate, "" if rate else "broken") for rate in rates]


def test_a_group_is_as_fast_as_its_slowest_rank_and_lanes_add_up():
    """By hand: lanes of 3 and 5 GB/s between the same nodes."""
    measured = [*timed(ACROSS, (0, 2), 3.0, 4.0), *timed(ACROSS, (1, 3), 6.0, 5.0), *timed(INSIDE, (0, 1), 9.0, 8.0)]
    inside, across = joined("p", "aabb", measured)
    assert (inside.kind, inside.nodes, inside.gb_per_s) == (INSIDE, ("a",), 8.0)
    assert (across.kind, across.nodes) == (ACROSS, ("a", "b")) and across.gb_per_s == pytest.approx(8.0)


def test_one_broken_lane_breaks_the_sum():
    (report,) = joined("p", "aabb", [*timed(PAIR, (0, 2), 3.0, 4.0), *timed(PAIR, (1, 3), 6.0, None)])
    assert report.gb_per_s is None and report.failure == "broken"
