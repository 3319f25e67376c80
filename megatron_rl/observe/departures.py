"""Phases of a run that do not take what was planned: each is said once. Pure."""

from __future__ import annotations

from collections.abc import Mapping

WARM_UP = 1
"""Steps at the start that do not count: much is made and read for the first time in them."""
IN_A_ROW = 2
"""Steps in which a phase must depart one after the other: what else the machine does may delay one."""
LEAST_SHARE = 0.02
"""Of a step: shorter phases do not count."""


class Departures:
    """Hears the planned and the measured seconds of every step.

    error: the share of its plan by which a phase may differ from it.
    """

    def __init__(self, error: float) -> None:
        self._error = error
        self._num_steps = 0
        self._departed: dict[str, int] = {}
        self._said: set[str] = set()

    def note(self, planned: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
        """One step; a sentence for each phase of which there has been none and that departs now.

        A phase that was not measured does not count.
        """
        self._num_steps += 1
        if self._num_steps <= WARM_UP:
            return []
        step, found = sum(planned.values()), []
        for phase, seconds in planned.items():
            took = measured.get(phase)
            if took is None or max(took, seconds) < LEAST_SHARE * step:
                continue
            is_within = abs(took - seconds) <= self._error * seconds
            self._departed[phase] = 0 if is_within else self._departed.get(phase, 0) + 1
            if self._departed[phase] >= IN_A_ROW and phase not in self._said:
                self._said.add(phase)
                found.append(self._sentence(phase, seconds, took))
        return found

    def _sentence(self, phase: str, planned: float, took: float) -> str:
        times = f"{took / planned:.2f} times its plan" if planned else "and nothing was planned"
        return (
            f"{phase} departs from its plan: {planned:.3g} s planned, {took:.3g} s measured, {times}, where the "
            f"calibration's error is {self._error:.0%}"
        )
