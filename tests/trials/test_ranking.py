"""Predicted against measured: the order, the error and the regret, by hand; rounds of a point as one record."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.trials.ablation_file import AblationConfig
from megatron_rl.trials.ablation_report import kendall_tau, ranking_lines, relative_errors
from megatron_rl.trials.points import Expected, GroupSizes, PlannedPoint, Point, points_of
from megatron_rl.trials.record import Record, together
from megatron_rl.trials.result import ResultRow, result_of
from megatron_rl.trials.trial_outcome import TrialOutcome

NUMBERS = st.lists(st.integers(0, 6), min_size=2, max_size=9)


def test_tau_by_hand():
    """Of 6 pairs 5 agree; a tie counts for neither; all equal says nothing. Would not catch long lists."""
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / (2 * 3) ** 0.5)
    assert kendall_tau([1, 1], [1, 2]) == 0.0


@given(NUMBERS, st.data())
def test_tau_of_turned_and_equal_orders(first, data):
    """1 with itself unless all are equal, the other sign where one is turned round, and the same for both ways to ask.
    Would not catch a wrong count of ties.
    """
    second = data.draw(st.lists(st.integers(0, 6), min_size=len(first), max_size=len(first)))
    tau = kendall_tau(first, second)
    assert -1 - 1e-9 <= tau <= 1 + 1e-9 and tau == pytest.approx(kendall_tau(second, first))
    assert kendall_tau([-number for number in first], second) == pytest.approx(-tau)
    assert kendall_tau(first, first) == pytest.approx(float(len(set(first)) > 1))


def test_errors_by_hand():
    """Too fast is below 0, too slow above. Would not catch an error against the slowest point."""
    errors = relative_errors((1.0, 2.0, 4.0), (1.25, 1.0, 5.0))
    assert errors == pytest.approx([-0.2, 1.0, -0.2])


def row(name: str, planned: float, measured: float | None) -> ResultRow:
    point = Point(name, name, {}, {})
    expected = Expected(planned, 1, 1, True)
    record = Record(name, name, TrialOutcome.FINISHED, steps={
        step: {"timing_s/step": measured or 0.0, "critic/score/mean": 0.0} for step in (1, 2)
    })  # fmt: skip
    result = None if measured is None else result_of(record, 4, 0)
    return ResultRow(
        PlannedPoint(point, "", [], GroupSizes(1, 1, 4, 1), expected), TrialOutcome.FINISHED, result=result
    )


def test_the_report_says_it():
    """Of the points that finished, for the point that was chosen; nothing of two. By hand: errors of -20%, 100% and
    -20%; the predicted best is the second best; 2 of 3 pairs agree. Would not catch a point that was not run.
    """
    rows = [row("a", 1.0, 1.25), row("b", 2.0, 1.0), row("c", 4.0, 5.0), row("d", 0.5, None)]
    text = "\n".join(ranking_lines(rows, "c"))
    assert "| largest error | 100% |" in text
    assert "| points | 3 |" in text and "| Kendall's tau | 0.33 |" in text and "| median error | 20% |" in text
    assert "| chosen: c | 5 s |" in text and "| best: b | 1 s |" in text and "| regret | 400% |" in text
    text = "\n".join(ranking_lines(rows))
    assert "| chosen: a | 1.25 s |" in text and "| regret | 25% |" in text
    assert ranking_lines(rows[:2]) == []


def record(*seconds: float, outcome: TrialOutcome = TrialOutcome.FINISHED, key: str = "k") -> Record:
    return Record("a", key, outcome, steps={step: {"timing_s/step": value} for step, value in enumerate(seconds, 1)})


def test_all_rounds_count_together():
    """Without steps that warm up, of any round; not one that failed, or of other settings; a first one that failed
    stands for the point. Would not catch a round that ran on another machine.
    """
    crashed, other = record(1.0, 1.0, outcome=TrialOutcome.CRASHED), record(1.0, 0.5, key="other")
    slow, fast = record(0.1, 3.0, 2.0, 9.0), record(8.0, 1.0, 4.0, 2.5)
    found = together([slow, None, crashed, fast, other], 1)
    assert found.steps == slow.steps and [step["timing_s/step"] for step in found.further] == [1.0, 4.0, 2.5]
    scored = replace(found, steps={step: one | {"critic/score/mean": 0.5} for step, one in found.steps.items()})
    result = result_of(scored, 4, 1)
    assert result.step_s == (2.75, 1.0, 9.0) and result.num_steps == 6 and result.scores == (0.5,) * 4
    assert together([None, slow], 0) is None and together([crashed, slow], 0) is crashed
    assert together([slow], 0) == slow


def test_a_chosen_point_must_be_there():
    """Refused with the nearest. Would not catch a name that is there twice."""
    from megatron_rl.errors import ConfigError

    points = [{"name": "map", "trainer.seed": 1}, {"name": "random-1", "trainer.seed": 2}]
    ablation = AblationConfig("unused", points=points, chosen="map")
    assert [point.name for point in points_of(ablation, {})] == ["map", "random-1"]
    with pytest.raises(ConfigError, match="chosen=maps must be the name of a point; did you mean: map"):
        points_of(AblationConfig("unused", points=points, chosen="maps"), {})
