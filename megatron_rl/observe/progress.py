"""The progress bar at the bottom of a terminal: steps done, the newest numbers, the current phase and its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megatron_rl.observe.terminal import Terminal

LONG = 2.0
"""Seconds after which a phase is a wait, such as for weights that are read, and shows how long it has taken."""


class PhaseColumn(ProgressColumn):
    """The current phase, with its seconds and progress once it is `LONG`; what comes before the first one and after the
    last step has names, too. progress: returns what is known about it. clock: seconds, from any beginning.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, progress: Callable[[], Sequence[str]] = list
    ) -> None:
        super().__init__()
        self._progress = progress
        self._clock = clock
        self._began = clock()
        self._between = "starting"

    def begin(self) -> None:
        """A phase begins or ends."""
        self._began = self._clock()
        self._between = ""

    def render(self, task: Task) -> Text:
        """The phase, and its whole seconds."""
        between = "ending" if task.completed == task.total else self._between
        name, seconds = str(task.fields["phase"]) or between, self._clock() - self._began
        is_long = name and seconds >= LONG
        return Text("; ".join((f"{name} {seconds:.0f} s", *self._progress())) if is_long else name, style="cyan")


class RunProgress(Progress):
    """A context manager for one progress bar. It shows nothing where `console` is not a terminal."""

    def __init__(self, total_steps: int, console: Terminal, progress: Callable[[], Sequence[str]] = list):
        """Prepare a bar for `total_steps`; print to the same `console` to write above it. progress: of the phase."""
        self._phase = PhaseColumn(progress=progress)
        super().__init__(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            self._phase,
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = self.add_task("train", total=total_steps, facts="", phase="")

    def phase(self, name: str) -> None:
        """Show the current phase; fits `PhaseClock(on_phase)`."""
        self._phase.begin()
        self.update(self._steps, phase=name)

    def step(self, step: int, reward: float, accuracy: float | None, step_seconds: float, what: str = "reward") -> None:
        """Show the steps done, the last one's mean reward (or another value, named `what`) and seconds, and the newest
        held-out accuracy.
        """
        facts = [f"{what} {reward:.3f}", f"{step_seconds:.1f} s/step"]
        if accuracy is not None:
            facts.insert(1, f"accuracy {accuracy:.3f}")
        self.update(self._steps, completed=step, facts="  ".join(facts))
