"""Small schedules by hand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.sampling.load_balancing import even_shares
from megatron_rl.sampling.schedule_types import RequestDecision, ScheduleConfig, SliceOrder
from megatron_rl.sampling.scheduler import Scheduler


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 60))
def test_shares_are_even(replicas, num_waiting):
    """All that fits is given, and none ends two above another that has room. Would not catch which one is first."""
    loads, rooms = [load for load, _ in replicas], [room for _, room in replicas]
    shares = even_shares(loads, rooms, num_waiting)
    assert sum(shares) == min(num_waiting, sum(rooms))
    assert all(0 <= share <= room for share, room in zip(shares, rooms, strict=True))
    ends = [load + share for load, share in zip(loads, shares, strict=True)]
    for end, share in zip(ends, shares, strict=True):
        for other, left in zip(ends, (room - s for room, s in zip(rooms, shares, strict=True)), strict=True):
            assert not (share and left) or end <= other + 1


@pytest.mark.parametrize(
    ("loads", "rooms", "num", "shares"),
    [
        ([0, 0, 0, 0], [99] * 4, 10, [3, 3, 2, 2]),
        ([5, 0], [99, 99], 7, [1, 6]),
        ([5, 0], [99, 2], 7, [5, 2]),
        ([4, 4], [0, 0], 3, [0, 0]),
    ],
)
def test_shares_by_hand(loads, rooms, num, shares):
    """The first is how a synchronous run cuts a batch. Would not catch other sizes: the property above does."""
    assert even_shares(loads, rooms, num) == shares


def test_rules_refuse_what_cannot_go_on():
    """With weights after every third step, batch 3 needs version 0. Would not catch other faults of a bound."""
    with pytest.raises(ValueError, match="ahead=2"):
        ScheduleConfig(4, 9, ahead=1, sync_every=3)
    with pytest.raises(ValueError, match="straggler_policy"):
        ScheduleConfig(4, 9, straggler_policy="cut")
    assert ScheduleConfig(4, 9, ahead=2, sync_every=3).needed_version(4) == 3


def test_without_ahead_a_batch_is_cut_into_equal_chunks():
    """5 rows on 2 replicas: 0-2 and 3-4, no step limit, whichever is asked first; batch 2 only under version 1.

    Would not catch a chunk that an engine cannot queue.
    """
    scheduler = Scheduler(ScheduleConfig(5, 2, ahead=0, max_running=1, slice_steps=None), 2)
    assert scheduler.next_order(1) == SliceOrder(1, 0, None, (3, 4))
    assert scheduler.next_order(0) == SliceOrder(0, 0, None, (0, 1, 2))
    assert scheduler.next_order(0) is None
    scheduler.slice_done(0, 7, {0: 7, 1: 3, 2: 5}, [0, 1, 2])
    assert scheduler.next_order(0) is None and not scheduler.is_complete(1)
    scheduler.slice_done(1, 4, {3: 4, 4: 4}, [3, 4])
    assert scheduler.is_complete(1)
    scheduler.step_taken(1)
    assert scheduler.next_order(0) is None and scheduler.wanted_version(0) == 1
    scheduler.version_ready(1)
    assert scheduler.next_order(0) == SliceOrder(0, 1, None, (5, 6, 7))


@pytest.mark.parametrize("awaits", [False, True])
def test_an_answer_holds_up_its_own_request_alone(awaits):
    """Two of three requests are away. The third one goes on, and so does one that is back. Where orders must not
    depend on seconds, the round waits for all answers. Would not catch a request that is handed out twice; simulated
    schedules do.
    """
    scheduler = Scheduler(ScheduleConfig(3, 1, ahead=0, slice_steps=8, has_turns=True, awaits_turns=awaits), 1)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 8, (0, 1, 2))
    scheduler.slice_done(0, 8, {0: 3, 1: 4, 2: 8}, [], away=[0, 1])
    assert scheduler.next_order(0) == (None if awaits else SliceOrder(0, 0, 8))
    if not awaits:
        scheduler.slice_done(0, 8, {2: 8}, [])
    scheduler.returned(0, is_finished=False)
    assert scheduler.next_order(0) == (None if awaits else SliceOrder(0, 0, 8, (0,)))
    if not awaits:
        scheduler.slice_done(0, 2, {0: 1, 2: 2}, [0, 2])
        assert scheduler.next_order(0) is None  # the engine is empty
    scheduler.returned(1, is_finished=False)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 8, (0, 1) if awaits else (1,))


def test_partial_requests_go_on_under_the_newest_weights():
    """2 rows a batch, ahead 1, room for 4: batches 1 and 2 at once under version 0; then version 1 with what is left of
    batch 2 and all of batch 3. With recompute_kv what is left is dropped and begun anew. Would not catch tokens.
    """
    for recompute in (False, True):
        scheduler = Scheduler(ScheduleConfig(2, 4, ahead=1, slice_steps=8, max_running=4, recompute_kv=recompute), 1)
        assert scheduler.next_order(0) == SliceOrder(0, 0, 8, (0, 1, 2, 3))
        scheduler.slice_done(0, 8, {0: 3, 1: 8, 2: 1, 3: 8}, [0, 1, 2])
        assert scheduler.is_complete(1) and not scheduler.is_complete(2)
        scheduler.step_taken(1)
        assert scheduler.next_order(0) == SliceOrder(0, 0, 8)
        scheduler.version_ready(1)
        scheduler.slice_done(0, 8, {3: 8}, [])
        starts, drops = ((3, 4, 5), (3,)) if recompute else ((4, 5), ())
        assert scheduler.next_order(0) == SliceOrder(0, 1, 8, starts, drops)
        assert scheduler.counts["renewed"] == recompute


def test_without_partial_a_replica_drains_before_it_takes_weights():
    """Request 3 is unfinished, so version 0 stays, and batch 3, which needs version 1, is not begun. Would not catch
    how many requests are begun under old weights where the bound allows it.
    """
    scheduler = Scheduler(ScheduleConfig(2, 4, ahead=1, slice_steps=8, max_running=4, partial=False), 1)
    scheduler.next_order(0)
    scheduler.slice_done(0, 8, {0: 3, 1: 8, 2: 1, 3: 8}, [0, 1, 2])
    scheduler.step_taken(1)
    scheduler.version_ready(1)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 8)
    scheduler.slice_done(0, 2, {3: 2}, [3])
    assert scheduler.next_order(0) == SliceOrder(0, 1, 8, (4, 5))


def test_in_rounds_weights_come_at_a_counted_place():
    """Version 1 is taken once batch 2 is complete: not before, though it is there; and then it is waited for.

    Would not catch a place that depends on which replica answers first.
    """
    scheduler = Scheduler(ScheduleConfig(2, 4, ahead=1, slice_steps=8, max_running=2, deterministic=True), 2)
    assert [scheduler.next_order(r).starts for r in (0, 1)] == [(0, 1), (2, 3)]
    scheduler.slice_done(0, 8, {0: 8, 1: 8}, [0, 1])
    scheduler.step_taken(1)
    assert scheduler.next_order(0) is None
    scheduler.slice_done(1, 8, {2: 8, 3: 8}, [2])
    assert scheduler.next_order(0) is None and scheduler.next_order(1) == SliceOrder(1, 0, 8)
    assert not scheduler.may_save(1) and scheduler.may_send(1)
    scheduler.slice_done(1, 1, {3: 1}, [3])
    assert scheduler.next_order(0) is None and scheduler.wanted_version(0) == 1 and scheduler.may_save(1)
    scheduler.version_ready(1)
    assert not scheduler.may_send(2) and not scheduler.may_save(1)
    assert scheduler.next_order(0) == SliceOrder(0, 1, 8, (4,)) and scheduler.next_order(1) == SliceOrder(1, 1, 8, (5,))
    assert scheduler.may_send(2)


def test_a_lost_replica_gives_its_requests_back():
    """Requests 2 and 3 go to the front, with their tokens where partial, else without. Would not catch tokens that the
    dying replica drew and never reported: no one has them.
    """
    for partial in (True, False):
        scheduler = Scheduler(ScheduleConfig(4, 3, ahead=1, slice_steps=8, max_running=4, partial=partial), 2)
        assert [scheduler.next_order(r).starts for r in (0, 1)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
        scheduler.slice_done(0, 8, {0: 8, 1: 8, 2: 8, 3: 8}, [])
        assert scheduler.next_order(0) == SliceOrder(0, 0, 8)
        scheduler.replica_lost(0)
        expected = [] if partial else [RequestDecision("forget", request, 0) for request in range(4)]
        assert scheduler.take_decisions() == expected
        with pytest.raises(ValueError, match="no outstanding order"):
            scheduler.slice_done(0, 8, {0: 8}, [])
        scheduler.slice_done(1, 8, {4: 8, 5: 8, 6: 8, 7: 8}, [4, 5])
        assert scheduler.next_order(1) == SliceOrder(1, 0, 8, (0, 1))
        scheduler.replica_back(0, 0)
        assert scheduler.next_order(0) == SliceOrder(0, 0, 8, (2, 3))
        assert scheduler.counts["moved"] == 4 and scheduler.counts["forgotten_tokens"] == (0 if partial else 32)


def test_stragglers():
    """Request 1 is alone from the end of slice 1 and late in slices 2 and 3. truncate: it ends there, and is dropped in
    the next order. resample, one attempt: begun anew as attempt 1, and cut two slices later. Would not catch what is
    done with the tokens.
    """
    for policy in ("truncate", "resample"):
        rules = ScheduleConfig(2, 2, ahead=1, slice_steps=4, max_running=2, straggler_policy=policy, straggler_slices=2)
        scheduler = Scheduler(rules, 1)
        scheduler.next_order(0)
        scheduler.slice_done(0, 4, {0: 4, 1: 4}, [0])
        assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (2,))
        scheduler.slice_done(0, 4, {1: 4, 2: 4}, [])
        assert scheduler.next_order(0) == SliceOrder(0, 0, 4) and scheduler.take_decisions() == []
        scheduler.slice_done(0, 4, {1: 4, 2: 4}, [])
        if policy == "resample":
            assert scheduler.take_decisions() == [RequestDecision("resample", 1, 1)]
            assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (1,), (1,))
            for _ in range(2):
                scheduler.next_order(0)
                scheduler.slice_done(0, 4, {1: 4, 2: 4}, [])
            assert scheduler.counts["forgotten_tokens"] == 12
        assert scheduler.take_decisions() == [RequestDecision("truncate", 1, int(policy == "resample"))]
        assert scheduler.is_complete(1)
        assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (3,), (1,))


def test_a_save_begins_unfinished_requests_anew():
    """Also those whose slice is under way: it is answered as if nothing was. Request 0 ends in it, and is not begun
    again; 1 is. A new process goes on with the same request on the same replica. Would not catch tokens.
    """
    rules = ScheduleConfig(2, 2, ahead=1, slice_steps=4, max_running=2)
    scheduler = Scheduler(rules, 1)
    scheduler.next_order(0)
    state = json.loads(json.dumps(scheduler.state_dict()))
    scheduler.saved(0)
    scheduler.slice_done(0, 4, {0: 2, 1: 4}, [0])
    assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (1, 2), (1,))
    assert Scheduler(rules, 1, state).next_order(0) == SliceOrder(0, 0, 4, (0, 1))
    with pytest.raises(ValueError, match="batch_rows=2"):
        Scheduler(ScheduleConfig(3, 2), 1, state)


def test_wrong_facts_change_nothing():
    """A batch that is not complete, a stranger's tokens, a second death. Would not catch a wrong but possible fact."""
    scheduler = Scheduler(ScheduleConfig(2, 2), 2)
    scheduler.next_order(0)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match="step 1 cannot be taken"):
        scheduler.step_taken(1)
    with pytest.raises(ValueError, match=r"does not run requests \[3\]"):
        scheduler.slice_done(0, 1, {3: 1}, [])
    with pytest.raises(ValueError, match="is not dead"):
        scheduler.replica_back(0, 0)
    assert scheduler.state_dict() == before


def test_in_rounds_replicas_drain_while_the_version_is_made():
    """Not partial; batches 1 and 2 are complete, so version 1 is due. Request 5 goes on under version 0 though version
    1 is not there yet; nothing new begins. Then batch 3 is complete too, so that version 2 is due: all wait for it, and
    a save may come. Would not catch how long that takes.
    """
    rules = ScheduleConfig(2, 5, ahead=2, slice_steps=4, max_running=6, partial=False, deterministic=True)
    scheduler = Scheduler(rules, 1)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (0, 1, 2, 3, 4, 5))
    scheduler.slice_done(0, 4, dict.fromkeys(range(6), 4), [0, 1, 2, 3, 4])
    scheduler.step_taken(1)
    assert not scheduler.may_save(1)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 4)
    scheduler.slice_done(0, 1, {5: 1}, [5])
    assert scheduler.next_order(0) is None and scheduler.wanted_version(0) == 2
    assert scheduler.may_save(1)


def test_a_replica_lost_before_it_got_its_order():
    """Orders of a round are made for all at once; what the lost one would have got goes to the other in the next round.
    Back with older weights than were announced, it goes on under those, and holds nobody up. Would not catch a replica
    that comes back with weights that it does not have.
    """
    scheduler = Scheduler(ScheduleConfig(2, 4, ahead=1, slice_steps=4, max_running=4, deterministic=True), 2)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (0, 1))
    scheduler.replica_lost(1)
    scheduler.slice_done(0, 4, {0: 4, 1: 4}, [0, 1])
    scheduler.step_taken(1)
    assert scheduler.next_order(0) == SliceOrder(0, 0, 4, (2, 3))
    scheduler.version_ready(1)
    scheduler.slice_done(0, 4, {2: 4, 3: 4}, [2, 3])
    scheduler.replica_back(1, 0)
    assert scheduler.next_order(1) is None and scheduler.next_order(0) == SliceOrder(0, 1, 4, (4, 5))
    scheduler.slice_done(0, 4, {4: 4, 5: 4}, [4, 5])
    scheduler.step_taken(2)
    assert scheduler.wanted_version(1) == 2
    scheduler.version_ready(2)
    assert scheduler.next_order(0) == SliceOrder(0, 2, 4, (6,)) and scheduler.next_order(1) == SliceOrder(1, 2, 4, (7,))


def test_weights_that_are_overwritten_are_not_named():
    """Version 1 was there, but version 2 is on its way into the same buffer. Would not catch a transfer of which
    nobody told.
    """
    scheduler = Scheduler(ScheduleConfig(2, 9, ahead=3, slice_steps=4, max_running=4), 1)
    assert scheduler.next_order(0).version == 0
    scheduler.version_ready(1)
    scheduler.sending(2)
    scheduler.slice_done(0, 4, {0: 4}, [0])
    assert scheduler.next_order(0).version == 0
    scheduler.version_ready(2)
    scheduler.slice_done(0, 4, {1: 4}, [1])
    assert scheduler.next_order(0).version == 2
