"""What is said of a phase that takes long, on a clock that the tests move."""

from __future__ import annotations

import threading

from megatron_rl.agents.episode import Episode
from megatron_rl.observe import phase_watch
from megatron_rl.observe.phase_watch import PhaseWatch
from megatron_rl.records import Sampling
from megatron_rl.sampling.sampler import Awaited


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def watched() -> tuple[PhaseWatch, Clock]:
    clock = Clock()
    return PhaseWatch(None, 20, clock), clock


def test_a_phase_is_named_after_a_minute_and_then_each_minute():
    """With all that is known, by hand. Would not catch facts that take long to collect."""
    watch, clock = watched()
    watch.ask(lambda phase: [f"37 of 64 responses ({phase})"])
    watch.step, watch.planned = 3, {"gen": 130.0}
    watch.phases(["gen"])
    clock.now += 59.9
    assert watch.look() is None
    clock.now += 2.1
    assert watch.look() == "step 3/20, generation: 62 s so far; 37 of 64 responses (gen); 2 min planned"
    assert watch.look() is None
    clock.now += 60.0
    assert watch.look() == "step 3/20, generation: 2 min so far; 37 of 64 responses (gen); 2 min planned"
    watch.phases([])
    clock.now += 300.0
    assert watch.look() is None


def test_a_phase_begins_anew_after_a_pause_and_remembers_the_last_one():
    """Calls that follow one another at once are one phase; the next step's is another one. Would not catch two phases
    of one name that are open side by side.
    """
    watch, clock = watched()
    for _ in range(4):  # four mini-batches of 20 s
        watch.phases(["update_actor"])
        clock.now += 20.0
        watch.phases([])
    watch.phases(["update_actor"])
    watch.note = "mini-batch 5 of 8"
    assert watch.look() == "update of the actor: 80 s so far; mini-batch 5 of 8"
    watch.note = ""
    watch.phases([])
    watch.phases(["testing"])
    watch.phases(["testing", "gen"])
    clock.now += 61.0
    assert watch.look() == "validation, generation: 61 s so far"
    watch.phases([])
    watch.phases(["update_actor"])
    clock.now += 61.0
    assert watch.look() == "update of the actor: 61 s so far; 80 s the last time"
    watch.phases([])
    clock.now += 5.0
    watch.phases(["update_actor"])
    clock.now += 61.0
    assert watch.look() == "update of the actor: 61 s so far; 61 s the last time"


def test_the_thread_says_it(monkeypatch):
    """A phase that is long at once. Would not catch a thread that looks too often."""
    monkeypatch.setattr(phase_watch, "FIRST_S", 0.0)
    monkeypatch.setattr(phase_watch, "LOOK_S", 0.001)
    said, heard = [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    with PhaseWatch(say) as watch:
        watch.phases(["my phase"])
        assert heard.wait(60)
    assert said == ["my phase: 0 s so far"] and not watch._thread.is_alive()


def test_responses_that_are_waited_for_are_counted():
    """Three of an agent, one ended and one at its environment; of one round only the engines know. Would not catch a
    number that changes while it is read.
    """
    sampling = Sampling(1.0, 1.0, -1, 8, 0)
    ended, away, drawn = (Episode((1,), {}, sampling) for _ in range(3))
    ended.finish, away.waits = "stop", True
    awaited, one_round = Awaited(in_rounds=True), Awaited(in_rounds=False)
    with awaited.waiting([ended, away, drawn]), one_round.waiting([ended]):
        assert awaited.progress() == ["1 of 3 responses complete", "1 wait for their environment"]
        assert one_round.progress() == []
    assert awaited.progress() == []
