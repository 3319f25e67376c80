"""Lengths of former answers: what a batch may know of them, what a checkpoint keeps, and the order that follows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.sampling.engine_model import draw
from megatron_rl.sampling.load_balancing import by_expected_length
from megatron_rl.sampling.response_history import LengthHistory, longest_first
from megatron_rl.sampling.schedule_types import ScheduleConfig, SliceOrder
from megatron_rl.sampling.scheduler import Scheduler

REQUESTS = st.lists(st.tuples(st.none() | st.integers(1, 50), st.integers(0, 3)), max_size=30)


def rows(*lengths: int) -> SimpleNamespace:
    """The column of a batch that is read."""
    return SimpleNamespace(num_sampled=torch.tensor(lengths))


@given(REQUESTS)
def test_the_order_is_that_of_expected_lengths(known):
    """Each request once; those that go on first, then falling lengths; the order is none of the numbers that come in.
    Would not catch another place for prompts that nothing is known of.
    """
    requests = list(range(100, 100 + len(known)))
    expected, drawn = [length for length, _ in known], [num for _, num in known]
    order = longest_first(requests, expected, drawn)
    assert sorted(order) == requests
    go_on = sum(num > 0 for num in drawn)
    assert all(drawn[request - 100] for request in order[:go_on])
    for part in (order[:go_on], order[go_on:]):
        lengths = [length for request in part if (length := expected[request - 100]) is not None]
        assert lengths == sorted(lengths, reverse=True)
    back = longest_first(requests[::-1], expected[::-1], drawn[::-1])
    assert back == order


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 8))
def test_no_order_by_number_is_shorter_than_a_third_longer(lengths, places):
    """With lengths that come true, an engine that begins the longest first ends within 4/3 of any order (Graham, 1969).
    Would not catch an order that is good by chance.
    """
    requests = list(range(len(lengths)))
    order = longest_first(requests, lengths, [0] * len(lengths))
    ends = draw({request: lengths[request] for request in order}, None, places).num_steps
    assert ends <= (4 / 3 - 1 / (3 * places)) * draw(dict(enumerate(lengths)), None, places).num_steps + 1e-9


def test_a_batch_knows_what_is_trained_before_its_weights(tmp_path: Path):
    """With ahead=1, batch 4 may be drawn under version 2, and knows steps 1 and 2. The longest of the last answers
    counts. A checkpoint has the same for later steps. Would not catch a prompt that comes twice in a batch.
    """
    lengths = LengthHistory(ScheduleConfig(2, 9, ahead=1))
    lengths.add(1, torch.tensor([7, 7, 8]), rows(3, 5, 2))
    lengths.add(2, torch.tensor([7, 7]), rows(1, 4))
    lengths.add(3, torch.tensor([7, 7]), rows(9, 9))
    assert [lengths.of(7, batch) for batch in (1, 2, 3, 4, 5)] == [None, None, 5, 4, 9]
    assert [lengths.of(8, batch) for batch in (2, 3, 9)] == [None, 2, 2] and lengths.of(9, 9) is None
    lengths.write(tmp_path, 2)
    again = LengthHistory(ScheduleConfig(2, 9, ahead=1))
    again.read(tmp_path)
    assert [again.of(7, batch) for batch in (3, 4, 5)] == [5, 4, 4] and again.of(8, 5) == 2
    again.add(3, torch.tensor([7, 7]), rows(9, 9))
    again.add(3, torch.tensor([7, 7]), rows(9, 9))
    assert torch.equal(again.tensors(3)["lengths"], lengths.tensors(3)["lengths"])
    empty = LengthHistory(ScheduleConfig(2, 9, ahead=1))
    empty.read(tmp_path / "none")
    assert empty.of(7, 9) is None


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=20),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), min_size=1, max_size=5),
    st.booleans(),
)
def test_replicas_end_evenly(sized, replicas, has_room):
    """Each request is given once and no room is exceeded. Where there is room for all, groups stay whole, and no
    replica ends later than another by more than its largest group, or than it was busy. Would not catch a better order.
    """
    starts = [sum(size for size, _ in sized[:at]) for at in range(len(sized))]
    groups = [list(range(start, start + size)) for start, (size, _) in zip(starts, sized, strict=True)]
    num, expected = sum(size for size, _ in sized), [length for _, length in sized]
    loads = [load for load, _ in replicas]
    rooms = [num] * len(replicas) if has_room else [room for _, room in replicas]
    if sum(rooms) < num:
        rooms[0] += num - sum(rooms)
    given_to = by_expected_length(groups, expected, loads, rooms)
    assert sorted(request for part in given_to for request in part) == list(range(num))
    assert all(len(part) <= room for part, room in zip(given_to, rooms, strict=True))
    if not has_room:
        return
    ends = list(loads)
    for group, length in zip(groups, expected, strict=True):
        (owner,) = {replica for replica, part in enumerate(given_to) for request in group if request in part}
        ends[owner] += length * len(group)
    largest = max((length * size for size, length in sized), default=0)
    assert max(ends) <= max(max(loads), min(ends) + largest)


def test_a_round_is_spread_by_length():
    """Groups of two: one of 9 tokens each, three of 3. One replica takes the long one, the other the rest. Without
    lengths each takes half. Would not catch a replica that has something to draw left.
    """
    expected = {0: 3, 1: 3, 2: 9, 3: 9, 4: 3, 5: 3, 6: 3, 7: 3}
    rules = ScheduleConfig(8, 1, ahead=0, slice_steps=None, group_size=2)
    by_length = Scheduler(rules, 2, None, expected.get)
    assert by_length.next_order(0) == SliceOrder(0, 0, None, (2, 3))
    assert by_length.next_order(1) == SliceOrder(1, 0, None, (0, 1, 4, 5, 6, 7))
    unknown = Scheduler(rules, 2, None, lambda request: None)
    assert [unknown.next_order(0), unknown.next_order(1)] == [
        SliceOrder(0, 0, None, (0, 1, 4, 5)),
        SliceOrder(1, 0, None, (2, 3, 6, 7)),
    ]
