"""A run's own folder on one machine, for files that must not outlive it: sockets, temporary files, Ray's session.

    <temporary folder>/megatron_rl-<uid>/<run_id>/      mode 0700, and so is the folder above it

Names of shared-memory segments contain the run's id. Every process that uses the folder holds its lock, which the
kernel releases however the process ends. The start of a run removes the leftovers of dead runs of the same user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from megatron_rl.cluster.stale_processes import end, processes_with
from megatron_rl.errors import ConfigError

SEGMENTS = Path("/dev/shm")
PREFIX = "megatron_rl-"
LONGEST_BASE = 107 - len("/0123456789/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Bytes. The kernel allows 107 for a socket's path; the rest is the run's id and Ray's part of the path."""

EXIT_PATIENCE_S = 5.0
"""Seconds in which killed processes, which can no longer be found, close their files."""

LAST_FAILURE = "last_failure"
"""The folder, next to the runs' folders, with the logs of ranks and of Ray's processes of the last run that failed."""


def of_dead_runs(entries: Iterable[tuple[str, int]], uid: int, dead: Container[str]) -> list[str]:
    """Return the names of the segments to remove: this user's, with the id of a run that is known to be dead.

    entries: (name, owner's uid). An unknown id may belong to a run in another container.
    """
    marks = {name: name.removeprefix(PREFIX).split("-")[0] for name, _ in entries if name.startswith(PREFIX)}
    return [name for name, owner in entries if owner == uid and name in marks and marks[name] in dead]


class Scratch:
    """One run's folder, held by this process; `begin` and `join` make one, `remove` ends it."""

    def __init__(self, run_id: str, base: Path) -> None:
        """Called with the base locked."""
        self.run_id = run_id
        self.folder = base / run_id
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def begin(cls) -> Scratch:
        """Create a new run's folder; remove leftovers of dead runs. Raises ConfigError where no place is usable."""
        with _locked_base() as base:
            sweep(base)
            return cls(uuid.uuid4().hex[:10], base)

    @classmethod
    def join(cls, run_id: str) -> Scratch:
        """Open the folder of a run that another process began, here or on another machine. Raises as `begin` does."""
        with _locked_base() as base:
            if not (base / run_id).exists():
                sweep(base)
            return cls(run_id, base)

    @property
    def ray_folder(self) -> Path:
        """The folder of Ray's session. Ray makes it writable for everybody, so it is not `folder` itself."""
        return self.folder / "ray"

    @property
    def segment_prefix(self) -> str:
        """The start of the paths of the run's segments, on every machine."""
        return f"{SEGMENTS}/{PREFIX}{self.run_id}-"

    def segments(self) -> list[str]:
        """Return the names of the run's segments on this machine, without the prefix."""
        prefix = Path(self.segment_prefix).name
        return [path.name.removeprefix(prefix) for path in SEGMENTS.glob(f"{prefix}*")]

    def claim(self, name: str) -> int | None:
        """Return a descriptor to the first process that claims the name while no descriptor of it is open."""
        claim = os.open(self.folder / f"{name}.claim", os.O_RDWR | os.O_CREAT, 0o600)
        if _is_free(claim):
            return claim
        os.close(claim)
        return None

    def release(self) -> None:
        """Let go of the folder without removing it; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self, keep_logs: bool = False) -> None:
        """Remove the folder and the run's segments, unless another process holds it; a second call does nothing.

        keep_logs: move the logs of Ray's processes to LAST_FAILURE.
        """
        deadline = time.monotonic() + EXIT_PATIENCE_S
        while self._lock >= 0:
            with _locked_base() as base:
                is_free = _is_free(self._lock)
                if is_free and keep_logs:
                    _keep_logs(self.folder, base / LAST_FAILURE)
                if is_free:
                    _remove(self.folder)
            if is_free or time.monotonic() > deadline:
                self.release()
            else:
                time.sleep(0.05)


def sweep(base: Path) -> None:
    """Remove the leftovers of runs whose folder no process holds, their processes first; the base is locked."""
    for folder in base.iterdir():
        if folder.is_dir() and folder.name != LAST_FAILURE:
            with suppress(OSError):
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    if _is_free(lock):
                        end(partial(processes_with, folder.name), EXIT_PATIENCE_S)
                        _remove(folder)
                finally:
                    os.close(lock)


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove the segments before the folder: only the folder shows that their run is dead."""
    entries = []
    if SEGMENTS.is_dir():
        for path in SEGMENTS.iterdir():
            with suppress(FileNotFoundError):
                entries.append((path.name, path.lstat().st_uid))
    for name in of_dead_runs(entries, os.getuid(), {folder.name}):
        (SEGMENTS / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _keep_logs(folder: Path, target: Path) -> None:
    of_ray = [path for path in folder.glob("ray/session_2*/logs") if path.is_dir()]
    written = [path for path in folder.glob("*.log") if path.stat().st_size]
    if not of_ray and not written:
        return
    shutil.rmtree(target, ignore_errors=True)
    if of_ray:
        of_ray[0].rename(target)
    target.mkdir(exist_ok=True)
    target.chmod(0o700)
    for path in written:
        path.rename(target / path.name)


@contextmanager
def _locked_base() -> Iterator[Path]:
    """Lock the folder of this user's runs: in the temporary folder, or in /tmp where that path is not usable."""
    reasons = []
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        base = Path(place) / f"{PREFIX}{os.getuid()}"
        try:
            lock = _lock(base)
        except OSError as error:
            reasons.append(f"{base}: {error.strerror}")
            continue
        try:
            yield base
        finally:
            os.close(lock)
        return
    raise ConfigError(
        f"no folder can hold this run's sockets ({'; '.join(reasons)}); try: TMPDIR=/tmp, or another short "
        "path that can be written to"
    )


def _lock(base: Path) -> int:
    """Create the base and lock it. Raises OSError where the base is not usable."""
    if len(os.fsencode(base)) > LONGEST_BASE:
        raise OSError(errno.ENAMETOOLONG, f"longer than the {LONGEST_BASE} bytes that leave room for a socket's name")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "not a folder of this user's alone (chmod 700 it, or remove it)")
    lock = os.open(base / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock
