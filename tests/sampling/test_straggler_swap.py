"""Late groups that are trained one step later: random batches, lengths and replicas, in whole runs, resumed ones and
replays.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.rollout_keys import extra_groups
from megatron_rl.errors import ReplayError
from megatron_rl.sampling.engine_model import Engine, draw
from megatron_rl.sampling.group_map import GroupMap, plan_swap
from megatron_rl.sampling.journal import Journal, Recorder, from_json, read_events, to_json, with_lasting_numbers
from megatron_rl.sampling.replay import Replay
from megatron_rl.sampling.request_scheduler import RequestScheduler
from megatron_rl.sampling.schedule_types import GroupSwap, RequestDecision, ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler


@dataclass
class Drawn:
    """What a request of the stream of prompts has: its length, and (version, tokens) of each part."""

    length: int
    parts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.length - sum(num for _, num in self.parts)


@dataclass
class OnePool:
    """Does with a scheduler what `PoolSampler` does. content: request -> what is drawn for it. turn: tokens of each
    of its turns; 0: there is one. pace: of replies. away: request -> rounds until its reply.
    """

    rules: ScheduleConfig
    scheduler: RequestScheduler
    num_replicas: int
    content: dict[int, tuple[int, Drawn]]
    turn: int = 0
    pace: int = 1
    num_steps: dict[int, int] = field(default_factory=dict)
    away: dict[int, int] = field(default_factory=dict)
    swaps: list[GroupSwap] = field(default_factory=list)

    def step(self, step: int) -> list[tuple[int, Drawn]]:
        """Draw the batch of a step and take it; returns its rows, each with its number in the stream."""
        self.scheduler.version_ready(step - 1)
        engines = [Engine(step - 1) for _ in range(self.num_replicas)]
        self.num_steps[step] = 0
        while not self.scheduler.is_complete(step):
            orders = [self.scheduler.next_order(replica) for replica in range(self.num_replicas)]
            assert any(orders) or self.away
            taken = [self._run(engine, order) for engine, order in zip(engines, orders, strict=True) if order]
            self.num_steps[step] += max(taken, default=0)
            for decision in self.scheduler.take_decisions():
                self._decide(decision)
            self._reply()
        swap = self.scheduler.step_taken(step)
        if swap is not None:
            self.swaps.append(swap)
        return [self.content[request] for request in self.scheduler.groups.requests_of(step)]

    def _run(self, engine: Engine, order) -> int:
        engine.follow(order, releases=True)
        drawing = draw(
            {request: self._left_in_turn(request) for request in sorted(engine.requests)},
            order.num_steps,
            self.rules.max_running,
        )
        engine.requests.difference_update(drawing.finished)
        for request, num in drawing.drawn.items():
            self.content[request][1].parts.append((order.version, num))
        ended = [] if self.turn else drawing.finished
        away = drawing.finished if self.turn else []
        self.away |= {request: request * self.pace % 4 for request in away}
        self.scheduler.slice_done(order.replica, drawing.num_steps, drawing.drawn, ended, away)
        return drawing.num_steps

    def _left_in_turn(self, request: int) -> int:
        drawn = self.content[request][1]
        done = sum(num for _, num in drawn.parts)
        return min(drawn.left, self.turn - done % self.turn) if self.turn else drawn.left

    def _reply(self) -> None:
        for request, rounds in list(self.away.items()):
            self.away[request] = rounds - 1
            if rounds == 0:
                del self.away[request]
                self.scheduler.returned(request, self.content[request][1].left == 0)

    def _decide(self, decision: RequestDecision) -> None:
        drawn = self.content[decision.request][1]
        if decision.kind == "truncate":
            drawn.length = sum(num for _, num in drawn.parts)
        else:
            drawn.parts.clear()
            self.away.pop(decision.request, None)


@dataclass(frozen=True)
class Case:
    rules: ScheduleConfig
    num_replicas: int
    seed: int
    turn: int = 0

    def pool(self, rules: ScheduleConfig, scheduler: RequestScheduler, content) -> OnePool:
        return OnePool(rules, scheduler, self.num_replicas, content, self.turn)

    def content(self) -> dict[int, tuple[int, Drawn]]:
        rng = Random(self.seed)
        lengths = [
            rng.randint(1, 9) * (8 if rng.random() < 0.2 else 1)
            for _ in range(self.rules.num_steps_total * self.rules.batch_rows)
        ]
        return {request: (request, Drawn(length)) for request, length in enumerate(lengths)}

    def run(self, wrap: Callable[[Scheduler], RequestScheduler] = lambda scheduler: scheduler, pace: int = 1):
        """The whole run: the pool, and the rows of every step."""
        pool = self.pool(self.rules, wrap(Scheduler(self.rules, self.num_replicas)), self.content())
        pool.pace = pace
        return pool, [pool.step(step) for step in range(1, self.rules.num_steps_total + 1)]


@st.composite
def cases(draw_of) -> Case:
    size, num_groups, has_turns = draw_of(st.integers(1, 3)), draw_of(st.integers(1, 6)), draw_of(st.booleans())
    rules = ScheduleConfig(
        batch_rows=size * num_groups,
        num_steps_total=draw_of(st.integers(1, 6)),
        ahead=draw_of(st.integers(1, 3)),
        slice_steps=draw_of(st.integers(1, 6)),
        max_running=draw_of(st.integers(1, 8)),
        deterministic=True,
        colocated=True,
        extra_groups=draw_of(st.integers(1, num_groups)),
        group_size=size,
        straggler_policy=draw_of(st.sampled_from(["wait", "truncate", "resample"])),
        straggler_slices=draw_of(st.integers(1, 3)),
        has_turns=has_turns,
    )
    turn = draw_of(st.integers(1, 4)) if has_turns else 0
    return Case(rules, draw_of(st.integers(1, 3)), draw_of(st.integers(0, 10**6)), turn)


def numbered(steps) -> list[list[tuple[int, list[tuple[int, int]]]]]:
    return [[(number, drawn.parts) for number, drawn in rows] for rows in steps]


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_group_is_trained_once_and_whole(case):
    """In full, in the order of its samples, and with no token older than `ahead`, over turns and with stragglers. Would
    not catch other tokens: the model of an engine only counts them.
    """
    rules, (_, steps) = case.rules, case.run()
    trained = [number for rows in steps for number, _ in rows]
    assert sorted(trained) == list(range(rules.num_steps_total * rules.batch_rows))
    size = rules.group_size
    for step, rows in enumerate(steps, 1):
        assert len(rows) == rules.batch_rows
        for first in range(0, len(rows), size):
            numbers = [number for number, _ in rows[first : first + size]]
            assert numbers == list(range(numbers[0], numbers[0] + size)) and numbers[0] % size == 0
        for _, drawn in rows:
            assert drawn.left == 0
            assert all(0 <= step - 1 - version <= rules.ahead for version, _ in drawn.parts)


@settings(deadline=None, max_examples=60)
@given(cases(), st.data())
def test_a_resumed_run_and_a_replayed_one_train_the_same(case, data):
    """From the state after any step, as JSON; and from the journal, whose lines are read back. Would not catch a state
    that is right and is never written: `tests/e2e/test_over_sampling.py` resumes a real run.
    """
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "schedule.jsonl")
        _, steps = case.run(lambda scheduler: Recorder(scheduler, journal))
        journal.close()
        events = read_events(Path(folder) / "schedule.jsonl")
    whole = numbered(steps)
    for pace in (1, 3):  # the replies to turns come in their order, or in another
        assert numbered(case.run(lambda _: Replay(case.rules, case.num_replicas, events), pace)[1]) == whole
    last = data.draw(st.integers(1, case.rules.num_steps_total))
    begun = case.pool(case.rules, Scheduler(case.rules, case.num_replicas), case.content())
    first = [begun.step(step) for step in range(1, last + 1)]
    state = json.loads(json.dumps(begun.scheduler.state_dict()))
    rules = ScheduleConfig(**{**vars(case.rules), "first_step": last + 1})
    resumed = case.pool(rules, Scheduler(rules, case.num_replicas, state), begun.content)
    resumed.away = begun.away
    rest = [resumed.step(step) for step in range(last + 1, rules.num_steps_total + 1)]
    assert numbered(first + rest) == whole


def test_a_batch_by_hand():
    """Three groups of one and one more: lengths 2, 9, 2 and 2. After two steps groups 0, 2 and 3 are there; 3 is
    trained in place of 1, and 1 ends in the second batch, at the price of one version. Would not catch groups of
    several.
    """
    rules = ScheduleConfig(3, 2, 1, slice_steps=2, max_running=8, deterministic=True, colocated=True, extra_groups=1)
    content = {request: (request, Drawn(9 if request == 1 else 2)) for request in range(6)}
    pool = OnePool(rules, Scheduler(rules, 1), 1, content)
    assert [number for number, _ in pool.step(1)] == [0, 2, 3]
    assert pool.swaps == [GroupSwap((1,), (3,))] and pool.num_steps == {1: 2}
    rows = pool.step(2)
    assert [number for number, _ in rows] == [1, 4, 5]
    assert rows[0][1].parts[0] == (0, 2) and {version for version, _ in rows[0][1].parts} == {0, 1}
    assert from_json(to_json(pool.swaps[0])) == pool.swaps[0]


def test_what_is_too_old_is_waited_for():
    """A group that began under version 0 may be trained in steps 1 and 2 with ahead=1. Would not catch a run: above."""
    groups = GroupMap(2)
    assert plan_swap(groups, 1, {1}, 3, {0: 0, 1: 0, 2: 0}, ahead=1, most=2) == GroupSwap((1,), (2,))
    assert plan_swap(groups, 2, {3}, 5, {2: 0, 3: 0, 4: 1}, ahead=1, most=2) is None
    assert plan_swap(groups, 2, {3}, 5, {2: 0, 3: 1, 4: 1}, ahead=1, most=2) == GroupSwap((3,), (4,))
    assert plan_swap(groups, 2, {3, 4}, 5, {2: 0, 3: 1, 4: 1}, ahead=1, most=2) is None
    assert plan_swap(groups, 1, {0, 1}, 4, {0: 0, 1: 0}, ahead=1, most=2) == GroupSwap((0, 1), (2, 3))
    assert plan_swap(groups, 1, {0, 1}, 4, {0: 0, 1: 0}, ahead=1, most=1) is None
    with pytest.raises(ValueError, match="needs ahead >= 2, is 0"):
        ScheduleConfig(2, 9, 0, extra_groups=1)
    with pytest.raises(ValueError, match="groups of 3"):
        ScheduleConfig(4, 9, 1, deterministic=True, colocated=True, extra_groups=1, group_size=3)


def test_a_replay_refuses_another_end():
    """A run that ends a slice elsewhere. Would not catch one that differs in tokens alone."""
    rules = ScheduleConfig(2, 2, 1, slice_steps=2, deterministic=True, colocated=True, extra_groups=1)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "schedule.jsonl")
        Case(rules, 1, 3).run(lambda scheduler: Recorder(scheduler, journal))
        journal.close()
        events = read_events(Path(folder) / "schedule.jsonl")
    with pytest.raises(ReplayError):
        Case(rules, 1, 4).run(lambda _: Replay(rules, 1, events))


@pytest.mark.parametrize(
    ("num_groups", "rate", "extra"), [(64, 0.0, 0), (64, 0.2, 16), (9, 0.1, 1), (4, 0.01, 1), (8, 0.5, 8)]
)
def test_groups_beyond_a_batch(num_groups, rate, extra):
    """Of 64 + 16 groups a fifth is left. Would not catch rates above a half, which are refused."""
    assert extra_groups(num_groups, rate) == extra


def test_a_journal_whose_requests_were_places_is_read():
    """By hand, groups of one: after the trade number 3 is the late response that began as 1, in turns and ends too.

    Would not catch another order of a batch's rows: numbers and places gave different ones.
    """
    lines = [
        '{"event":"slice","replica":0,"version":0,"num_steps":2,"starts":[0,1,2,3],"finished":[0,2,3]}',
        '{"event":"traded","late":[1],"ready":[3]}',
        '{"event":"slice","replica":0,"version":1,"num_steps":2,"starts":[3,4,5],"finished":[3,4]}',
        '{"event":"decided","kind":"truncate","request":3,"attempt":0}',
        '{"event":"traded","late":[5],"ready":[7]}',
        '{"event":"slice","replica":0,"version":1,"num_steps":2,"starts":[5,7],"finished":[5,7]}',
    ]
    _, swap, second, decision, again, third = with_lasting_numbers([from_json(line) for line in lines])
    assert (swap, again) == (GroupSwap((1,), (3,)), GroupSwap((5,), (7,)))
    assert second.starts == (1, 4, 5) and second.finished == (1, 4) and decision.request == 1
    assert third.starts == (7, 5) and third.finished == (5, 7)
