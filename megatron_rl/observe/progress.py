"""The progress bar at the bottom of a terminal: steps done, the newest numbers, the current phase."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress(Progress):
    """A context manager for one progress bar. It shows nothing where `console` is not a terminal."""

    def __init__(self, total_steps: int, console: Console):
        """Prepare a bar for `total_steps`; print to the same `console` to write above it."""
        super().__init__(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            TextColumn("[cyan]{task.fields[phase]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._steps = self.add_task("train", total=total_steps, facts="", phase="")

    def phase(self, name: str) -> None:
        """Show the current phase; fits `PhaseClock(on_phase)`."""
        self.update(self._steps, phase=name)

    def step(self, step: int, reward: float, accuracy: float | None, step_seconds: float, what: str = "reward") -> None:
        """Show the steps done, the last one's mean reward (or another value, named `what`) and seconds, and the newest
        held-out accuracy.
        """
        facts = [f"{what} {reward:.3f}", f"{step_seconds:.1f} s/step"]
        if accuracy is not None:
            facts.insert(1, f"accuracy {accuracy:.3f}")
        self.update(self._steps, completed=step, facts="  ".join(facts))
