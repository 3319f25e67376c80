"""The heartbeat: a thread of each rank says what its main thread does, and the driver finds the ranks that hang.

One JSON object a line over one TCP connection, which the rank opens; the token proves that the rank is the run's own:

    rank -> driver   {"rank": 3, "token": ...}, then every INTERVAL_S {"role": .., "method": .., "idle_s": ..,
                     "got_sigterm": .., "work": [things, done, total] or null}
    driver -> rank   any line asks for {"stacks": "..."}

A rank that waits for another rank still replies. So a silent rank is reported first. Where all ranks reply and some
make no progress, the rank to look at first is one that does not wait for its peers.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import json
import math
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron_rl.observe.liveness import WorkDone, current_work, progress_count

INTERVAL_S = 2.0
"""Seconds between two signs of life."""

CONNECT_TIMEOUT_S = 10.0

RECONNECT_S = 10.0
"""A rank is gone that has not connected again within these seconds after its connection broke."""

MISSED_SIGNS_S = 3 * INTERVAL_S
"""A rank that was silent for so long has missed at least two signs of life."""

LOOK_S = 1.0
"""Seconds between two looks; a look that comes later, because the driver got no CPU, blames no rank for it."""

LATE_S = 0.05
"""A timer is late by less where the driver has the CPU that it needs."""

COLLECTIVE_SLACK_S, LONGEST_STALL_S = 30.0, 1e6

STACKS_FILE = "stacks.txt"
"""File in the run's folder with the stacks of all ranks at the time when one of them hung."""

LONGEST_LINE, LONGEST_HELLO = 1 << 20, 1 << 10
"""Bytes; the stacks of all threads of a rank have some ten thousand."""

HELLO_S = 10.0
"""Seconds in which a peer must send the token; a rank does so at once."""

MORE_STRANGERS = 32
"""Connections without a token that are kept at once, beyond one for each rank; then the oldest is closed."""

LOOK_AGAIN_S = 5.0
"""Seconds to wait for the monitor's thread to look at the signs again."""


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


@dataclass(frozen=True)
class HeartbeatLimits:
    """When a rank hangs, which has neither raised nor died.

    stall_timeout_s: seconds in a method without progress. heartbeat_timeout_s: seconds without a sign of life.
    stacks_file: receives the stacks of all ranks when one of them hangs; None: they are not written.
    """

    stall_timeout_s: float = math.inf
    heartbeat_timeout_s: float = 30.0
    stacks_file: Path | None = None

    @property
    def collective_timeout(self) -> timedelta:
        """The time-out of collectives: later than the monitor's, whose message is better."""
        return timedelta(seconds=min(self.stall_timeout_s, LONGEST_STALL_S) + COLLECTIVE_SLACK_S)


class Connection(enum.Enum):
    """The state of a rank's connection to the driver."""

    AWAITED = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a rank. heard_at: the driver's monotonic time, or when the connection broke. work: how
    far its method is, if it counts. gap_s: seconds from the sign before to this one.
    """

    heard_at: float
    connection: Connection = Connection.AWAITED
    role: str = ""
    method: str = ""
    idle_s: float = 0.0
    got_sigterm: bool = False
    work: WorkDone | None = None
    gap_s: float = 0.0


class Hang(enum.Enum):
    """The ways in which a rank hangs. Where several occur, the first one is the cause, and the others wait for it."""

    GONE = enum.auto()
    SILENT = enum.auto()
    STALLED = enum.auto()


@dataclass(frozen=True)
class Judgement:
    """The ranks that hang, and the signs of life and the monotonic time that say so."""

    hangs: Mapping[int, Hang]
    signs: Mapping[int, Sign]
    at: float


def pace(signs: Mapping[int, Sign], now: float, limits: HeartbeatLimits) -> float:
    """Return how many times slower than INTERVAL_S signs come, by the slowest rank that was heard in time; at least 1.

    Where hundreds of ranks share a few cores, or a node swaps, living ranks speak seldom: it is missed signs that tell
    a silent one from its peers, and not seconds. A gap counts until the next sign of its rank.
    """
    heard = [sign for sign in signs.values() if now - sign.heard_at <= limits.heartbeat_timeout_s]
    return max([1.0, *(sign.gap_s / INTERVAL_S for sign in heard if sign.connection is Connection.OPEN)])


def judge(signs: Mapping[int, Sign], now: float, limits: HeartbeatLimits) -> dict[int, Hang]:
    """Return the ranks that hang, all in the same way; empty while none hangs.

    GONE: the connection broke and did not come back. SILENT: no sign of life in time, perhaps because the rank never
    connected. STALLED: the rank answers and its method makes no progress. Once a rank has stalled, it probably waits
    for a rank that has missed several signs of life, so fewer missed signs already count as SILENT. Limits of silence
    are those of ranks that speak every INTERVAL_S, and longer by `pace`.
    """
    slower = pace(signs, now, limits)
    silences = {rank: now - sign.heard_at for rank, sign in signs.items()}
    idle = {rank: sign.idle_s + silences[rank] for rank, sign in signs.items() if sign.method}
    stalled = {rank for rank, seconds in idle.items() if seconds > limits.stall_timeout_s}
    if stalled:
        # Judge ranks that entered the method together at the same time: the first to be late may wait for another.
        stalled = {rank for rank, seconds in idle.items() if seconds > limits.stall_timeout_s - INTERVAL_S}
    longest_silence = slower * (MISSED_SIGNS_S if stalled else limits.heartbeat_timeout_s)
    hangs: dict[int, Hang] = {}
    for rank, silence in silences.items():
        if signs[rank].connection is Connection.BROKEN and silence > slower * RECONNECT_S:
            hangs[rank] = Hang.GONE
        elif silence > longest_silence:
            hangs[rank] = Hang.SILENT
        elif rank in stalled:
            hangs[rank] = Hang.STALLED
    first = min(hangs.values(), key=lambda hang: hang.value, default=None)
    return {rank: hang for rank, hang in hangs.items() if hang is first}


def excused(signs: Mapping[int, Sign], late_s: float, now: float) -> dict[int, Sign]:
    """Return the signs as if heard `late_s` later, which the judge was late; none later than now."""
    if late_s <= LATE_S:
        return dict(signs)
    return {rank: replace(sign, heard_at=min(now, sign.heard_at + late_s)) for rank, sign in signs.items()}


_WAITING = (
    "torch/distributed/",
    "vllm/distributed/",
    "megatron_rl/hybrid_engine/exchange.py",
    "megatron_rl/hybrid_engine/transport.py",
)
"""Files with functions that wait for other ranks."""


def waits_for_peers(stacks: str) -> bool:
    """Whether the main thread of a rank, the first in `stacks`, is in a collective or a message."""
    main = stacks.split("\nthread ")[0]
    innermost = [line for line in main.splitlines() if line.lstrip().startswith("File ")][-3:]
    return any(file in line for file in _WAITING for line in innermost)


class HeartbeatMonitor:
    """Listens on `host` for the signs of life of `num_ranks` ranks, in a thread, until `close`."""

    def __init__(self, host: str, num_ranks: int, limits: HeartbeatLimits) -> None:
        self.limits = limits
        self.token = secrets.token_hex(16)
        self._looked_at = now = time.monotonic()
        self._signs = {rank: Sign(now) for rank in range(num_ranks)}
        self._verdict = Judgement({}, dict(self._signs), now)
        self._connections: dict[int, RankConnection] = {}
        self._strangers: dict[RankConnection, None] = {}
        self._most_strangers = num_ranks + MORE_STRANGERS
        self._stacks: dict[int, str] = {}
        self._listener = socket.create_server((host, 0), backlog=num_ranks)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="heartbeat monitor", daemon=True)
        self._thread.start()

    @property
    def address(self) -> MonitorAddress:
        """The address that ranks connect to."""
        host, port, *_ = self._listener.getsockname()
        return MonitorAddress(host, port, self.token)

    @property
    def hangs(self) -> Mapping[int, Hang]:
        """The last result of `judge`, at most a second old."""
        return self._verdict.hangs

    def verdict(self) -> Judgement:
        """Judge what was heard until now, in the monitor's thread; the last verdict if that thread has ended."""
        looked: Future[None] = Future()

        def look() -> None:
            self._judge()
            looked.set_result(None)

        with suppress(RuntimeError, TimeoutError):  # another thread closes this
            self._loop.call_soon_threadsafe(look)
            looked.result(LOOK_AGAIN_S)
        return self._verdict

    @property
    def signs(self) -> dict[int, Sign]:
        """Rank -> its last sign of life."""
        return dict(self._signs)

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Ask every connected rank for the stacks of its threads; return the replies after `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        self._stacks = {}
        asked = list(self._connections.values())
        with suppress(RuntimeError):  # another thread closes this
            for connection in asked:
                self._loop.call_soon_threadsafe(connection.ask_for_stacks)
        while len(self._stacks) < len(asked) and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.05)
        return dict(sorted(self._stacks.items()))

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def met(self, connection: RankConnection) -> None:
        """Keep a connection without a token for a while, and not too many of them."""
        self._strangers[connection] = None
        self._loop.call_later(HELLO_S, self.send_away, connection)
        if len(self._strangers) > self._most_strangers:
            self.send_away(next(iter(self._strangers)))

    def send_away(self, connection: RankConnection) -> None:
        """Close a connection that has not sent the token."""
        if connection in self._strangers:
            del self._strangers[connection]
            connection.transport.abort()

    def connected(self, rank: int, connection: RankConnection) -> None:
        """Accept the connection of a rank that has sent the token."""
        del self._strangers[connection]
        self._connections[rank] = connection
        self._signs[rank] = Sign(time.monotonic(), Connection.OPEN)

    def disconnected(self, rank: int, connection: RankConnection) -> None:
        """Note the end of a rank's connection, unless the rank has opened another."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._signs[rank] = replace(self._signs[rank], connection=Connection.BROKEN, heard_at=time.monotonic())

    def heard(self, rank: int, content: dict[str, Any]) -> None:
        """Process a message of a rank."""
        if "stacks" in content:
            self._stacks[rank] = str(content["stacks"])
            sign, now = self._signs[rank], time.monotonic()
            self._signs[rank] = replace(sign, heard_at=now, idle_s=sign.idle_s + now - sign.heard_at)
        else:
            doing, idle_s = (str(content["role"]), str(content["method"])), float(content["idle_s"])
            got_sigterm = bool(content.get("got_sigterm"))
            things = content.get("work")
            work = None if things is None else WorkDone(str(things[0]), int(things[1]), int(things[2]))
            now, before = time.monotonic(), self._signs[rank]
            gap_s = now - before.heard_at if before.connection is Connection.OPEN else 0.0
            self._signs[rank] = Sign(now, Connection.OPEN, *doing, idle_s, got_sigterm, work, gap_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: RankConnection(self), sock=self._listener)
        )
        self._look()
        self._loop.run_forever()
        server.close()
        for connection in (*self._connections.values(), *self._strangers):
            connection.transport.abort()
        self._loop.run_until_complete(server.wait_closed())
        self._loop.close()

    def _look(self) -> None:
        """Judge every LOOK_S."""
        self._judge()
        self._loop.call_later(LOOK_S, self._look)

    def _judge(self) -> None:
        """Judge the signs of now; what this look is late does not count as silence of ranks."""
        before, self._looked_at = self._looked_at, time.monotonic()
        self._signs = excused(self._signs, self._looked_at - before - LOOK_S, self._looked_at)
        hangs = judge(self._signs, self._looked_at, self.limits)
        self._verdict = Judgement(hangs, dict(self._signs), self._looked_at)


class RankConnection(asyncio.Protocol):
    """The driver's end of one rank's connection; it closes the connection of a peer without the token."""

    def __init__(self, monitor: HeartbeatMonitor) -> None:
        self.transport: asyncio.Transport
        self._monitor = monitor
        self._rank: int | None = None
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._monitor.met(self)

    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                self._check_length(line)
                self._take(json.loads(line))
            self._check_length(self._unread)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # the peer is no rank
            self._unread = b""
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._monitor.send_away(self)
        if self._rank is not None:
            self._monitor.disconnected(self._rank, self)

    def ask_for_stacks(self) -> None:
        """Have the rank send the stacks of its threads."""
        self.transport.write(b"stacks\n")

    def _check_length(self, line: bytes) -> None:
        """Raise ValueError for more bytes in a line than the peer has a use for."""
        if len(line) > (LONGEST_HELLO if self._rank is None else LONGEST_LINE):
            raise ValueError("the line is too long")

    def _take(self, content: dict[str, Any]) -> None:
        if self._rank is not None:
            self._monitor.heard(self._rank, content)
            return
        if not hmac.compare_digest(str(content["token"]), self._monitor.token):
            raise ValueError("the token is another run's")
        self._rank = int(content["rank"])
        self._monitor.connected(self._rank, self)
