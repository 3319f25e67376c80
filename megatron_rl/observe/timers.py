"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the wall-clock seconds of named phases; phases may nest, and an outer one includes its inner ones."""

    def __init__(self, on_phase: Callable[[str], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        """`on_phase` hears the name of the current phase whenever it changes, "" between phases."""
        self._on_phase = on_phase
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`, also when it raises."""
        with self.announced(name):
            started = self._clock()
            try:
                yield
            finally:
                self.add(name, self._clock() - started)

    @contextmanager
    def announced(self, name: str) -> Iterator[None]:
        """Make `name` the current phase of the body; its seconds are somebody else's to `add`."""
        self._open.append(name)
        self._announce()
        try:
            yield
        finally:
            self._open.pop()
            self._announce()

    def add(self, name: str, seconds: float) -> None:
        """Add to the seconds of a phase."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def as_metrics(self) -> dict[str, float]:
        """Seconds per finished phase since the last `reset`, as `timing_s/<name>`."""
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}

    def reset(self) -> None:
        """Forget all seconds; call it once a step."""
        self._seconds.clear()

    def _announce(self) -> None:
        if self._on_phase is not None:
            self._on_phase(self._open[-1] if self._open else "")
