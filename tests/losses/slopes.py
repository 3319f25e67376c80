"""Gradients of functions of Python floats by central differences, for tests of losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def slopes(function: Callable[[list[float]], float], at: Sequence[float], step: float = 1e-6) -> list[float]:
    found = []
    for place in range(len(at)):
        up, down = list(at), list(at)
        up[place] += step
        down[place] -= step
        found.append((function(up) - function(down)) / (2 * step))
    return found
