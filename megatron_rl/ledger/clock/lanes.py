"""Tasks on lanes: when does each start and stop, and which of them decide how long all take?

A lane runs its tasks one by one, in the order in which they are given, as a pool runs the methods it is sent. A task
starts when the tasks it comes after have stopped and all of its lanes are free. Where lanes share what they work with,
such as the cores of one machine, tasks that want more of it together than there is all slow down alike, and taking
turns may cost a share of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Something that keeps all of `lanes` busy for so many seconds. after: names of tasks that must have stopped.

    wants: of what lanes share, in the mean, while it has that for itself.
    """

    name: str
    seconds: float
    lanes: tuple[str, ...]
    after: tuple[str, ...] = ()
    wants: float = 0.0


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


def simulate_tasks(tasks: Sequence[Task], shared: float = 0.0, turns_share: float = 1.0) -> Timeline:
    """Run them all. shared: what there is of what tasks want; 0: as much as they want. turns_share: of that, what is
    left while they want more.

    Raises KeyError for a task that comes after one which is not given before it.
    """
    bars: dict[str, Bar] = {}
    before = _before(tasks)
    if shared and sum(task.wants for task in tasks) > shared:
        return _simulate_sharing(tasks, before, shared, turns_share)
    for task in tasks:
        # Of two that stop at once the later one counts, whose own past may be the longer.
        waited_for = max(reversed(before[task.name]), key=lambda name: bars[name].stop, default=None)
        start = 0.0 if waited_for is None else bars[waited_for].stop
        bars[task.name] = Bar(task, start, start + task.seconds, waited_for)
    return Timeline(bars)


def _before(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """Task -> those that must have stopped: what it comes after, and the ones before it on its lanes."""
    found: dict[str, list[str]] = {}
    last_on: dict[str, str] = {}
    for task in tasks:
        missing = next((name for name in task.after if name not in found), None)
        if missing is not None:
            raise KeyError(missing)
        found[task.name] = [*task.after, *(last_on[lane] for lane in task.lanes if lane in last_on)]
        last_on |= dict.fromkeys(task.lanes, task.name)
    return found


def _simulate_sharing(
    tasks: Sequence[Task], before: Mapping[str, list[str]], shared: float, turns_share: float
) -> Timeline:
    """From one start or stop to the next, between which every task that runs goes on at the same pace."""
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
        stop_policy = shared * turns_share / wanted if wanted > shared and len(running) > 1 else 1.0
        passed = min(left[task.name] for task in running)
        now += passed / stop_policy
        for task in running:
            left[task.name] -= passed
            if left[task.name] <= 0:
                stop[task.name] = now
    bars = {}
    for task in tasks:
        waited_for = max(reversed(before[task.name]), key=lambda name: stop[name], default=None)
        bars[task.name] = Bar(task, start[task.name], stop[task.name], waited_for)
    return Timeline(bars)
