"""A companion process that outlives a killed driver just long enough to kill what Ray would leave behind.

Ray's processes die with the driver, except two agents of its node daemon: they spend a minute trying to reach a
server that is gone. Run as a script with their pids, this waits until the driver's end of its standard input closes,
and kills them.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil


class Reaper:
    """Makes the processes that appear between construction and `watch` end with this one, and with `stop` at last."""

    def __init__(self) -> None:
        self._before = _descendants()
        self._companion: subprocess.Popen | None = None

    def watch(self) -> None:
        """Start the companion for all descendants of this process that are new since construction."""
        pids = [str(process.pid) for process in _descendants() - self._before]
        # Its own session: neither Ctrl-C nor a signal to the driver's process group may reach it.
        self._companion = subprocess.Popen(
            [sys.executable, __file__, *pids], stdin=subprocess.PIPE, start_new_session=True
        )

    def stop(self) -> None:
        """Kill what is left of the watched processes and end the companion; call it after Ray was shut down."""
        if self._companion is not None:
            self._companion.communicate()
            self._companion = None


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def main(pids: list[int]) -> None:
    """Wait for the end of standard input, then kill; a pid that meanwhile went to another process is left alone."""
    processes = [process for process in psutil.process_iter() if process.pid in pids]
    sys.stdin.read()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
