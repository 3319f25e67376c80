"""The warning of a run whose asynchronous rollout is not faster."""

from __future__ import annotations

import pytest

from megatron_rl.sampling.async_metrics import WINDOW, SpeedWarning, what_to_change


@pytest.mark.parametrize(
    ("trainer", "rollout", "expected"),
    [
        (0.30, 0.50, None),
        (
            0.31,
            0.10,
            "training waited for responses 31% of the time, and rollout replicas idled 10%: give the rollout more",
        ),
        (0.05, 0.51, "rollout replicas idled 51%: give training more of the ranks"),
        (0.40, 0.40, "both wait for the longest responses; raise trainer.rollout_ahead=2"),
    ],
)
def test_which_side_waits(trainer, rollout, expected):
    """At the limits and beyond, by hand. Would not catch shares that were measured wrongly."""
    advice = what_to_change([trainer] * 4, [rollout] * 4, 2)
    assert advice is None if expected is None else expected in advice


def test_it_warns_once_about_the_last_steps():
    """The first step, which always waits, is left out; ten more are needed; a mean of 0.35 over the last ten is warned
    of once. Would not catch a second run in the same process.
    """
    warning = SpeedWarning(1)
    assert warning.note(1.0, 0.0) is None
    warnings = [warning.note(0.0 if step < 20 else 0.35, 0.1) for step in range(40)]
    first = next(step for step, text in enumerate(warnings) if text)
    assert sum(text is not None for text in warnings) == 1
    assert first == 20 + 8  # 9 of the last 10 steps waited 0.35: 0.315
    assert f"in the last {WINDOW} steps training waited for responses 32% of the time" in warnings[first]
