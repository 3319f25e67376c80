"""Dynamic sampling in the schedule: simulated runs with random verdicts, repeated and resumed, and some by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from filtered_step import step_seconds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenes import Scene, random_scene
from test_random_faults import StopsAtSave, orders_of

from megatron_rl.errors import ReplayError
from megatron_rl.sampling.filtered_replay import FilteredReplay
from megatron_rl.sampling.journal import Journal, Recorder, read_events
from megatron_rl.sampling.schedule_types import SALT_STRIDE, GroupsJoined, KeptGroups, ScheduleConfig
from megatron_rl.sampling.scheduler import Scheduler
from megatron_rl.sampling.simulate import Judge, SimulatedRun, Simulation, simulate

seeds = st.integers(0, 2**32)


def filtered_scene(seed: int, **fixed: object) -> Scene:
    """Groups of one to three requests; batches that begin with more groups than they keep, or as many."""
    rng = random.Random(f"{seed} groups")
    size, num_groups = rng.randint(1, 3), rng.randint(1, 4)
    kept = rng.randint(1, num_groups)
    filtered = KeptGroups(kept, rng.choice([0, num_groups, 3 * num_groups]))
    return random_scene(seed, batch_rows=size * num_groups, group_size=size, filtered=filtered, **fixed)


def judge(seed: int, timing: int = 0) -> Judge:
    """Half of the groups are kept. timing: another one means that verdicts come at other times."""

    def of(group: int):
        verdict = random.Random(f"{seed} verdict {group}").choices(["kept", "uniform", "failed"], [5, 4, 1])[0]
        return verdict, random.Random(f"{seed} {timing} {group}").choice([0.0, 1.0, 7.0])

    return of


def run(scene: Scene, timing: int = 0, **more: object) -> SimulatedRun:
    more = {"saves": scene.saves()} | more
    decider = more.pop("decider", None) or Scheduler(scene.rules, scene.num_replicas)
    turns = scene.turns(timing) if scene.rules.has_turns else None
    args = (decider, scene.rules, scene.num_replicas, scene.lengths, scene.costs(timing))
    return simulate(*args, turns=turns, judge=judge(scene.seed, timing), **more)


def check(scene: Scene, outcome: SimulatedRun) -> None:
    """Every step trains `kept_groups` groups, no group twice; others than kept ones only once the limit is reached."""
    rules = scene.rules
    assert list(outcome.trained) == list(range(1, rules.num_steps_total + 1))
    trained = [group for groups in outcome.trained.values() for group in groups]
    assert len(trained) == len(set(trained)) == rules.num_steps_total * rules.kept_groups
    assert min(outcome.staleness) >= 0 and max(outcome.staleness) <= rules.ahead
    for groups in outcome.trained.values():
        fillers = [group for group in groups if judge(scene.seed)(group)[0] != "kept"]
        assert rules.max_groups or not fillers
        for request in (group * rules.group_size + sample for group in groups for sample in range(rules.group_size)):
            assert rules.partial or len({version for version, _ in outcome.answers[request]}) == 1
    if rules.max_groups:
        assert len(outcome.answers) <= rules.num_steps_total * rules.max_groups * rules.group_size


@settings(max_examples=1000, deadline=None)
@given(seeds, st.booleans())
@example(421363295, False)  # a request of a lost replica begins again under older weights
@example(414382, False)  # one of a lost replica must wait for later weights, before which others complete a batch
def test_every_run_with_verdicts_ends(seed, has_turns):
    """In all modes, with losses, replicas that come back, and saves: no hang, no group lost or trained twice. Would not
    catch a verdict that never comes: the reward function's limits are for that.
    """
    scene = filtered_scene(seed, has_turns=has_turns)
    check(scene, run(scene, failures=scene.failures(0)))


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_in_rounds_nothing_depends_on_the_time_of_a_verdict(seed):
    """Other speeds of all parts and of reward functions: the same groups and orders. Would not catch a reward function
    that scores differently the second time.
    """
    scene = filtered_scene(seed, deterministic=True)
    first, second = run(scene, 1), run(scene, 2)
    assert first.trained == second.trained and orders_of(first) == orders_of(second)
    assert first.answers == second.answers


@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans())
def test_a_journal_repeats_verdicts(tmp_path_factory, seed, has_turns):
    """At other speeds and without losses: the same groups in every step. Another verdict is refused. Would not catch
    other bits of an engine.
    """
    scene = filtered_scene(seed, has_turns=has_turns)
    file = tmp_path_factory.getbasetemp() / "filtered.jsonl"
    journal = Journal(file)
    recorder = Recorder(Scheduler(scene.rules, scene.num_replicas), journal)
    first = run(scene, 1, decider=recorder, failures=scene.failures(0))
    journal.close()
    events = read_events(file)
    again = run(scene, 2, decider=FilteredReplay(scene.rules, scene.num_replicas, events), saves=())
    assert again.trained == first.trained
    for group in (group for groups in first.trained.values() for group in groups):
        for request in range(group * scene.rules.group_size, (group + 1) * scene.rules.group_size):
            assert again.answers[request] == first.answers[request]
    replay = FilteredReplay(scene.rules, scene.num_replicas, events)
    judged = next(iter(replay._recorded))
    with pytest.raises(ReplayError, match=f"group {judged} was"):
        replay.judged(judged, "uniform" if replay._recorded[judged] == "kept" else "kept")


@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans())
def test_a_resumed_run_trains_the_same_groups(seed, has_turns):
    """Stopped at a random checkpoint, in rounds: the same groups and responses, replacements and all. In other modes
    the run ends as `check` demands. Would not catch prompts: `tests/e2e/test_dynamic_sampling.py` compares metrics.
    """
    scene = filtered_scene(seed, num_steps_total=5, has_turns=has_turns)
    saves, turns = sorted(scene.saves()), scene.turns(1) if has_turns else None
    if not saves:
        return
    scheduler = StopsAtSave(scene.rules, scene.num_replicas)
    scheduler.stop_at = random.Random(seed).choice(saves)
    args = (scene.num_replicas, scene.lengths, scene.costs(1), saves, turns, judge(scene.seed, 1))
    before = Simulation(scheduler, scene.rules, *args)
    with pytest.raises(InterruptedError):
        before.run([])
    rules, state = replace(scene.rules, first_step=scheduler.stop_at + 1), json.loads(scheduler.state)
    after = Simulation(Scheduler(rules, scene.num_replicas, state), rules, *args)
    for request in state["away"]:
        after.leave(request)
    after.tokens = {request: list(runs) for request, runs in before.tokens.items()}
    after.attempts = before.attempts.copy()
    after.outcome.answers = dict(before.outcome.answers)
    after.outcome.trained, after.outcome.staleness = dict(before.outcome.trained), before.outcome.staleness.copy()
    outcome = after.run([])
    check(scene, outcome)
    if scene.rules.in_rounds and (scene.rules.awaits_turns or not has_turns):
        whole = run(scene, 2)
        assert outcome.trained == whole.trained
        assert {request: outcome.answers[request] for request in whole.answers} == whole.answers


def take(scheduler: Scheduler, step: int) -> list[int]:
    assert scheduler.is_complete(step)
    scheduler.step_taken(step)
    return scheduler.groups.of(step)


def draw_all(scheduler: Scheduler) -> list[int]:
    """Let replica 0 finish all that it gets; returns the requests that started."""
    scheduler.verdicts.open_groups()
    order = scheduler.next_order(0)
    scheduler.slice_done(0, 1, dict.fromkeys(order.starts, 1), order.starts)
    return list(order.starts)


def test_a_replacement_begins_at_once():
    """By hand: two groups of two a batch, one step ahead. Group 1 is uniform, so group 4 joins batch 1 although batch 2
    began before it; at most three groups a batch, so when 4 is uniform too, it is 1 that fills it up. Would not catch a
    replacement on another replica.
    """
    rules = ScheduleConfig(4, 3, 1, max_running=16, group_size=2, filtered=KeptGroups(2, 3))
    scheduler = Scheduler(rules, 1)
    assert draw_all(scheduler) == list(range(8)) and scheduler.verdicts.unjudged == {0, 1, 2, 3}
    scheduler.verdicts.judged(1, "uniform")
    assert scheduler.verdicts.take_joined() == [
        GroupsJoined(1, 0, 2, 1),
        GroupsJoined(2, 2, 2, 2),
        GroupsJoined(1, 4, 1, BEYOND),
    ]
    assert draw_all(scheduler) == [8, 9] and not scheduler.is_complete(1)
    scheduler.verdicts.judged(0, "kept")
    scheduler.verdicts.judged(4, "uniform")
    assert take(scheduler, 1) == [0, 1] and scheduler.groups.dropped(1) == [4]
    assert scheduler.counts["groups_uniform"] == 2 and scheduler.groups.num_begun(1) == 3


BEYOND = 1 + SALT_STRIDE


def test_what_a_batch_does_not_need_serves_the_next():
    """By hand: three groups begin, one is kept. With 0 kept, 1 and 2 go to batch 2, judged or not, which then begins
    with one more. Would not catch groups that are too old: the runs above do.
    """
    rules = ScheduleConfig(3, 3, 1, sync_every=1, max_running=3, filtered=KeptGroups(1))
    scheduler = Scheduler(rules, 1)
    assert draw_all(scheduler) == [0, 1, 2]
    scheduler.verdicts.judged(0, "kept")
    assert scheduler.is_complete(1) and scheduler.groups.of(1) == [0] and scheduler.groups.of(2)[:2] == [1, 2]
    scheduler.verdicts.judged(1, "kept")
    assert scheduler.is_complete(2) is False and take(scheduler, 1) == [0]
    scheduler.verdicts.judged(2, "uniform")


def test_whole_batches_without_asynchrony():
    """By hand: a batch of generation of two groups after the other until two are kept, each with seeds of its own; the
    next batch continues with the next prompts. Would not catch the prompts: `test_samplers.py`.
    """
    scheduler = Scheduler(ScheduleConfig(4, 2, 0, slice_steps=None, group_size=2, filtered=KeptGroups(2, 20)), 1)
    assert draw_all(scheduler) == [0, 1, 2, 3]
    scheduler.verdicts.judged(0, "uniform")
    assert scheduler.next_order(0) is None
    scheduler.verdicts.judged(1, "kept")
    assert draw_all(scheduler) == [4, 5, 6, 7]
    scheduler.verdicts.judged(3, "kept")
    scheduler.verdicts.judged(2, "kept")
    assert [(one.first, one.salt) for one in scheduler.verdicts.take_joined()] == [(0, 1), (2, BEYOND)]
    assert take(scheduler, 1) == [1, 2] and scheduler.groups.dropped(1) == [0, 3]
    scheduler.version_ready(1)
    assert draw_all(scheduler) == [8, 9, 10, 11]


def test_replacing_groups_ahead_saves_a_quarter_of_a_step():
    """On a clock, where half of all groups are uniform. Would not catch what real replicas and the driver cost."""
    assert step_seconds(1, 0.5, 10) <= 0.75 * step_seconds(0, 0.5, 10)
