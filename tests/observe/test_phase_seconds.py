"""Seconds per phase, on a clock that the tests move."""

from dataclasses import asdict

import pytest

from megatron_rl.observe.phase_clock import DRIVER, PhaseClock, PhaseRun


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_add_up_nest_and_reset():
    """Inner time counts for the outer phase too. Would not catch device work that is still queued."""
    clock = Clock()
    timer = PhaseClock(lambda phase: None, clock)
    with timer.phase("step"):
        with timer.phase("gen"):
            clock.now += 2.0
        clock.now += 0.5
        with timer.phase("gen"):
            clock.now += 1.0
    assert timer.take() == {"timing_s/step": 3.5, "timing_s/gen": 3.0}
    assert timer.take() == {}


def test_current_phase_is_announced_also_after_an_error():
    """The outer phase returns when the inner one fails. Would not catch a callback that is slow."""
    heard, clock = [], Clock()
    timer = PhaseClock(heard.append, clock)
    with pytest.raises(ValueError, match="stop"), timer.phase("step"), timer.phase("gen"):
        clock.now += 4.0
        raise ValueError("stop")
    assert heard == ["step", "gen", "step", ""]
    assert timer.take() == {"timing_s/step": 4.0, "timing_s/gen": 4.0}


def test_a_step_has_its_own_seconds_and_those_of_pools():
    """A pool's method for 2 of a step's 3 seconds; what runs before a step is in no timeline. Would not catch a pool
    whose clock differs.
    """
    clock = Clock()
    timer = PhaseClock(lambda phase: None, clock)
    timer.ran("global_pool", "gen", 1.0, 9.0, 8.0)
    timer.begin_step()
    with timer.waiting("gen"):
        clock.now += 3.0
    timer.ran("global_pool", "gen", 10.0, 12.5, 2.0)
    timer.ran("global_pool", "", 12.5, 12.6, 0.1)
    assert timer.take_step() == {"timing_s/gen": 2.0, "timing_s/step": 3.0}
    assert timer.recent == [PhaseRun("global_pool", "gen", 10.0, 12.5)]
    assert [*asdict(timer.recent[0])] == ["lane", "name", "start", "stop"]  # the keys of timeline.json
    with timer.phase("testing"):
        clock.now += 1.0
    assert timer.take("testing") == {"timing_s/testing": 1.0}
    assert DRIVER not in {interval.lane for interval in timer.recent}
