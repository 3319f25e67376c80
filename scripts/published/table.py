"""The planner's clock against published points: calibrated numbers, errors after one scalar per cluster, ranks."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from published.points import Point, points

FIELDS = {
    "RL_SHARE": ("efficiency_share", 1e-3, 1.0),
    "DECODE_OVERHEAD": ("decode_overhead", 0.1, 0.0),
    "COLLECTIVE_LATENCY": ("collective_latency", 1e-3, 0.0),
}
"""Load -> its field, and the slowest and the fastest value."""
HARDWARE = ("matmul_efficiency", "expert_share")


def calibrated() -> dict[str, float]:
    """The numbers with which the points that set them have no error, by bisection; of a GPU's, "NAME GPU" for each."""
    found = {}
    for point in (point for point in points() if point.sets is not None):
        name = str(point.sets)
        if name in HARDWARE:

            def seconds(value: float, point: Point = point, name: str = name) -> float:
                return point.estimate(dataclasses.replace(point.hardware, **dict[str, Any]({name: value})))

            found[f"{name} {point.hardware.name}"] = _solve(seconds, point.published, 1e-3, 1.0)
        else:
            field, *bounds = FIELDS[name]

            def seconds_with(value: float, point: Point = point, field: str = field) -> float:
                return point.estimate(**dict[str, Any]({field: value}))

            found[name] = _solve(seconds_with, point.published, *bounds)
    return found


def _solve(seconds: Callable[[float], float], wanted: float, slowest: float, fastest: float) -> float:
    """Where a monotonic function takes the value `wanted`, between two arguments."""
    for _ in range(60):
        middle = (slowest + fastest) / 2
        slowest, fastest = (middle, fastest) if seconds(middle) > wanted else (slowest, middle)
    return (slowest + fastest) / 2


@dataclass(frozen=True)
class Judged:
    """A point, and the clock's number for it times its cluster's scalar: the median of published / estimate of all
    other points there. scalar: None if there is no other one.
    """

    point: Point
    estimate: float
    scalar: float | None

    @property
    def error(self) -> float:
        """Relative, as estimated: above 0 where the estimate is too slow."""
        return self.estimate / self.point.published - 1

    @property
    def scaled(self) -> float:
        """After the scalar."""
        return self.estimate * (1.0 if self.scalar is None else self.scalar)

    @property
    def scaled_error(self) -> float:
        return self.scaled / self.point.published - 1

    @property
    def counts(self) -> bool:
        """Return True for a point that tests the clock: it calibrates nothing, and is scaled by others, or a ratio."""
        return self.point.sets is None and (self.scalar is not None or self.point.against is not None)


def judged() -> list[Judged]:
    """All points. Ratios need no scalar."""
    estimates = {point: point.estimate() for point in points()}
    found = []
    for point, estimate in estimates.items():
        others = [
            other.published / seconds
            for other, seconds in estimates.items()
            if other is not point and other.cluster == point.cluster and other.against is None
        ]
        scalar = statistics.median(others) if others and point.against is None else None
        found.append(Judged(point, estimate, scalar))
    return found


def median_error(found: Iterable[Judged]) -> float:
    """Statistics of the absolute errors of the points that count, after their scalars."""
    return statistics.median(abs(one.scaled_error) for one in found if one.counts)


def kendall(pairs: Iterable[tuple[Judged, Judged]]) -> float:
    """Concordant less discordant pairs, over all; pairs that were published as equal are left out."""
    signs = [
        (a.point.published - b.point.published) * (a.scaled - b.scaled)
        for a, b in pairs
        if a.point.published != b.point.published
    ]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def rank_correlations(found: Sequence[Judged]) -> tuple[float, float]:
    """Kendall's tau of published seconds and scaled estimates: over all points, and over the pairs of one cluster."""
    seconds = [one for one in found if one.point.against is None]
    pairs = list(itertools.combinations(seconds, 2))
    return kendall(pairs), kendall((a, b) for a, b in pairs if a.point.cluster == b.point.cluster)


def markdown_table() -> str:
    """The table of docs/internals/planner_calibration.md."""
    found = judged()
    lines = ["| point | published | estimate | error | after scalar | sets | source |", "|---|---|---|---|---|---|---|"]
    for one in found:
        point, unit = one.point, "s" if one.point.against is None else "x"
        numbers = f"{point.published:.2f} {unit} | {one.estimate:.2f} {unit} | {one.error:+.0%}"
        after = "-" if one.scalar is None else f"{one.scaled_error:+.0%} ({one.scalar:.2f})"
        lines.append(f"| {point.name} | {numbers} | {after} | {point.sets or ''} | {point.source} |")
    counted = [one for one in found if one.counts]
    worst = max(counted, key=lambda one: abs(one.scaled_error))
    overall, inside = rank_correlations(found)
    inside_15 = sum(abs(one.scaled_error) <= 0.15 for one in counted)
    raw = statistics.median(abs(one.error) for one in counted)
    return "\n".join(
        [
            *lines,
            "",
            f"Of {len(counted)} points that set nothing: median error {median_error(found):.0%} after one scalar per "
            f"cluster, {raw:.0%} without; {inside_15} are within 15%; the worst is {worst.point.name} "
            f"({worst.scaled_error:+.0%}). Kendall's tau is {overall:.2f} over all pairs, and {inside:.2f} over pairs "
            "of one cluster.",
        ]
    )
