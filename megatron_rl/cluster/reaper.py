"""A companion process that outlives a killed driver just long enough to remove what would be left behind.

Ray's processes die with the driver, except two agents of its node daemon, which spend a minute trying to reach a
server that is gone, and, when the node daemon dies first, whatever the workers had started. Run with the run's mark and
the daemons' pids, this waits until the driver says so or is gone, and kills them: the pids it was given, and every
process that has the mark in its environment. Then it removes the run's scratch folder and shared memory.

On a node where no driver is, one of the ranks has such a companion. Where that rank is a replica's, whose end is not
the run's, the companion ends that replica's processes alone, and goes on with another rank of the node.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_rl.cluster.compiled import VARIABLE, folder_of_ranks, remove_if_empty
from megatron_rl.cluster.leftovers import FATE, MARK, descendants, end, living, marked, variable_of
from megatron_rl.cluster.scratch import Scratch

CLEAN = b"clean"
PEERS_GRACE_S = 10.0
"""Seconds that the ranks beside a dead one have to report what they saw."""


class Reaper:
    """Makes the processes started inside `marking`, and all they start, end with this one, and with `stop` at last."""

    def __init__(self) -> None:
        """Begin the run's scratch folder. Raises ConfigError where there is no place for it."""
        self.scratch = Scratch.begin()
        self._companion: subprocess.Popen[bytes] | None = None

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Start the companion for what the body starts, whether or not the body raises."""
        before = descendants()
        os.environ[MARK] = self.scratch.mark
        try:
            yield
        finally:
            del os.environ[MARK]
            pids = [process.pid for process in descendants() - before]
            self._companion = _start_companion(self.scratch, pids, grace_s=0.0)

    def stop(self, clean: bool = True) -> None:
        """Kill what is left of the watched processes, end the companion and remove the run's scratch folder.

        clean: the run did not fail, so nobody will want to read the logs of Ray's processes. Call it after Ray was
        shut down.
        """
        if self._companion is not None:
            self._companion.communicate(CLEAN if clean else b"")
            self._companion = None
        self.scratch.remove(keep_logs=not clean)


def settle_in() -> object:
    """Make the run's scratch folder the temporary folder of this rank, and watch over this node; keep the result.

    A companion is started on a node that has none, to let nothing outlive this rank by more than PEERS_GRACE_S. None
    without a mark: this process belongs to no run.
    """
    mark = os.environ.get(MARK)
    if mark is None:
        return None
    scratch = Scratch.join(mark)
    # What compilers keep from run to run stays where it was.
    os.environ.setdefault(VARIABLE, folder_of_ranks())
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch.folder)
    return scratch, _start_companion(scratch, [], PEERS_GRACE_S)


def _start_companion(scratch: Scratch, pids: list[int], grace_s: float) -> subprocess.Popen[bytes] | None:
    """None where the run has one on this machine."""
    claim = scratch.claim()
    if claim is None:
        return None
    command = [sys.executable, "-m", __name__, scratch.mark, str(os.getpid()), str(grace_s), *map(str, pids)]
    variables = {name: value for name, value in os.environ.items() if name != MARK}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        # Its own session: neither Ctrl-C nor a signal to the driver's process group may reach it.
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, pass_fds=[claim], start_new_session=True)
    finally:
        os.close(claim)


def main(mark: str, parent: int, grace_s: float, pids: list[int]) -> None:
    """Wait for the parent's word or end, then kill; a pid that meanwhile went to another process is left alone."""
    scratch, compiled = Scratch.join(mark), os.environ.get(VARIABLE, "")
    watched = [process for process in psutil.process_iter() if process.pid in pids]
    clean, fate = _await_end(parent) == CLEAN, os.environ.get(FATE)
    ended = time.time()
    while fate is not None:
        _end_replica(mark, fate, ended, grace_s)
        successor = _rank_here(mark)
        if successor is None:
            break
        fate = variable_of(successor, FATE)
        _await_process(successor.pid)
        ended = time.time()
    deadline = time.monotonic() + grace_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    # Ranks that were started after the parent's end belong to another group of the same run.
    latest = ended if grace_s else float("inf")
    end(lambda: [*living(watched), *(one for one in marked(mark) if one.create_time() <= latest)])
    if os.getppid() != parent:  # a living one does it, as it still holds the folder
        scratch.remove(keep_logs=not clean)
        if compiled.endswith(f"torchinductor_{os.getuid()}"):  # else the user has named it
            remove_if_empty(compiled)


def _end_replica(mark: str, fate: str, ended: float, grace_s: float) -> None:
    """Kill what is left of a replica one rank of which has `ended`, `grace_s` later; not what was started since."""

    def left() -> list[psutil.Process]:
        started = [one for one in marked(mark) if variable_of(one, FATE) == fate]
        return [one for one in started if one.create_time() <= ended]

    deadline = time.monotonic() + grace_s
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    end(left)


def _rank_here(mark: str) -> psutil.Process | None:
    """A rank of the run on this node, of no replica where there is one: Ray names its processes."""
    ranks = []
    for process in marked(mark):
        with suppress(psutil.Error):
            if process.name().startswith("ray::"):
                ranks.append(process)
    return min(ranks, key=lambda process: variable_of(process, FATE) is not None, default=None)


def _await_end(parent: int) -> bytes:
    """What the parent has written when it closes its end, or dies: a child of its may hold that end open."""
    try:
        process = os.pidfd_open(parent)
    except ProcessLookupError:
        return b""
    select.select([sys.stdin, process], [], [])
    os.set_blocking(sys.stdin.fileno(), False)
    with suppress(BlockingIOError):
        return os.read(sys.stdin.fileno(), len(CLEAN))
    return b""


def _await_process(pid: int) -> None:
    """Wait for the end of a process that is no child."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), [int(pid) for pid in sys.argv[4:]])
