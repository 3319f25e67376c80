"""What a run holds while it goes on, step by step, and whether that stays: slopes with their errors.

python tests/e2e/long_night.py RUN_FOLDER PID        # watch a run until it ends, and print the table
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

LOOK_S = 0.5
METRICS = "metrics.jsonl"
BLOCK = 25
"""Steps of which the fastest counts."""
LOGS = (METRICS, "events.out.tfevents")
"""Starts of names of files to which each step adds its numbers."""
SAMPLES = "samples"
"""The folder to which each step adds a file, of `trainer.recorded_prompts` prompts."""
ALLOWED = {
    "memory, MB": 0.01,
    "open files": 0.0,
    "threads": 0.0,
    "sockets": 0.0,
    "folder, MB": 0.01,
    "CPU seconds a step": 0.1,
    "seconds a step": 0.1,
}
"""What may be gained over the second half, as a share of the mean, where it is more than noise."""


@dataclass(frozen=True)
class Slope:
    """A straight line through points by least squares. slope, error: for each step, error its standard error.

    gained: what the line rises over the points. mean: of the values.
    """

    slope: float
    error: float
    gained: float
    mean: float

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Slope:
        """points: (step, value), at least three, of different steps."""
        steps, values = zip(*points, strict=True)
        middle, mean = statistics.fmean(steps), statistics.fmean(values)
        spread = sum((step - middle) ** 2 for step in steps)
        slope = sum((step - middle) * (value - mean) for step, value in points) / spread
        rest = sum((value - mean - slope * (step - middle)) ** 2 for step, value in points)
        error = math.sqrt(rest / (len(points) - 2) / spread)
        return cls(slope, error, slope * (max(steps) - min(steps)), mean)

    def is_flat(self, allowed: float) -> bool:
        """Whether it rises no more than by noise (three standard errors), or by a share of the mean."""
        return self.slope <= 3 * self.error or self.gained <= allowed * self.mean


@dataclass(frozen=True)
class Held:
    """What a process holds after a step, and what its run's folder has beside LOGS and SAMPLES, in bytes. cpu:
    seconds of all processors so far.
    """

    step: int
    memory: int
    files: int
    threads: int
    sockets: int
    folder: int
    cpu: float

    @classmethod
    def now(cls, process: psutil.Process, run: Path) -> Held:
        """Raises psutil.Error where the process is gone."""
        with process.oneshot():
            memory, threads, cpu = process.memory_info().rss, process.num_threads(), process.cpu_times()
        sockets = len(process.net_connections("all"))
        # A checkpoint may go, or get its name, while it is looked at: `os.walk` passes over what is not there.
        folders = ((at, names) for at, _, names in os.walk(run) if Path(at) != run / SAMPLES)
        files = [Path(at, name) for at, names in folders for name in names if not name.startswith(LOGS)]
        kept = sum(map(size_of, files))
        return cls(steps_done(run), memory, process.num_fds(), threads, sockets, kept, cpu.user + cpu.system)


def size_of(file: Path) -> int:
    with suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def steps_done(run: Path) -> int:
    file = run / METRICS
    return file.read_bytes().count(b"\n") if file.exists() else 0


def watch(process: psutil.Process, run: Path) -> list[Held]:
    """Look at each new step, no more often than every LOOK_S, until the process ends."""
    seen: list[Held] = []
    with suppress(psutil.Error):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            held = Held.now(process, run)
            if held.step and (not seen or held.step > seen[-1].step):
                seen.append(held)
            time.sleep(LOOK_S)
    return seen


def slopes(seen: Sequence[Held], run: Path) -> dict[str, Slope]:
    """Of the second half of the steps, by the names of ALLOWED."""
    seconds = [json.loads(line)["timing_s/step"] for line in (run / METRICS).read_text().splitlines()]
    half = len(seconds) // 2
    late = [held for held in seen if held.step > half]
    columns = {
        "memory, MB": [(held.step, held.memory / 1e6) for held in late],
        "open files": [(held.step, held.files) for held in late],
        "threads": [(held.step, held.threads) for held in late],
        "sockets": [(held.step, held.sockets) for held in late],
        "folder, MB": [(held.step, held.folder / 1e6) for held in late],
        "CPU seconds a step": [
            (later.step, (later.cpu - sooner.cpu) / (later.step - sooner.step)) for sooner, later in pairwise(late)
        ],
        # Other work on the machine only adds to a step, so the fastest of some steps is this run's own.
        "seconds a step": [(at, min(seconds[at : at + BLOCK])) for at in range(half, len(seconds) - BLOCK + 1, BLOCK)],
    }
    return {name: Slope.of(points) for name, points in columns.items()}


def is_crowded() -> bool:
    """Whether more than twice as many threads as there are processors wanted to run for a quarter of an hour. Wall
    seconds are then those of the others.
    """
    return os.getloadavg()[2] > 2 * (os.cpu_count() or 1)


def table(found: dict[str, Slope]) -> str:
    """One line for each quantity: its mean, and what it gains in 1,000 steps."""
    lines = [
        f"{name:18} {slope.mean:10.3f}  {1000 * slope.slope:+9.4f} +- {1000 * slope.error:.4f} in 1,000 steps"
        f"  {'flat' if slope.is_flat(ALLOWED[name]) else 'GROWS'}"
        for name, slope in found.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(table(slopes(watch(psutil.Process(int(sys.argv[2])), folder), folder)))
