"""Where the seconds of a step go: verbs by the clocks of the ranks that ran them, the rest by the driver's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_rl.observe.timers import PhaseTimer

KEPT_STEPS = 3
"""Steps whose intervals are kept for the timeline."""


@dataclass(frozen=True)
class Ran:
    """Something that ran in a lane, in seconds since the epoch; a lane is a pool, or the driver."""

    lane: str
    name: str
    start: float
    stop: float


class Clock:
    """Adds up seconds by phase, and keeps the intervals of the last steps.

    `on_phase` hears the name of what is waited for or done now, "" between phases.
    """

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._announced = PhaseTimer(on_phase=on_phase)
        self._seconds: dict[str, float] = {}
        self._step_started = time.perf_counter()
        self._steps: deque[list[Ran]] = deque(maxlen=KEPT_STEPS)
        self._is_in_step = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what the driver itself does under `name`, also when it raises."""
        start, wall = time.perf_counter(), time.time()
        try:
            with self._announced.phase(name):
                yield
        finally:
            self._add(name, time.perf_counter() - start)
            self._keep(Ran("driver", name, wall, time.time()))

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Say what is waited for; its seconds come from the ranks."""
        with self._announced.phase(phase):
            yield

    def ran(self, pool: str, phase: str, start: float, stop: float, seconds: float) -> None:
        """A verb has run in a pool. Verbs without a phase belong to no step's seconds."""
        if phase:
            self._add(phase, seconds)
            self._keep(Ran(pool, phase, start, stop))

    def begin_step(self) -> None:
        """Forget all seconds: a step begins now."""
        self._seconds.clear()
        self._step_started = time.perf_counter()
        self._steps.append([])
        self._is_in_step = True

    def take(self, *phases: str) -> dict[str, float]:
        """`timing_s/<phase>` since the last call, which are forgotten; only `phases` where some are given."""
        taken, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": taken[name] for name in phases or taken}

    def take_step(self) -> dict[str, float]:
        """The same, with the step itself, from `begin_step` until now."""
        self._is_in_step = False
        return self.take() | {"timing_s/step": time.perf_counter() - self._step_started}

    @property
    def recent(self) -> list[Ran]:
        """What ran in the last steps, in the order in which it was heard of."""
        return [one for step in self._steps for one in step]

    def _keep(self, ran: Ran) -> None:
        if self._is_in_step:
            self._steps[-1].append(ran)

    def _add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
