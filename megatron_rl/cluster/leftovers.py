"""Processes that must not outlive what they were started for: how they are found, and how they are ended.

By a mark: a variable in the environment that a process was started with and hands on to all it starts, so that it is
found whoever its parent is by now. By descent: also a process whose environment was emptied, as long as every parent
between it and this process lives, or this process adopts orphans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import psutil

MARK = "MEGATRON_RL_RUN"
"""The environment variable that every process of a run starts with."""

FATE = "MEGATRON_RL_FATE"
"""The environment variable that names the replica whose end a process shares; the run's own where there is none."""

UNKILLABLE_AFTER_S = 30.0
_POLL_S = 0.05


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Living processes of this user that were started with `variable`=`mark` in their environment."""
    # psutil keeps what it saw by number, and a number may have gone to another process since.
    psutil.process_iter.cache_clear()
    return living(process for process in psutil.process_iter() if variable_of(process, variable) == mark)


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have neither gone nor wait, dead, for their parent to notice."""
    found = []
    for process in processes:
        with suppress(psutil.Error):  # gone meanwhile
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def descendants() -> set[psutil.Process]:
    """Children of this process, their children and so on, dead ones that nobody has waited for included."""
    return set(psutil.Process().children(recursive=True))


def end(find: Callable[[], Iterable[psutil.Process]], patience_s: float = UNKILLABLE_AFTER_S) -> list[psutil.Process]:
    """SIGKILL to all that `find` returns, until it returns none: they may have started others meanwhile.

    Returns those that are left after `patience_s`, which the kernel cannot end; with 0 each got its signal, and none
    was waited for.
    """
    deadline = time.monotonic() + patience_s
    while found := list(find()):
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        if time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)
    return []


def process_time() -> float:
    """The present, in seconds, on the clock of `psutil.Process.create_time`.

    `time.time` may be a second off it, as the system tells the time of its boot in whole seconds.
    """
    booted: float = psutil.boot_time()
    return booted + time.clock_gettime(time.CLOCK_BOOTTIME)


def variable_of(process: psutil.Process, name: str) -> str | None:
    """What a process was started with in its environment; None also where it is another user's."""
    with suppress(psutil.Error):
        value: str | None = process.environ().get(name)
        return value
    return None
