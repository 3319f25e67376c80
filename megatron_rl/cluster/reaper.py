"""A companion process that outlives a killed driver just long enough to remove what would be left behind.

Ray's processes die with the driver, except two agents of its node daemon, which spend a minute trying to reach a
server that is gone, and, when the node daemon dies first, whatever the workers had started. Run with the run's mark and
the daemons' pids, this waits until the driver says so or is gone, and kills them: the pids it was given, and every
process that has the mark in its environment. Then it removes the run's scratch folder and shared memory.

On a node where no driver is, one of the ranks has such a companion. Where that rank is a replica's, whose end is not
the run's, the companion ends that replica's processes alone, and goes on with the other ranks of the node.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from megatron_rl.cluster.compiled import VARIABLE, folder_of_ranks, remove_if_empty
from megatron_rl.cluster.leftovers import FATE, MARK, descendants, end, living, marked, process_time, variable_of
from megatron_rl.cluster.scratch import Scratch

CLEAN = b"clean"
PEERS_GRACE_S = 10.0
"""Seconds that the ranks beside a dead one have to report what they saw."""

_LOOK_S = 0.2


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
    clean, failure_domain = _await_end(parent) == CLEAN, os.environ.get(FATE)
    ended = process_time()
    if failure_domain is not None:
        ended = _end_replicas(mark, failure_domain, ended, grace_s)
    deadline = time.monotonic() + grace_s
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    # Ranks that were started after the parent's end belong to another group of the same run.
    latest = ended if grace_s else float("inf")
    end(lambda: [*living(watched), *(one for one in marked(mark) if one.create_time() <= latest)])
    if os.getppid() != parent:  # a living one does it, as it still holds the folder
        scratch.remove(keep_logs=not clean)
        if compiled.endswith(f"torchinductor_{os.getuid()}"):  # else the user has named it
            remove_if_empty(compiled)


def _end_replicas(mark: str, failure_domain: str, ended: float, grace_s: float) -> float:
    """End what each replica has left `grace_s` after a rank of it ended, until a rank of no replica ends, or none is
    left; when the last one did.

    fate, ended: of the rank that has ended already. The others are looked for before anything is killed, and watched
    from then on: none ends unnoticed while another's replica is dealt with.
    """
    ranks, ending = _Ranks(mark), {failure_domain: ended}
    while ending or ranks.are_here:
        ranks.look()
        for replica, since in [*ending.items()]:
            left = partial(_left_of, mark, replica, since)
            if process_time() >= since + grace_s or not left():
                end(left)
                del ending[replica]
        for other in ranks.ended(_LOOK_S if ending or not ranks.are_here else None):
            ended = process_time()
            if other is None:
                return ended
            ending[other] = ended
    return ended


def _left_of(mark: str, failure_domain: str, ended: float) -> list[psutil.Process]:
    """Living processes of a replica a rank of which has `ended`; not what was started since."""
    return [one for one in marked(mark) if variable_of(one, FATE) == failure_domain and one.create_time() <= ended]


class _Ranks:
    """The ranks of a run on this node, as far as they have been looked for, each with its replica's fate or None."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._ends: dict[int, tuple[int, str | None]] = {}  # pid -> what is readable when it has ended, fate
        self._missed: list[str | None] = []

    @property
    def are_here(self) -> bool:
        """Whether one of them may be living."""
        return bool(self._ends or self._missed)

    def look(self) -> None:
        """Watch those that have come."""
        for pid, failure_domain in fates_of(marked(self._mark), self._mark).items():
            if pid not in self._ends:
                try:
                    self._ends[pid] = os.pidfd_open(pid), failure_domain
                except ProcessLookupError:
                    self._missed.append(failure_domain)

    def ended(self, timeout: float | None) -> list[str | None]:
        """The fates of those that have ended; waits for one, for `timeout` seconds at most."""
        gone, self._missed = self._missed, []
        ready, _, _ = select.select([end for end, _ in self._ends.values()], [], [], 0.0 if gone else timeout)
        for pid, (descriptor, failure_domain) in [*self._ends.items()]:
            if descriptor in ready:
                os.close(descriptor)
                del self._ends[pid]
                gone.append(failure_domain)
        return gone


def fates_of(processes: Iterable[psutil.Process], mark: str) -> dict[int, str | None]:
    """pid -> fate, of those that are ranks of a run: Ray names them. Of one that has just ended nothing can be read."""
    fates = {}
    for process in processes:
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get(MARK) == mark and process.name().startswith("ray::"):
                fates[process.pid] = variables.get(FATE)
    return fates


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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), [int(pid) for pid in sys.argv[4:]])
