"""Where the seconds of a step go: methods by the clocks of the ranks that ran them, the rest by the driver's."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.observe.appended_file import replace_file

DRIVER = "driver"
"""The lane of what the driver itself does."""

TIMELINE_FILE = "timeline.json"
KEPT_STEPS = 3
"""Steps whose intervals are kept for the timeline."""


@dataclass(frozen=True)
class PhaseRun:
    """One interval of a phase, in seconds since the epoch. lane: the pool that ran it, or DRIVER."""

    lane: str
    name: str
    start: float
    stop: float


class PhaseClock:
    """Adds up the wall-clock seconds of named phases, and keeps the intervals of the last steps.

    Phases may nest; an outer one includes its inner ones. `on_phase` is called with the name of the current phase
    whenever it changes, "" between phases. clock: seconds, from any beginning.
    """

    def __init__(self, on_phase: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_phase, self._clock = on_phase, clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._step_started = clock()
        self._steps: deque[list[PhaseRun]] = deque(maxlen=KEPT_STEPS)
        self._is_in_step = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what the driver itself does under `name`, also when it raises."""
        start, started = time.time(), self._clock()
        with self.waiting(name):
            try:
                yield
            finally:
                self._add(PhaseRun(DRIVER, name, start, time.time()), self._clock() - started)

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Make `phase` the current phase of the body; its seconds come from the ranks, by `ran`."""
        self._open.append(phase)
        self._on_phase(phase)
        try:
            yield
        finally:
            self._open.pop()
            self._on_phase(self._open[-1] if self._open else "")

    def ran(self, pool: str, phase: str, start: float, stop: float, seconds: float) -> None:
        """A method has run in a pool. Methods without a phase belong to no step's seconds."""
        if phase:
            self._add(PhaseRun(pool, phase, start, stop), seconds)

    def begin_step(self) -> None:
        """Forget all seconds: a step begins."""
        self._seconds.clear()
        self._step_started = self._clock()
        self._steps.append([])
        self._is_in_step = True

    def take(self, *phases: str) -> dict[str, float]:
        """Return `timing_s/<phase>` since the last call, and forget all; only `phases` where some are given."""
        taken = {name: self._seconds[name] for name in phases or self._seconds}
        self._seconds.clear()
        return {f"timing_s/{name}": seconds for name, seconds in taken.items()}

    def take_step(self) -> dict[str, float]:
        """End the step: return what `take` does, and the step's own seconds since `begin_step`."""
        self._is_in_step = False
        return self.take() | {"timing_s/step": self._clock() - self._step_started}

    @property
    def open_phases(self) -> tuple[str, ...]:
        """The phases that are open now, the outermost first."""
        return tuple(self._open)

    @property
    def recent(self) -> list[PhaseRun]:
        """The intervals of the last steps, in the order in which they ended."""
        return [interval for step in self._steps for interval in step]

    def _add(self, interval: PhaseRun, seconds: float) -> None:
        self._seconds[interval.name] = self._seconds.get(interval.name, 0.0) + seconds
        if self._is_in_step:
            self._steps[-1].append(interval)


def write_calls(calls: Sequence[PhaseRun], file: Path) -> None:
    """Write intervals as JSON, one a line, in place of an earlier file. Raises OSError."""
    lines = ",\n".join(json.dumps(asdict(call)) for call in calls)
    replace_file(file, f"[\n{lines}\n]\n".encode())
