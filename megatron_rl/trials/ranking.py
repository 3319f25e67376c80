"""Predicted against measured: in which order, by how much, and what choosing by the prediction costs. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.trials import markdown
from megatron_rl.trials.result import ResultRow

LEAST = 3
"""Points below which an order says nothing."""


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less those in the other one, over the pairs that are not tied; 0 where
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


@dataclass(frozen=True)
class TrialRanking:
    """names: of points that finished. Seconds of a step."""

    names: tuple[str, ...]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Of all pairs of points."""
        return kendall_tau(self.predicted, self.measured)

    @property
    def errors(self) -> list[float]:
        """The prediction over what was measured, less 1."""
        return [guess / seconds - 1 for guess, seconds in zip(self.predicted, self.measured, strict=True)]

    @property
    def median_error(self) -> float:
        """Of their sizes."""
        return statistics.median(map(abs, self.errors))

    @property
    def chosen(self) -> int:
        """The point that is predicted to be the fastest."""
        return self.predicted.index(min(self.predicted))

    @property
    def best(self) -> int:
        """The point that is."""
        return self.measured.index(min(self.measured))

    @property
    def regret(self) -> float:
        """How much longer the chosen point takes than the best, as a share."""
        return self.measured[self.chosen] / self.measured[self.best] - 1


def ranking_of(rows: Sequence[ResultRow]) -> TrialRanking | None:
    """Of the points that finished; None where they are too few."""
    found = [
        (row.name, row.planned.expected.step_s, row.result.step_s[0])
        for row in rows
        if row.result is not None and row.planned.expected is not None
    ]
    if len(found) < LEAST:
        return None
    names, predicted, measured = zip(*found, strict=True)
    return TrialRanking(names, predicted, measured)


def ranking_lines(rows: Sequence[ResultRow], chosen: str | None = None) -> list[str]:
    """A section of the report; empty where too few points have finished. chosen: a point by its name, such as the one
    that `map` offered; None: the one predicted to be the fastest.
    """
    found = ranking_of(rows)
    if found is None:
        return []
    number = found.names.index(chosen) if chosen in found.names else found.chosen
    regret = found.measured[number] / found.measured[found.best] - 1
    lines = ["", "## Predicted against measured", ""]
    lines += markdown.table("what", "value", rule="---:")
    lines += [
        markdown.row("points", str(len(found.names))),
        markdown.row("Kendall's tau", f"{found.tau:.2f}"),
        markdown.row("median error", f"{found.median_error:.0%}"),
        markdown.row("largest error", f"{max(map(abs, found.errors)):.0%}"),
        markdown.row(f"chosen: {found.names[number]}", f"{found.measured[number]:.3g} s"),
        markdown.row(f"best: {found.names[found.best]}", f"{found.measured[found.best]:.3g} s"),
        markdown.row("regret", f"{regret:.0%}"),
    ]
    return lines
