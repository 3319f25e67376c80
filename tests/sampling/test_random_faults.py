"""Whole simulated runs in all modes, with failures, saves and stragglers at random."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scenes import Scene, check, check_batches, random_scene

from megatron_rl.sampling.journal import Journal, Recorder, read_events
from megatron_rl.sampling.replay import Replay, ReplayError
from megatron_rl.sampling.scheduler import Scheduler
from megatron_rl.sampling.simulate import Failure, SimulatedRun, Simulation, StuckError, simulate

seeds = st.integers(0, 2**32)


def run(scene: Scene, seed: int = 0, **more: object) -> SimulatedRun:
    decider = Scheduler(scene.rules, scene.num_replicas)
    return simulate(decider, scene.rules, scene.num_replicas, scene.lengths, scene.costs(seed), **more)


@settings(max_examples=1000, deadline=None)
@given(seeds)
@example(1474)  # two requests of a group begin under different versions, the earlier one last
def test_every_run_ends_with_every_request_trained_once(seed):
    """With up to six losses: no hang, nothing lost or drawn twice, no token older than the bound, and one version per
    answer where rollouts are not partial. Would not catch an executor that acts otherwise than the simulator.
    """
    scene = random_scene(seed)
    check(scene, run(scene, failures=scene.failures(0), saves=scene.saves()))


@settings(max_examples=1000, deadline=None)
@given(seeds)
def test_every_episode_of_several_turns_ends_once(seed):
    """As above, and every turn leaves its engine until its answer comes, also when its replica has died meanwhile.
    Would not catch an answer that never comes: time-outs of environments are for that.
    """
    scene = random_scene(seed, has_turns=True)
    check(scene, run(scene, failures=scene.failures(0), saves=scene.saves(), turns=scene.turns(0)))


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(3000)
def test_many_more_runs(tmp_path):
    """4,000 runs like those above, each also repeated from its journal. Would not catch what neither would."""
    for seed in range(4_000):
        check_replay(random_scene(seed, has_turns=seed % 2 == 0), tmp_path / "schedule.jsonl")


def orders_of(outcome: SimulatedRun) -> dict[int, list[tuple[object, int]]]:
    return {replica: orders for replica, orders in outcome.orders.items() if orders}


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_deterministic_orders_do_not_depend_on_time(seed):
    """Other speeds of engines, trainer and transfers, so another arrival of all facts: the same orders, per replica.
    Would not catch a dependence on the order in which an executor asks replicas, which always is theirs.
    """
    scene = random_scene(seed, deterministic=True)
    first, second = (run(scene, costs, saves=scene.saves()) for costs in (1, 2))
    assert orders_of(first) == orders_of(second) and first.answers == second.answers
    check(scene, first)
    scene = random_scene(seed, deterministic=True, has_turns=True, awaits_turns=True)
    first, second = (run(scene, costs, saves=scene.saves(), turns=scene.turns(costs)) for costs in (1, 2))
    assert orders_of(first) == orders_of(second) and first.answers == second.answers
    check(scene, first)


def test_free_orders_do_depend_on_time():
    """The comparison above can fail. Would not catch one that is too weak in detail."""
    scenes = [
        random_scene(seed, deterministic=False, colocated=False, ahead=3, num_steps_total=5) for seed in range(20)
    ]
    assert any(orders_of(run(scene, 1)) != orders_of(run(scene, 2)) for scene in scenes)


class StopsAtSave(Scheduler):
    """Ends the run, by an exception, at the save after a step; `state` is what that checkpoint holds."""

    stop_at = 0
    state = ""

    def state_dict(self):
        self.state = json.dumps(super().state_dict())
        return json.loads(self.state)

    def saved(self, step):
        if step == self.stop_at:
            raise InterruptedError
        super().saved(step)


def resume(scene: Scene, before: Simulation, state: str, step: int) -> Simulation:
    """A new process after `step`: new engines, with the tokens, attempts and answers that the owner had saved. Turns
    that wait for their answer are played again.
    """
    rules, turns = replace(scene.rules, first_step=step + 1), scene.turns(9) if scene.rules.has_turns else None
    decider = Scheduler(rules, scene.num_replicas, json.loads(state))
    after = Simulation(decider, rules, scene.num_replicas, scene.lengths, scene.costs(9), scene.saves(), turns)
    for request in json.loads(state)["away"]:
        after.leave(request)
    after.tokens = {request: list(runs) for request, runs in before.tokens.items()}
    after.attempts = before.attempts.copy()
    after.outcome.answers = dict(before.outcome.answers)
    after.run([])
    return after


@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans())
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(seed, has_turns):
    """Stopped at a random checkpoint. Deterministic: the same answers token run by token run, and the same slices.
    Otherwise: everything is still drawn once and not too old. Would not catch a difference inside an engine.
    """
    scene = random_scene(seed, num_steps_total=5, has_turns=has_turns)
    turns = scene.turns(1) if has_turns else None
    saves = sorted(scene.saves())
    if not saves:
        return
    scheduler = StopsAtSave(scene.rules, scene.num_replicas)
    scheduler.stop_at = random.Random(seed).choice(saves)
    before = Simulation(scheduler, scene.rules, scene.num_replicas, scene.lengths, scene.costs(1), saves, turns)
    with pytest.raises(InterruptedError):
        before.run([])
    after = resume(scene, before, scheduler.state, scheduler.stop_at)
    check_answers(scene, after.outcome)
    if scene.rules.in_rounds and (scene.rules.awaits_turns or not has_turns):
        whole = run(scene, 2, saves=saves, turns=turns)
        assert after.outcome.answers == whole.answers
        for replica, orders in after.outcome.orders.items():
            tail = [(replace(order, drops=()), steps) for order, steps in whole.orders[replica]]
            found = [(replace(order, drops=()), steps) for order, steps in orders]
            assert found == tail[len(tail) - len(found) :]


def check_answers(scene: Scene, outcome: SimulatedRun) -> None:
    """What `check` says of answers, for a run of which only the second half is known."""
    rules = scene.rules
    assert sorted(outcome.answers) == list(range(rules.num_steps_total * rules.batch_rows))
    check_batches(rules, outcome)
    for request, runs in outcome.answers.items():
        assert rules.partial or len({version for version, _ in runs}) == 1
        if rules.straggler_policy == "wait":
            assert sum(num for _, num in runs) == scene.lengths(request, 0)


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(0, 60), st.integers(1, 5), st.booleans())
def test_a_run_may_be_stopped_at_any_moment(seed, num_events, num_replicas, has_turns):
    """Stopped with orders outstanding, and resumed with another number of replicas: what was drawn in them is drawn
    again, the rest goes on. Would not catch equality with an uninterrupted run, which nobody promises here.
    """
    scene = random_scene(seed, has_turns=has_turns)
    turns = scene.turns(1) if has_turns else None
    scheduler = Scheduler(scene.rules, scene.num_replicas)
    before = Simulation(scheduler, scene.rules, scene.num_replicas, scene.lengths, scene.costs(1), (), turns)
    for _ in range(num_events):
        if before.phase == "over":
            return
        before.advance()
    before.act_on_decisions()
    state, step = json.dumps(scheduler.state_dict()), before.step
    if step < scene.rules.num_steps_total:
        after = resume(replace(scene, num_replicas=num_replicas), before, state, step)
        check_answers(scene, after.outcome)


def check_replay(scene: Scene, file) -> None:
    """A recorded run, and its replay at other speeds and without failures."""
    journal = Journal(file)
    decider = Recorder(Scheduler(scene.rules, scene.num_replicas), journal)
    args = (scene.rules, scene.num_replicas, scene.lengths)
    turns = scene.turns if scene.rules.has_turns else lambda seed: None
    faults = {"failures": scene.failures(0), "saves": scene.saves()}
    first = simulate(decider, *args, scene.costs(1), **faults, turns=turns(1))
    journal.close()
    check(scene, first)
    events = read_events(file)
    assert len(events) == journal.num_lines
    second = simulate(Replay(scene.rules, scene.num_replicas, events), *args, scene.costs(2), turns=turns(2))
    assert second.answers == first.answers and second.staleness == first.staleness
    for replica, orders in first.orders.items():
        repeated = [(order, steps) for order, steps in second.orders[replica] if order.num_steps]
        assert [(o.version, o.starts, n) for o, n in repeated] == [(o.version, o.starts, n) for o, n in orders]
        assert all(
            set(again.drops) >= set(order.drops) for (again, _), (order, _) in zip(repeated, orders, strict=True)
        )


@settings(max_examples=150, deadline=None)
@given(seeds, st.booleans())
def test_a_replay_repeats_a_run_with_losses(tmp_path_factory, seed, has_turns):
    """At other speeds, on replicas that do not die. Would not catch an engine whose bits depend on what it dropped."""
    scene = random_scene(seed, has_turns=has_turns)
    check_replay(scene, tmp_path_factory.getbasetemp() / "schedule.jsonl")


def test_a_replay_of_other_lengths_says_where_they_differ(tmp_path):
    """By one token. Would not catch the same number of tokens with other values: the executor compares those."""
    scene = random_scene(
        3, deterministic=False, colocated=False, ahead=2, num_steps_total=3, straggler_policy="wait", slice_steps=2
    )
    journal = Journal(tmp_path / "schedule.jsonl")
    args = (scene.rules, scene.num_replicas)
    simulate(Recorder(Scheduler(*args), journal), *args, scene.lengths, scene.costs(1))
    journal.close()
    events = read_events(journal_file := tmp_path / "schedule.jsonl")
    assert journal_file.read_text().count("\n") == journal.num_lines
    with pytest.raises(ReplayError, match=r"slice \d+ of replica \d, version \d: recorded were"):
        simulate(Replay(*args, events), *args, lambda q, a: scene.lengths(q, a) + (q == 1), scene.costs(1))
    with pytest.raises(ReplayError, match="ends before batch"):
        simulate(Replay(*args, events[: len(events) // 2]), *args, scene.lengths, scene.costs(1))


def test_a_run_without_replicas_says_that_it_is_stuck():
    """All die for ever. Would not catch a real executor's hang."""
    scene = random_scene(1, num_steps_total=5)
    failures = [Failure(replica, 0.001, None) for replica in range(scene.num_replicas)]
    with pytest.raises(StuckError, match="after step 0"):
        run(scene, failures=failures)
