"""Whole runs that several tests only read: each is made once in a session, by the first test that asks for it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import CommandLine

DONE = "done"
"""The file that says that a run has ended well and may be read."""


@dataclass(frozen=True)
class RecordedRun:
    """What an ended run has left in `folder`, under the names that `CommandLine` has; nothing there may be changed."""

    folder: Path

    @property
    def run(self) -> Path:
        """The run's own folder."""
        return self.folder / "run"

    def text(self) -> str:
        return (self.folder / "output_0.txt").read_text()

    def metrics(self) -> str:
        return (self.run / "metrics.jsonl").read_text()

    def copy(self, folder: Path) -> Path:
        """Copy the run for a test that goes on from it or damages it; returns `folder`, for a next life."""
        shutil.copytree(self.run, folder / "run")
        for path in (folder / "run", *(folder / "run").rglob("*")):
            path.chmod(path.stat().st_mode | 0o200)
        return folder


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of this session, and for no other session."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    folder = factory.getbasetemp().parent if is_worker else factory.getbasetemp()
    (folder / "shared").mkdir(exist_ok=True)
    return folder / "shared"


@contextmanager
def locked(folder: Path, name: str) -> Iterator[Path]:
    """Hold `folder/name` alone among the workers."""
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder / name


def made_once(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """`folder/name`, which the first worker that asks has filled by `make`; a failed attempt is made again."""
    with locked(folder, name) as place:
        if not (place / DONE).exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            (place / DONE).touch()
    return place


def record(shared: Path, name: str, overrides: tuple[str, ...], **how: str) -> RecordedRun:
    """The run of this name, configuration and overrides; how: `config` and `stage` of CommandLine.

    Raises AssertionError with the output where the run fails.
    """
    digest = hashlib.sha256(json.dumps([overrides, how], sort_keys=True).encode()).hexdigest()[:12]

    def make(place: Path) -> None:
        run = CommandLine(place, *overrides, **how)
        try:
            assert run.wait() == 0, run.text()
        finally:
            run.kill_all()
        for path in run.run.rglob("*"):
            path.chmod(path.stat().st_mode & ~0o222)

    return RecordedRun(made_once(shared, f"{name.replace(' ', '_')}-{digest}", make))
