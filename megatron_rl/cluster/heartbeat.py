"""The rank's side of the heartbeat: a thread that reports to the driver what the rank's main thread does.

One JSON object a line over one TCP connection, which the rank opens; the token proves that the rank is the run's own:

    rank -> driver   {"rank": 3, "token": ...}, then every INTERVAL_S {"role": .., "method": .., "idle_s": ..,
                     "got_sigterm": .., "work": [things, done, total] or null}
    driver -> rank   any line asks for {"stacks": "..."}
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from megatron_rl.observe.liveness import current_work, progress_count

INTERVAL_S = 2.0
"""Seconds between two signs of life."""

CONNECT_TIMEOUT_S = 10.0


class MonitorAddress(NamedTuple):
    """The address where the driver listens, and the token that it expects."""

    host: str
    port: int
    token: str


class Heartbeat:
    """Sends this rank's signs of life to the driver until the process ends; reconnects when the connection breaks.

    The sign's idle_s is 0 between methods, otherwise the seconds since the method began or last made progress
    (`observe.liveness.made_progress`), to within INTERVAL_S. got_sigterm: this process was given SIGTERM, and its
    replica is to leave.
    """

    def __init__(self, rank: int, address: MonitorAddress) -> None:
        self._rank = rank
        self._address = address
        self.got_sigterm = False
        self._doing: tuple[str, str] | None = None
        self._num_methods = 0
        self._mark: tuple[int, int] = (0, 0)
        self._changed_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @contextmanager
    def during(self, role: str, method: str) -> Iterator[None]:
        """Name this role and method in the signs of life while the block runs."""
        self._num_methods += 1
        self._doing = (role, method)
        try:
            yield
        finally:
            self._doing = None

    def _run(self) -> None:
        while True:
            with (
                suppress(OSError),
                socket.create_connection(self._address[:2], timeout=CONNECT_TIMEOUT_S) as connection,
            ):
                connection.settimeout(None)
                _send(connection, {"rank": self._rank, "token": self._address.token})
                while self._beat(connection):
                    pass
            time.sleep(INTERVAL_S)

    def _beat(self, connection: socket.socket) -> bool:
        """Send one sign of life, then answer the driver until the next; False when it has closed the connection."""
        _send(connection, self._sign())
        until = time.monotonic() + INTERVAL_S
        while (left := until - time.monotonic()) > 0:
            readable, _, _ = select.select([connection], [], [], left)
            if readable:
                if not connection.recv(1024):
                    return False
                _send(connection, {"stacks": stacks_of_threads(leave_out=self._thread)})
        return True

    def _sign(self) -> dict[str, object]:
        doing, mark = self._doing, (self._num_methods, progress_count())
        if doing is None or mark != self._mark:
            self._mark, self._changed_at = mark, time.monotonic()
        role, method = doing or ("", "")
        idle_s = time.monotonic() - self._changed_at
        sign = {"role": role, "method": method, "idle_s": idle_s, "got_sigterm": self.got_sigterm}
        return sign | {"work": current_work() if doing else None}


def stacks_of_threads(leave_out: threading.Thread) -> str:
    """Return the Python stacks of all other threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != leave_out.ident}
    parts = []
    for ident in sorted(frames, key=lambda ident: (ident != main, ident)):
        stack = "".join(traceback.format_stack(frames[ident]))
        parts.append(f"thread {names.get(ident, ident)}:\n{stack.rstrip()}")
    return "\n".join(parts)


def _send(connection: socket.socket, content: dict[str, object]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")
