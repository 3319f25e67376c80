"""Phases that depart from their plan, by hand."""

from __future__ import annotations

from megatron_rl.planning.planned_steps import PlanDeviation

PLANNED = {"gen": 10.0, "ref": 2.0, "reshard": 0.1}
GOOD = {"gen": 11.9, "ref": 1.7, "reshard": 0.2}


def test_a_phase_that_departs_is_said_once():
    """Twice in a row, after a first step that does not count; too quick counts as too slow. Would not catch a phase
    that departs further later.
    """
    departures = PlanDeviation(0.2)
    slow = GOOD | {"gen": 12.1}
    assert departures.note(PLANNED, slow | {"ref": 9.0}) == []
    assert departures.note(PLANNED, slow) == []
    (said,) = departures.note(PLANNED, slow)
    assert said == (
        "gen departs from its plan: 10 s planned, 12.1 s measured, 1.21 times its plan, where the calibration's error "
        "is 20%"
    )
    quick = {"gen": 12.1, "ref": 1.5}
    assert departures.note(PLANNED, quick) == []
    assert [text[:4] for text in departures.note(PLANNED, quick)] == ["ref "]
    assert departures.note(PLANNED, quick) == []


def test_a_hiccup_and_a_short_phase_are_not_said():
    """One step of two, a phase of less than a fiftieth of the step, and one that was not measured. Would not catch a
    phase that departs in every other step.
    """
    departures = PlanDeviation(0.2)
    for number in range(6):
        assert departures.note(PLANNED, GOOD | ({"gen": 30.0} if number % 2 else {})) == []
    assert PlanDeviation(0.2).note({"new": 0.0}, {}) == []
