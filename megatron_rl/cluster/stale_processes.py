"""Find and end processes that must not outlive their run.

A process inherits the environment variable RUN_ID from the process that started it, so it is found whatever its parent
is. A process with an empty environment is found by descent, as long as every parent between it and this process is
alive, or this process adopts orphans.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from megatron_rl.cluster.child_processes import adopting_orphans

RUN_ID = "MEGATRON_RL_RUN"
"""The environment variable with the id of the run that a process belongs to."""

REPLICA = "MEGATRON_RL_REPLICA"
"""The environment variable with the replica that a process belongs to and ends with; unset outside of replicas."""

KEEPER = "MEGATRON_RL_KEEPER"
"""The environment variable of the supervisor of the workers of the user's code, and of all that its workers start."""

WORKER = "MEGATRON_RL_WORKER"
"""The environment variable of all that one such worker starts."""

AGENT = "MEGATRON_RL_AGENT"
"""The environment variable of one agent's program, and of all that it starts."""

DRAINS = "MEGATRON_RL_DRAINS"
"""The environment variable of ranks that answer SIGTERM with a notice that their replica is to leave."""

UNKILLABLE_AFTER_S = 30.0
_POLL_S = 0.05


def processes_with(value: str, variable: str = RUN_ID) -> list[psutil.Process]:
    """Return the living processes of this user that were started with `variable`=`value` in their environment."""
    # psutil caches processes by pid, and another process may have taken a pid since.
    psutil.process_iter.cache_clear()
    return living(process for process in psutil.process_iter() if variable_of(process, variable) == value)


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are neither gone nor zombies."""
    alive = []
    for process in processes:
        with suppress(psutil.Error):  # it has gone meanwhile
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def descendants(pid: int | None = None) -> set[psutil.Process]:
    """Return the children of a process, of this one by default, their children and so on, zombies included."""
    return set(psutil.Process(pid).children(recursive=True))


def children_with(parent: int, value: str, variable: str) -> list[psutil.Process]:
    """Return the living children of a process that were started with `variable`=`value`, and what these have started.

    Where `parent` adopts orphans (`child_processes.adopting_orphans`), they are what is left of an ended process that
    had this variable. Others of the machine are not looked at, so it takes little time.
    """
    found = [child for child in children_of(parent) if variable_of(child, variable) == value]
    for process in found:  # the list grows
        found += children_of(process.pid)
    return living(found)


def children_of(pid: int) -> list[psutil.Process]:
    """Return the children of a process; none if it has gone."""
    children = []
    with suppress(OSError, psutil.Error):
        lists = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        if not lists[0].exists():  # a kernel without such lists
            return list(psutil.Process(pid).children())
        for number in [int(word) for file in lists for word in file.read_text().split()]:
            with suppress(psutil.NoSuchProcess):
                children.append(psutil.Process(number))
    return children


def end(find: Callable[[], Iterable[psutil.Process]], patience_s: float = UNKILLABLE_AFTER_S) -> list[psutil.Process]:
    """Send SIGKILL to all processes that `find` returns, until it returns none: they may start others meanwhile.

    Returns the processes that the kernel has not ended after `patience_s`. With 0, each gets its signal and none is
    waited for.
    """
    deadline = time.monotonic() + patience_s
    while left := list(find()):
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        if time.monotonic() >= deadline:
            return left
        time.sleep(_POLL_S)
    return []


@contextmanager
def leaving_none_running() -> Iterator[list[psutil.Process]]:
    """At the end of this block, however it ends, kill and wait for all that this process has started in it, and what
    that left, in any session. Yields a list that holds then what the kernel has not ended.

    Killing a process group is not enough: Ray's workers and those of the user's code leave it. So this process adopts
    the orphans below it meanwhile, and all that it has not had before are of the block:
    no other thread may start a process in it. Signals wait for its end.
    """
    before, left = descendants(), list[psutil.Process]()
    with adopting_orphans():
        try:
            yield left
        finally:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            try:
                left += end(lambda: _unreaped(descendants() - before))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _unreaped(family: set[psutil.Process]) -> set[psutil.Process]:
    """The processes that still run. The others are waited for, if they are children or adopted orphans."""
    reaped = set()
    for member in family:
        with suppress(ChildProcessError):
            if os.waitpid(member.pid, os.WNOHANG)[0]:
                reaped.add(member)
    return family - reaped


def process_time() -> float:
    """Return the time, in seconds, on the clock of `psutil.Process.create_time`.

    `time.time` may differ by a second, as the system gives the time of its boot in whole seconds.
    """
    booted: float = psutil.boot_time()
    return booted + time.clock_gettime(time.CLOCK_BOOTTIME)


def variable_of(process: psutil.Process, name: str) -> str | None:
    """Return a variable of the environment that a process was started with; None also for another user's process."""
    with suppress(psutil.Error):
        value: str | None = process.environ().get(name)
        return value
    return None
