"""schedule.jsonl: lines, what a kill leaves, and where a resumed run goes on."""

from __future__ import annotations

import pytest

from megatron_rl.sampling.journal import (
    Counted,
    Interrupted,
    Journal,
    Recorder,
    ReplicaBack,
    ReplicaLost,
    Resumed,
    Saved,
    SliceDone,
    StepTaken,
    VersionReady,
    from_json,
    read_events,
    to_json,
)
from megatron_rl.sampling.replay import Replay, ReplayError
from megatron_rl.sampling.schedule_types import RequestDecision, ScheduleConfig, SliceOrder
from megatron_rl.sampling.scheduler import Scheduler

EVENTS = [
    SliceDone(0, 0, 4, (0, 1), (), (0,)),
    ReplicaLost(0),
    ReplicaBack(0, 0),
    StepTaken(1),
    Counted({"renewed": 1}),
    VersionReady(1),
    Saved(1),
    Interrupted(1),
    Resumed(1),
    RequestDecision("resample", 3, 1),
]


def test_events_come_back():
    """Each kind, and the text of one line. Would not catch a new field that old files lack."""
    assert [from_json(to_json(event)) for event in EVENTS] == EVENTS
    assert to_json(EVENTS[0]) == (
        '{"event":"slice","replica":0,"version":0,"num_steps":4,"starts":[0,1],"finished":[0]}'
    )
    slice_done = '{"event":"slice","replica":0,"version":0,"num_steps":4,"starts":'
    for wrong in (
        *('{"event":"slice"}', '{"event":"lost","replica":0,"x":1}', "[]", "{}", "not json", "[" * 100_000),
        *('{"event":[]}', '{"event":"began","settings":"x"}', '{"event":"taken","step":NaN}'),
        *(slice_done + "3}", slice_done + '["0"]}', '{"event":"decided","kind":"go","request":0,"attempt":0}'),
    ):
        with pytest.raises(ValueError, match="not a line of schedule.jsonl"):
            from_json(wrong)


def test_a_journal_is_cut_where_the_checkpoint_was(tmp_path):
    """Two of three whole lines are kept, the torn fourth is not read. Would not catch a file that someone edited."""
    file = tmp_path / "schedule.jsonl"
    journal = Journal(file)
    for event in EVENTS[:3]:
        journal.append(event)
    journal.close()
    with file.open("a") as torn:
        torn.write('{"event":"tak')
    assert read_events(file) == EVENTS[:3]
    again = Journal(file, num_kept=2)
    assert again.num_lines == 2
    again.append(EVENTS[4])
    again.close()
    assert read_events(file) == [*EVENTS[:2], EVENTS[4]]


def test_a_loss_is_repeated_as_drops():
    """Replica 1 had requests 1 and 2 and died after one slice; 1 went to replica 0, 2 to itself when it came back. The
    replay waits with slice 1 of replica 0 until replica 1 has done its first. Would not catch other bits of an engine.
    """
    events = [
        SliceDone(0, 0, 2, (0,), (), (0,)),
        SliceDone(1, 0, 2, (1, 2)),
        ReplicaLost(1),
        ReplicaBack(1, 0),
        SliceDone(0, 0, 2, (1,), (), (1,)),
        SliceDone(1, 0, 1, (2,), (), (2,)),
    ]
    replay = Replay(ScheduleConfig(3, 1, slice_steps=2), 2, events)
    assert replay.next_order(0) == SliceOrder(0, 0, 2, (0,))
    replay.slice_done(0, 2, {0: 2}, [0])
    assert replay.next_order(0) is None
    assert replay.next_order(1) == SliceOrder(1, 0, 2, (1, 2))
    replay.slice_done(1, 2, {1: 2, 2: 2}, [])
    assert replay.next_order(0) == SliceOrder(0, 0, 2, (1,))
    assert replay.next_order(1) == SliceOrder(1, 0, 1, (2,), (1, 2))
    replay.slice_done(1, 1, {2: 1}, [2])
    with pytest.raises(ReplayError, match=r"slice 1 of replica 0.*\[1\], now there are 2 .* requests \[\]"):
        replay.slice_done(0, 2, {1: 2}, [])
    replay.slice_done(0, 2, {1: 2}, [1])
    assert replay.is_complete(1)


def test_what_cannot_be_repeated_is_refused():
    """Older weights after a restart, too few replicas, a save in the middle. Would not catch another model."""
    rules = ScheduleConfig(1, 2, ahead=1)
    back = [SliceDone(0, 1, 2, (0,)), ReplicaLost(0), ReplicaBack(0, 0), SliceDone(0, 0, 2, (0,), (), (0,))]
    with pytest.raises(ReplayError, match="back to 0"):
        Replay(rules, 1, back)
    with pytest.raises(ReplayError, match="has 2 replicas"):
        Replay(rules, 1, [SliceDone(1, 0, 1, (0,), (), (0,))])
    with pytest.raises(ReplayError, match="cannot be saved"):
        Replay(rules, 1, back[:1]).state_dict()


def test_a_replay_from_a_checkpoint(tmp_path):
    """The first line is known: request 0 is finished, 1 begins anew with its tokens. Would not catch missing tokens."""
    events = [SliceDone(0, 0, 2, (0, 1), (), (0,)), Resumed(1), SliceDone(0, 0, 3, (1,), (), (1,))]
    replay = Replay(ScheduleConfig(2, 1), 1, events, num_done=1)
    assert replay.next_order(0) == SliceOrder(0, 0, 3, (1,))
    replay.slice_done(0, 3, {1: 3}, [1])
    assert replay.is_complete(1)


def test_a_replay_lets_no_version_be_overwritten_before_it_is_used():
    """Slice 1 holds version 1, so version 2 may be sent only when that was given. Would not catch a buffer that is
    written without asking.
    """
    events = [SliceDone(0, 0, 2, (0,), (), (0,)), SliceDone(0, 1, 2, (1,), (), (1,))]
    replay = Replay(ScheduleConfig(1, 3, ahead=1), 1, events)
    assert replay.may_send(1) and not replay.may_send(2)
    replay.next_order(0)
    replay.slice_done(0, 2, {0: 2}, [0])
    assert replay.next_order(0) is None and replay.wanted_version(0) == 1 and not replay.may_send(2)
    replay.version_ready(1)
    assert replay.next_order(0) == SliceOrder(0, 1, 2, (1,)) and replay.may_send(2)


def test_a_replay_is_interrupted_where_the_recorded_run_was() -> None:
    """A validation empties the engines: until it has happened again, no replica goes beyond the slices before it.

    Would not catch a validation that leaves something in an engine.
    """
    rules = ScheduleConfig(batch_rows=1, num_steps_total=2, ahead=1, slice_steps=2)
    events = [
        SliceDone(0, 0, 2, starts=(0,)),
        Interrupted(0),
        SliceDone(0, 0, 2, starts=(0,), drops=(0,), finished=(0,)),
    ]
    replay = Replay(rules, 1, events)
    assert not replay.may_save(0)
    assert replay.next_order(0) == SliceOrder(0, 0, 2, starts=(0,))
    replay.slice_done(0, 2, {0: 2}, [])
    assert replay.may_save(0) and replay.next_order(0) is None
    replay.saved(0)  # a checkpoint is none
    assert replay.next_order(0) is None
    replay.saved(0, interrupted=True)
    assert replay.next_order(0) == SliceOrder(0, 0, 2, starts=(0,), drops=(0,))


def test_a_replay_counts_what_the_recorded_run_counted(tmp_path):
    """By hand: of four requests one is finished, a checkpoint renews three, and a death moves them, of which one had 3
    tokens; a replay has neither, and its steps count the same. Would not catch counts that are taken twice in a step.
    """
    rules = ScheduleConfig(batch_rows=2, num_steps_total=2, ahead=1, slice_steps=2, partial=False)
    journal = Journal(tmp_path / "schedule.jsonl")
    run = Recorder(Scheduler(rules, 1), journal)
    run.next_order(0)
    run.slice_done(0, 2, {0: 2, 1: 2}, [0])
    run.saved(0)
    run.next_order(0)
    run.slice_done(0, 1, {1: 1}, [])
    known = [dict(run.counts)]
    journal.append(Counted(known[0]))
    run.replica_lost(0)
    run.take_decisions()
    known.append(dict(run.counts))
    journal.append(Counted(known[1]))
    journal.close()
    nothing = {"truncated": 0, "resampled": 0}
    assert known[0] == {**nothing, "renewed": 3, "moved": 0, "forgotten_tokens": 0}
    assert known[1] == {**nothing, "renewed": 3, "moved": 3, "forgotten_tokens": 3}
    events = read_events(tmp_path / "schedule.jsonl")
    replay = Recorder(Replay(rules, 1, events), Journal(tmp_path / "again.jsonl"))
    for step, counts in enumerate(known, start=1):
        replay.step_taken(step)
        assert replay.counts == counts
    older = Replay(rules, 1, [event for event in events if not isinstance(event, Counted)])
    older.step_taken(1)
    assert older.counts == nothing
