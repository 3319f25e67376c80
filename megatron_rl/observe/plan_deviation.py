"""Warnings of phases whose seconds are not those of the plan, one per phase. Pure."""

from __future__ import annotations

from collections.abc import Mapping

WARM_UP = 1
"""Steps at the start that do not count: much is made and read for the first time in them."""
IN_A_ROW = 2
"""Consecutive steps in which a phase must depart: other work of the machine may delay a single one."""
LEAST_SHARE = 0.02
"""The share of a step from which a phase counts."""


class PlanDeviation:
    """Compares the planned and the measured seconds of every step.

    error: the share of its planned seconds by which a phase may differ from them.
    """

    def __init__(self, error: float) -> None:
        self._error = error
        self._num_steps = 0
        self._departed: dict[str, int] = {}
        self._warned: set[str] = set()

    def note(self, planned: Mapping[str, float], measured: Mapping[str, float]) -> list[str]:
        """Compare one step. Returns a sentence for each phase that departs and has not had one.

        A phase that was not measured does not count.
        """
        self._num_steps += 1
        if self._num_steps <= WARM_UP:
            return []
        step, warnings = sum(planned.values()), []
        for phase, seconds in planned.items():
            took = measured.get(phase)
            if took is None or max(took, seconds) < LEAST_SHARE * step:
                continue
            is_within = abs(took - seconds) <= self._error * seconds
            self._departed[phase] = 0 if is_within else self._departed.get(phase, 0) + 1
            if self._departed[phase] >= IN_A_ROW and phase not in self._warned:
                self._warned.add(phase)
                warnings.append(self._sentence(phase, seconds, took))
        return warnings

    def _sentence(self, phase: str, planned: float, took: float) -> str:
        times = f"{took / planned:.2f} times its plan" if planned else "and nothing was planned"
        return (
            f"{phase} departs from its plan: {planned:.3g} s planned, {took:.3g} s measured, {times}, where the "
            f"calibration's error is {self._error:.0%}"
        )
