"""A companion process that outlives a killed driver just long enough to kill what would be left behind.

Ray's processes die with the driver, except two agents of its node daemon, which spend a minute trying to reach a
server that is gone, and, when the node daemon dies first, whatever the workers had started. Run as a script with the
daemons' pids and the run's mark, this waits until the driver's end of its standard input closes, and kills them: the
pids it was given, and every process that has the mark in its environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

MARK = "MEGATRON_RL_RUN"


class Reaper:
    """Makes the processes started inside `marking`, and all they start, end with this one, and with `stop` at last."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._companion: subprocess.Popen | None = None

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Start the companion for what the body starts; where the body raises, `stop` finds nothing to do."""
        before = _descendants()
        os.environ[MARK] = self._mark
        try:
            yield
        finally:
            del os.environ[MARK]
        pids = [str(process.pid) for process in _descendants() - before]
        # Its own session: neither Ctrl-C nor a signal to the driver's process group may reach it.
        self._companion = subprocess.Popen(
            [sys.executable, __file__, self._mark, *pids], stdin=subprocess.PIPE, start_new_session=True
        )

    def stop(self) -> None:
        """Kill what is left of the watched processes and end the companion; call it after Ray was shut down."""
        if self._companion is not None:
            self._companion.communicate()
            self._companion = None


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _marked(mark: str) -> list[psutil.Process]:
    """Running processes with `mark` in the environment they were started with."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def main(mark: str, pids: list[int]) -> None:
    """Wait for the end of standard input, then kill; a pid that meanwhile went to another process is left alone."""
    watched = [process for process in psutil.process_iter() if process.pid in pids]
    sys.stdin.read()
    while doomed := [*watched, *_marked(mark)]:
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        watched = []


if __name__ == "__main__":
    main(sys.argv[1], [int(pid) for pid in sys.argv[2:]])
