"""A run's own folder on one machine, for what must not outlive it: sockets, temporary files, Ray's session.

    <temporary folder>/megatron_rl-<uid>/<mark>/      mode 0700, and so is the folder above it

Names of shared-memory segments carry the mark. Whoever uses the folder holds its lock, which the kernel lets go when
the process ends, however that happens. Whoever starts a run removes what dead runs of the same user have left.
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

from megatron_rl.cluster.leftovers import end, marked
from megatron_rl.errors import ConfigError

SEGMENTS = Path("/dev/shm")
PREFIX = "megatron_rl-"
LONGEST_BASE = 107 - len("/0123456789/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Bytes. The kernel allows a socket's path 107; the rest is the mark, and what Ray appends."""

EXIT_PATIENCE_S = 5.0
"""A killed process can no longer be found by its mark when it still has its files open."""

LAST_FAILURE = "last_failure"
"""Beside the runs' folders: what Ray's processes wrote in the last run that failed."""


def segment_name(mark: str, rest: str) -> str:
    """A name in /dev/shm that says to which run it belongs."""
    return f"{PREFIX}{mark}-{rest}"


def of_dead_runs(entries: Iterable[tuple[str, int]], uid: int, dead: Container[str]) -> list[str]:
    """Names of the segments to remove: this user's, with the mark of a run that is known to be dead.

    entries: (name, owner's uid). A mark that nobody knows anything of may belong to a run in another container.
    """
    marks = {name: name.removeprefix(PREFIX).split("-")[0] for name, _ in entries if name.startswith(PREFIX)}
    return [name for name, owner in entries if owner == uid and name in marks and marks[name] in dead]


class Scratch:
    """One run's folder, held by this process; `begin` and `join` make one, `remove` ends it."""

    def __init__(self, mark: str, base: Path) -> None:
        """Called with the base locked."""
        self.mark = mark
        self.folder = base / mark
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def begin(cls) -> Scratch:
        """A new run's; removes what dead runs have left. Raises ConfigError where there is no place for it."""
        with _locked_base() as base:
            sweep(base)
            return cls(uuid.uuid4().hex[:10], base)

    @classmethod
    def join(cls, mark: str) -> Scratch:
        """That of a run which another process began, here or on another machine. Raises ConfigError like `begin`."""
        with _locked_base() as base:
            if not (base / mark).exists():
                sweep(base)
            return cls(mark, base)

    @property
    def ray_folder(self) -> Path:
        """For Ray's session; Ray makes it writable for everybody, so it must not be the folder itself."""
        return self.folder / "ray"

    def claim(self) -> int | None:
        """A descriptor, for the first process of the run on this machine that asks while none of it is open."""
        claim = os.open(self.folder / "claim", os.O_RDWR | os.O_CREAT, 0o600)
        if _is_free(claim):
            return claim
        os.close(claim)
        return None

    def remove(self, keep_logs: bool = False) -> None:
        """Remove everything, unless another process goes on holding it; repeating it is free.

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
                os.close(self._lock)
                self._lock = -1
            else:
                time.sleep(0.05)


def sweep(base: Path) -> None:
    """Remove what runs have left that nobody holds any more, their processes first; the base is locked."""
    for folder in base.iterdir():
        if folder.is_dir() and folder.name != LAST_FAILURE:
            with suppress(OSError):
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    if _is_free(lock):
                        end(partial(marked, folder.name), EXIT_PATIENCE_S)
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
    """Segments first: only a folder tells that their run is dead."""
    entries = []
    if SEGMENTS.is_dir():
        for path in SEGMENTS.iterdir():
            with suppress(FileNotFoundError):
                entries.append((path.name, path.lstat().st_uid))
    for name in of_dead_runs(entries, os.getuid(), {folder.name}):
        (SEGMENTS / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _keep_logs(folder: Path, target: Path) -> None:
    logs = [path for path in folder.glob("ray/session_2*/logs") if path.is_dir()]
    if logs:
        shutil.rmtree(target, ignore_errors=True)
        logs[0].rename(target)
        target.chmod(0o700)


@contextmanager
def _locked_base() -> Iterator[Path]:
    """The folder of this user's runs: in the temporary folder, or in /tmp where that one's path is too long."""
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
        f"there is no place for this run's sockets ({'; '.join(reasons)}); nearest: TMPDIR=/tmp, or another short "
        "path that can be written to"
    )


def _lock(base: Path) -> int:
    """Make the base and lock it; raises OSError where it cannot serve."""
    if len(os.fsencode(base)) > LONGEST_BASE:
        raise OSError(errno.ENAMETOOLONG, f"longer than the {LONGEST_BASE} bytes that leave room for a socket's name")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "not a folder of this user's alone (chmod 700 it, or remove it)")
    lock = os.open(base / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock
