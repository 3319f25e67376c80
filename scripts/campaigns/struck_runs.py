"""Start runs, strike their processes at random moments, and look at what is left: for `scripts/campaign.py`."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from megatron_rl.cluster.scratch import PREFIX, SEGMENTS
from megatron_rl.cluster.stale_processes import RUN_ID, processes_with, variable_of
from megatron_rl.controller.repairs import REPAIRS_FILE

REPOSITORY = Path(__file__).parents[2]
SHORT = (
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "trainer.val_before_train=false",
    "trainer.test_freq=0",
    "trainer.heartbeat_timeout_s=10",
    "trainer.export_hf=true",
)
LOCAL = "trainer.launcher=local"
CONFIGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "full demo": ("train", "configs/demo_cpu.yaml", ()),
    "demo": ("train", "configs/demo_cpu.yaml", SHORT),
    "split": ("train", "configs/split_cpu.yaml", SHORT),
    "ahead": ("train", "configs/async_cpu.yaml", SHORT),
    "sft": (
        "sft",
        "configs/stages/sft_cpu.yaml",
        ("trainer.test_freq=0", "trainer.heartbeat_timeout_s=10", "trainer.save_freq=0", "trainer.export_hf=true"),
    ),
}
"""Run -> its command, configuration and overrides."""
CLOCKED = ("timing_s/", "perf/", "reshard/", "repair/", "memory", "trainer/idle", "rollout/idle", "rollout/pause")
"""Metrics that measure the machine, and those of repairs."""
LIMIT_S = 600.0
"""Longest wait for anything; then the run hangs, and the campaign ends."""
LEFT_AFTER_S = 60.0
"""Seconds that a run whose controller was killed has for its ranks to end."""


@dataclass
class Outcome:
    """What strikes of one kind did. ends: exit code -> how often. seconds: from each strike to the next step.

    unsaid: strikes that ended a run without a sentence, or with a traceback. skipped: why there was none.
    """

    struck: str
    run: str
    num_strikes: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    skipped: str = ""

    HEADER = (
        "| struck | run | times | ended with code | median s to the next step | worst | steps lost, most "
        "| metrics and weights | left |\n|---|---|---|---|---|---|---|---|---|"
    )

    def row(self) -> str:
        """One row of the table."""
        if self.skipped:
            return f"| {self.struck} | {self.run} | 0 | skipped: {self.skipped} | | | | | |"
        codes = ", ".join(f"{code} ({times})" for code, times in sorted(self.ends.items())) or "went on"
        middle, worst = (f"{median(self.seconds):.1f}", f"{max(self.seconds):.1f}") if self.seconds else ("", "")
        same = "the same" if not self.differences else f"{len(self.differences)} differ"
        lost = max(self.steps_lost, default=0)
        left = len(self.left) + len(self.unsaid)
        return (
            f"| {self.struck} | {self.run} | {self.num_strikes} | {codes} | {middle} | {worst} | {lost} | {same} "
            f"| {left} |"
        )

    def note_repairs(self, folder: Path) -> None:
        """Take the seconds and lost steps of the run's repairs."""
        repairs = records(folder / REPAIRS_FILE)
        self.seconds = [each["seconds"] for each in repairs]
        self.steps_lost = [int(each["steps_lost"]) for each in repairs]

    @property
    def faults(self) -> list[str]:
        """Everything that must not be."""
        return [*self.unsaid, *self.differences, *self.left]


class StruckRun:
    """One start of a run. Its folder may have been begun by earlier starts; log: what it prints."""

    def __init__(
        self, run: str, folder: Path, log: Path, *overrides: str, variables: Mapping[str, str] | None = None
    ) -> None:
        task, config, keys = CONFIGS[run]
        command = [sys.executable, "-m", "megatron_rl", task, "--config", config, *keys, *overrides]
        self.folder, self.log = folder, log
        self.run_ids: set[str] = set()
        self.process = subprocess.Popen(
            [*command, f"trainer.default_local_dir={folder}"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"} | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def is_over(self) -> bool:
        """Whether the controller has ended."""
        return self.process.poll() is not None

    def text(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def steps(self) -> list[int]:
        """The steps that this start has printed, in order."""
        return [int(step) for step in re.findall(r"^step\s+(\d+)\b", self.text(), re.MULTILINE)]

    def family(self) -> list[psutil.Process]:
        """The processes below the controller."""
        with suppress(psutil.Error):
            below = psutil.Process(self.process.pid).children(recursive=True)
            self.run_ids |= {run_id for run_id in (variable_of(process, RUN_ID) for process in below) if run_id}
            return below
        return []

    def wait_until(self, is_true: Callable[[], bool]) -> bool:
        """Wait; False where the run ends first. Raises TimeoutError with what it has printed."""
        deadline = time.monotonic() + LIMIT_S
        while not self.is_over:
            if is_true():
                return True
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.log} stands still:\n{self.text()[-3000:]}")
            time.sleep(0.05)
        return False

    def goes_on(self, num_repairs: int = 0) -> bool:
        """Wait for one more step, and for so many repairs; False where the run ends first."""
        seen, file = len(self.steps()), self.folder / REPAIRS_FILE
        return self.wait_until(lambda: len(self.steps()) > seen and len(records(file)) >= num_repairs)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(LIMIT_S)

    def succeed(self) -> None:
        """Wait for its end. Raises RuntimeError with what it has printed where that is not code 0."""
        if self.wait() != 0:
            raise RuntimeError(f"{self.log} ended with code {self.process.returncode}:\n{self.text()[-3000:]}")

    def left(self) -> list[str]:
        """Processes, folders and segments that it has left LEFT_AFTER_S after its end."""
        deadline = time.monotonic() + LEFT_AFTER_S
        while (left := self._left_now()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left_now(self) -> list[str]:
        left = [str(process) for run_id in self.run_ids for process in processes_with(run_id)]
        for run_id in self.run_ids:
            left += map(str, SEGMENTS.glob(f"{PREFIX}{run_id}-*"))
            left += map(str, Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{run_id}"))
        return left


def named(family: Sequence[psutil.Process], name: str) -> list[psutil.Process]:
    """Processes of this name, or whose title begins with it."""
    chosen = []
    for process in family:
        with suppress(psutil.Error):  # it has just ended
            if process.name().startswith(name):
                chosen.append(process)
    return chosen


def training_ranks(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The ranks without those of replicas, which are restarted alone."""
    return [rank for rank in named(family, "rank ") if "/" not in _title(rank)]


def reward_processes(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The processes in which a run calls its reward function: children of the server that forks them."""
    chosen = [process for process in family if "user_code.keeper import keep" in _title(process)]
    servers = {process.pid for process in chosen}
    workers = []
    for process in chosen:
        with suppress(psutil.Error):
            if process.ppid() in servers:
                workers.append(process)
    return workers


def strike(process: psutil.Process, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal; nothing happens where the process has just ended."""
    with suppress(psutil.Error):
        process.send_signal(number)


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def records(file: Path) -> list[dict[str, float]]:
    """The lines of a file of JSON records; [] without the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Step -> its metrics without clocks."""
    return {
        int(line["step"]): {name: value for name, value in line.items() if not name.startswith(CLOCKED)}
        for line in records(folder / "metrics.jsonl")
    }


def differences(struck: Path, well: Path) -> list[str]:
    """Names of metrics, by step, and of files of weights that differ."""
    ours, theirs = metrics(struck), metrics(well)
    names = [
        f"{step} {name}"
        for step in sorted(ours.keys() | theirs.keys())
        for name in sorted(ours.get(step, {}).keys() | theirs.get(step, {}).keys())
        if ours.get(step, {}).get(name) != theirs.get(step, {}).get(name)
    ]
    file = "hf_model/model.safetensors"
    return names if (struck / file).read_bytes() == (well / file).read_bytes() else [*names, file]


def pause(draw: random.Random, shortest: float, longest: float) -> None:
    """Wait a random time."""
    time.sleep(draw.uniform(shortest, longest))
