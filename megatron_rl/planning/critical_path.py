"""When each task of a step starts and stops, and which chain of tasks decides the total.

A pool runs its tasks one by one, in the order given, as its ranks run the methods that are called. A task starts when
all tasks in `after` have stopped and all of its pools are free. Where pools share resources, such as the cores of one
machine, tasks that together want more than there is slow down by the same factor, and sharing may cost a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Work that keeps all of `pools` busy for `seconds`. after: names of tasks that must stop first.

    wants: the mean amount of the shared resource that it uses when nothing else competes.
    """

    name: str
    seconds: float
    pools: tuple[str, ...]
    after: tuple[str, ...] = ()
    wants: float = 0.0


@dataclass(frozen=True)
class Bar:
    """A task with its start and stop in seconds. waited_for: the task whose end let it start; None at time 0."""

    task: Task
    start: float
    stop: float
    waited_for: str | None


@dataclass(frozen=True)
class Timeline:
    """bars: task name -> its bar, in the order in which the tasks were given."""

    bars: dict[str, Bar]

    @property
    def total(self) -> float:
        """Seconds until the last task stops; 0 without tasks."""
        return max((bar.stop for bar in self.bars.values()), default=0.0)

    @property
    def critical_path(self) -> list[str]:
        """Names of the chain of tasks that ends last; each waited for the one before it."""
        last = max(self.bars.values(), key=lambda bar: bar.stop, default=None)
        path: list[str] = []
        while last is not None:
            path.append(last.task.name)
            last = self.bars[last.waited_for] if last.waited_for is not None else None
        return path[::-1]


def simulate_tasks(tasks: Sequence[Task], shared: float = 0.0, turns_share: float = 1.0) -> Timeline:
    """Schedule all tasks. shared: amount of the shared resource; 0: unlimited. turns_share: part of it that is left
    while tasks want more than there is.

    Raises KeyError where a task names a task in `after` that is not given before it.
    """
    bars: dict[str, Bar] = {}
    before = _before(tasks)
    if shared and sum(task.wants for task in tasks) > shared:
        return _simulate_sharing(tasks, before, shared, turns_share)
    for task in tasks:
        # Of two that stop at once take the later one: its own chain may be longer.
        waited_for = max(reversed(before[task.name]), key=lambda name: bars[name].stop, default=None)
        start = 0.0 if waited_for is None else bars[waited_for].stop
        bars[task.name] = Bar(task, start, start + task.seconds, waited_for)
    return Timeline(bars)


def _before(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """Return task -> tasks that must stop first: those in `after`, and the last one before it on each of its pools."""
    before: dict[str, list[str]] = {}
    last_on: dict[str, str] = {}
    for task in tasks:
        missing = next((name for name in task.after if name not in before), None)
        if missing is not None:
            raise KeyError(missing)
        before[task.name] = [*task.after, *(last_on[pool] for pool in task.pools if pool in last_on)]
        last_on |= dict.fromkeys(task.pools, task.name)
    return before


def _simulate_sharing(
    tasks: Sequence[Task], before: Mapping[str, list[str]], shared: float, turns_share: float
) -> Timeline:
    """Advance from one start or stop to the next; in between every running task proceeds at one common speed."""
    left = {task.name: task.seconds for task in tasks}
    start: dict[str, float] = {}
    stop: dict[str, float] = {}
    now = 0.0
    while len(stop) < len(tasks):
        for task in tasks:
            if task.name not in start and all(name in stop for name in before[task.name]):
                start[task.name] = now
        running = [task for task in tasks if task.name in start and task.name not in stop]
        wanted = sum(task.wants for task in running)
        speed = shared * turns_share / wanted if wanted > shared and len(running) > 1 else 1.0
        passed = min(left[task.name] for task in running)
        now += passed / speed
        for task in running:
            left[task.name] -= passed
            if left[task.name] <= 0:
                stop[task.name] = now
    bars = {}
    for task in tasks:
        waited_for = max(reversed(before[task.name]), key=lambda name: stop[name], default=None)
        bars[task.name] = Bar(task, start[task.name], stop[task.name], waited_for)
    return Timeline(bars)
