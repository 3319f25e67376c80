"""Seconds per phase, on a clock that the tests move."""

import pytest

from megatron_rl.observe.timers import PhaseTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_phases_add_up_nest_and_reset():
    """Inner time counts for the outer phase too. Would not catch device work that is still queued."""
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.phase("step"):
        with timer.phase("gen"):
            clock.now += 2.0
        clock.now += 0.5
        with timer.phase("gen"):
            clock.now += 1.0
    assert timer.as_metrics() == {"timing_s/step": 3.5, "timing_s/gen": 3.0}
    timer.reset()
    assert timer.as_metrics() == {}


def test_current_phase_is_announced_also_after_an_error():
    """The outer phase returns when the inner one fails. Would not catch a callback that is slow."""
    heard, clock = [], Clock()
    timer = PhaseTimer(on_phase=heard.append, clock=clock)
    with pytest.raises(ValueError, match="stop"), timer.phase("step"), timer.phase("gen"):
        clock.now += 4.0
        raise ValueError("stop")
    assert heard == ["step", "gen", "step", ""]
    assert timer.as_metrics() == {"timing_s/step": 4.0, "timing_s/gen": 4.0}
