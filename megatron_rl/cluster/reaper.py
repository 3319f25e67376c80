"""A companion process that outlives a killed driver and removes its leftovers: processes, files and shared memory.

Ray's processes die with the driver, with two exceptions. Two agents of its node daemon try for a minute to reach a
server that is gone, and the children of workers survive when the node daemon dies first. The companion gets the run's
id and the daemons' pids, waits until the driver tells it to act or is gone, and kills those pids and every process with
the run's id in its environment. Then it removes the run's scratch folder and shared memory.

On a node without a driver, one of the ranks has a companion. If that rank belongs to a replica, which may end before
the run, the companion ends that replica's processes alone and then watches the other ranks of the node.
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
from megatron_rl.cluster.leftovers import (
    REPLICA,
    RUN_ID,
    descendants,
    end,
    living,
    process_time,
    processes_with,
    variable_of,
)
from megatron_rl.cluster.scratch import Scratch

CLEAN = b"clean"
PEERS_GRACE_S = 10.0
"""Seconds that the peers of a dead rank have to report their failures."""

_LOOK_S = 0.2


class Reaper:
    """Ends the processes started inside `watching`, and all that they start, at `stop` or with this process."""

    def __init__(self) -> None:
        """Create the run's scratch folder. Raises ConfigError where there is no place for it."""
        self.scratch = Scratch.begin()
        self._companion: subprocess.Popen[bytes] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Start the companion for the processes that the body starts, whether or not the body raises."""
        before = descendants()
        os.environ[RUN_ID] = self.scratch.run_id
        try:
            yield
        finally:
            del os.environ[RUN_ID]
            pids = [process.pid for process in descendants() - before]
            self._companion = _start_companion(self.scratch, pids, grace_s=0.0)

    def stop(self, clean: bool = True) -> None:
        """Kill the remaining processes, end the companion and remove the run's scratch folder.

        clean: the run did not fail, so the logs of Ray's processes are removed too. Call it after Ray was shut down.
        """
        if self._companion is not None:
            self._companion.communicate(CLEAN if clean else b"")
            self._companion = None
        self.scratch.remove(keep_logs=not clean)


def settle_in() -> object:
    """Make the run's scratch folder the temporary folder of this rank, and start a companion on a node without one.

    With the companion, no process outlives this rank by more than PEERS_GRACE_S. Keep the result as long as the rank
    runs. It is None if the environment names no run.
    """
    run_id = os.environ.get(RUN_ID)
    if run_id is None:
        return None
    scratch = Scratch.join(run_id)
    # The cache that compilers keep from run to run stays in its folder.
    os.environ.setdefault(VARIABLE, folder_of_ranks())
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch.folder)
    return scratch, _start_companion(scratch, [], PEERS_GRACE_S)


def _start_companion(scratch: Scratch, pids: list[int], grace_s: float) -> subprocess.Popen[bytes] | None:
    """Start a companion; None if the run has one on this machine."""
    claim = scratch.claim()
    if claim is None:
        return None
    command = [sys.executable, "-m", __name__, scratch.run_id, str(os.getpid()), str(grace_s), *map(str, pids)]
    variables = {name: value for name, value in os.environ.items() if name != RUN_ID}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    try:
        # Its own session: neither Ctrl-C nor a signal to the driver's process group may reach it.
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=variables, pass_fds=[claim], start_new_session=True)
    finally:
        os.close(claim)


def main(run_id: str, parent: int, grace_s: float, pids: list[int]) -> None:
    """Wait for the parent's message or end, then kill; a pid that another process has taken meanwhile is left alone."""
    scratch, compiled = Scratch.join(run_id), os.environ.get(VARIABLE, "")
    watched = [process for process in psutil.process_iter() if process.pid in pids]
    clean, replica = _await_end(parent) == CLEAN, os.environ.get(REPLICA)
    ended = process_time()
    if replica is not None:
        ended = _end_replicas(run_id, replica, ended, grace_s)
    deadline = time.monotonic() + grace_s
    while processes_with(run_id) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    # Ranks that were started after the parent's end belong to another start of the same run.
    latest = ended if grace_s else float("inf")
    end(lambda: [*living(watched), *_started_before(latest, run_id)])
    if os.getppid() != parent:  # a living parent does it, as it still holds the folder
        scratch.remove(keep_logs=not clean)
        if compiled.endswith(f"torchinductor_{os.getuid()}"):  # else the user has named it
            remove_if_empty(compiled)


def _started_before(latest: float, run_id: str) -> list[psutil.Process]:
    return [process for process in processes_with(run_id) if process.create_time() <= latest]


def _end_replicas(run_id: str, replica: str, ended: float, grace_s: float) -> float:
    """Kill the rest of each replica `grace_s` after one of its ranks ended; return the time of the last rank's end.

    Returns when a rank outside of replicas ends, or when no rank is left. replica, ended: of the rank that has ended
    already. The other ranks are looked for before any process is killed and watched from then on, so that none ends
    unnoticed.
    """
    ranks, ending = _Ranks(run_id), {replica: ended}
    while ending or ranks.are_here:
        ranks.look()
        for name, since in [*ending.items()]:
            left = partial(_left_of, run_id, name, since)
            if process_time() >= since + grace_s or not left():
                end(left)
                del ending[name]
        for other in ranks.ended(_LOOK_S if ending or not ranks.are_here else None):
            ended = process_time()
            if other is None:
                return ended
            ending[other] = ended
    return ended


def _left_of(run_id: str, replica: str, ended: float) -> list[psutil.Process]:
    """Return the living processes of a replica that were started before one of its ranks `ended`."""
    return [process for process in _started_before(ended, run_id) if variable_of(process, REPLICA) == replica]


class _Ranks:
    """The ranks of a run on this node that `look` has found, each with its replica or None."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._ends: dict[int, tuple[int, str | None]] = {}  # pid -> pidfd, readable when the rank has ended; replica
        self._missed: list[str | None] = []

    @property
    def are_here(self) -> bool:
        """Whether one of them may be living."""
        return bool(self._ends or self._missed)

    def look(self) -> None:
        """Find and watch new ranks."""
        for pid, replica in replicas_of(processes_with(self._run_id), self._run_id).items():
            if pid not in self._ends:
                try:
                    self._ends[pid] = os.pidfd_open(pid), replica
                except ProcessLookupError:
                    self._missed.append(replica)

    def ended(self, timeout: float | None) -> list[str | None]:
        """Wait for the end of a rank, at most `timeout` seconds; return the replicas of all ranks that have ended."""
        gone, self._missed = self._missed, []
        ready, _, _ = select.select([end for end, _ in self._ends.values()], [], [], 0.0 if gone else timeout)
        for pid, (descriptor, replica) in [*self._ends.items()]:
            if descriptor in ready:
                os.close(descriptor)
                del self._ends[pid]
                gone.append(replica)
        return gone


def replicas_of(processes: Iterable[psutil.Process], run_id: str) -> dict[int, str | None]:
    """Return pid -> replica or None, for the processes that are ranks of a run, which have Ray's names.

    A process that has just ended is left out, as its environment cannot be read.
    """
    replicas = {}
    for process in processes:
        with suppress(psutil.Error):
            variables = process.environ()
            if variables.get(RUN_ID) == run_id and process.name().startswith("ray::"):
                replicas[process.pid] = variables.get(REPLICA)
    return replicas


def _await_end(parent: int) -> bytes:
    """Wait until the parent closes its end or dies; return its message. Its children may hold that end open."""
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
