"""Where the seconds of a step go: methods by the clocks of the ranks that ran them, the rest by the driver's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from megatron_rl.observe.timers import PhaseTimer

DRIVER = "driver"
"""The lane of what the driver itself does."""

KEPT_STEPS = 3
"""Steps whose intervals are kept for the timeline."""


@dataclass(frozen=True)
class PhaseRun:
    """Something that ran in a lane, in seconds since the epoch; a lane is a pool, or the driver."""

    lane: str
    name: str
    start: float
    stop: float


class PhaseClock:
    """Adds up seconds by phase, and keeps the intervals of the last steps.

    `on_phase` hears the name of what is waited for or done now, "" between phases.
    """

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._timer = PhaseTimer(on_phase=on_phase)
        self._step_started = time.perf_counter()
        self._steps: deque[list[PhaseRun]] = deque(maxlen=KEPT_STEPS)
        self._is_in_step = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what the driver itself does under `name`, also when it raises."""
        start = time.time()
        try:
            with self._timer.phase(name):
                yield
        finally:
            self._keep(PhaseRun(DRIVER, name, start, time.time()))

    def waiting(self, phase: str) -> AbstractContextManager[None]:
        """Say what is waited for; its seconds come from the ranks."""
        return self._timer.announced(phase)

    def ran(self, pool: str, phase: str, start: float, stop: float, seconds: float) -> None:
        """A method has run in a pool. Methods without a phase belong to no step's seconds."""
        if phase:
            self._timer.add(phase, seconds)
            self._keep(PhaseRun(pool, phase, start, stop))

    def begin_step(self) -> None:
        """Forget all seconds: a step begins now."""
        self._timer.reset()
        self._step_started = time.perf_counter()
        self._steps.append([])
        self._is_in_step = True

    def take(self, *phases: str) -> dict[str, float]:
        """`timing_s/<phase>` since the last call, which are forgotten; only `phases` where some are given."""
        taken = self._timer.as_metrics()
        self._timer.reset()
        return {name: taken[name] for name in [f"timing_s/{phase}" for phase in phases] or taken}

    def take_step(self) -> dict[str, float]:
        """The same, with the step itself, from `begin_step` until now."""
        self._is_in_step = False
        return self.take() | {"timing_s/step": time.perf_counter() - self._step_started}

    @property
    def recent(self) -> list[PhaseRun]:
        """What ran in the last steps, in the order in which it was heard of."""
        return [one for step in self._steps for one in step]

    def _keep(self, ran: PhaseRun) -> None:
        if self._is_in_step:
            self._steps[-1].append(ran)
