"""Tasks on lanes: when does each start and stop, and which of them decide how long all take?

A lane runs its tasks one by one, in the order in which they are given, as a pool runs the verbs it is sent. A task
starts when the tasks it comes after have stopped and all of its lanes are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Something that keeps all of `lanes` busy for so many seconds. after: names of tasks that must have stopped."""

    name: str
    seconds: float
    lanes: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A task in time. waited_for: the task whose end let it start; None: it started at once."""

    task: Task
    start: float
    stop: float
    waited_for: str | None


@dataclass(frozen=True)
class Timeline:
    """Every task's bar, by name, in the order in which the tasks were given."""

    bars: dict[str, Bar]

    @property
    def total(self) -> float:
        """Seconds until the last task stops."""
        return max((bar.stop for bar in self.bars.values()), default=0.0)

    @property
    def critical_path(self) -> list[str]:
        """The chain of tasks that ends last: each waited for the one before it."""
        last = max(self.bars.values(), key=lambda bar: bar.stop, default=None)
        path: list[str] = []
        while last is not None:
            path.append(last.task.name)
            last = self.bars[last.waited_for] if last.waited_for is not None else None
        return path[::-1]


def simulate_tasks(tasks: Sequence[Task]) -> Timeline:
    """Run them all. Raises KeyError for a task that comes after one which is not given before it."""
    bars: dict[str, Bar] = {}
    last_on: dict[str, str] = {}
    for task in tasks:
        before = [*task.after, *(last_on[lane] for lane in task.lanes if lane in last_on)]
        # Of two that stop at once the later one counts, whose own past may be the longer.
        waited_for = max(reversed(before), key=lambda name: bars[name].stop, default=None)
        start = 0.0 if waited_for is None else bars[waited_for].stop
        bars[task.name] = Bar(task, start, start + task.seconds, waited_for)
        last_on |= dict.fromkeys(task.lanes, task.name)
    return Timeline(bars)
