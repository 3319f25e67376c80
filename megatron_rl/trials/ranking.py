"""Predicted against measured step times: their order, their errors, and the cost of choosing by prediction. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from megatron_rl.trials import markdown
from megatron_rl.trials.result import ResultRow

LEAST = 3
"""An order of fewer points says nothing."""


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the opposite order, over the pairs that are not tied; 0 if
    all of either are equal (Kendall, Biometrika 33, 1945).
    """
    agreeing = tied_predicted = tied_measured = pairs = 0
    for (a, b), (c, d) in itertools.combinations(zip(predicted, measured, strict=True), 2):
        first, second = _sign(a - c), _sign(b - d)
        agreeing += first * second
        tied_predicted += first == 0
        tied_measured += second == 0
        pairs += 1
    size = (pairs - tied_predicted) * (pairs - tied_measured)
    return agreeing / math.sqrt(size) if size else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Predicted over measured seconds, less 1: below 0 where the prediction is too fast."""
    return [guess / seconds - 1 for guess, seconds in zip(predicted, measured, strict=True)]


def ranking_lines(rows: Sequence[ResultRow], chosen: str | None = None) -> list[str]:
    """A section of the report on the points that finished; empty if they are fewer than `LEAST`.

    chosen: the name of a point, such as the one that `map` offered; None: the point predicted to be the fastest. The
    regret says how much longer the chosen point takes than the best, as a share.
    """
    steps = {
        row.name: (row.planned.expected.step_s, row.result.step_s[0])
        for row in rows
        if row.result is not None and row.planned.expected is not None
    }
    if len(steps) < LEAST:
        return []
    predicted, measured = zip(*steps.values(), strict=True)
    errors = [abs(error) for error in relative_errors(predicted, measured)]
    choice = chosen if chosen in steps else min(steps, key=lambda name: steps[name][0])
    best = min(steps, key=lambda name: steps[name][1])
    chosen_s, best_s = steps[choice][1], steps[best][1]
    facts = [
        ("points", len(steps)),
        ("Kendall's tau", f"{kendall_tau(predicted, measured):.2f}"),
        ("median error", f"{statistics.median(errors):.0%}"),
        ("largest error", f"{max(errors):.0%}"),
        (f"chosen: {choice}", f"{chosen_s:.3g} s"),
        (f"best: {best}", f"{best_s:.3g} s"),
        ("regret", f"{chosen_s / best_s - 1:.0%}"),
    ]
    return ["", "## Predicted against measured", "", *markdown.table(("what", "value"), facts, rule="---:")]
