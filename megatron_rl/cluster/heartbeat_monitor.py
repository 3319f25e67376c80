"""The driver's side of the heartbeat: which ranks no longer answer, and which no longer get on with their method.

A rank that is waiting for another one answers, so it is the silent rank that is reported where there is one. Where all
answer and some make no progress, the one to look at first is a rank that does not wait for its peers.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from megatron_rl.cluster.failures import RankFailure
from megatron_rl.cluster.heartbeat import INTERVAL_S, MonitorAddress

RECONNECT_S = 10.0
"""A rank whose connection broke, and that has not connected again after this time, is gone."""

MISSED_SIGNS_S = 3 * INTERVAL_S
"""A rank that was not heard for so long has missed two signs of life at least."""

LONG_PAUSE_S = 3 * INTERVAL_S
"""Between two looks; after a longer one it was the driver that did not listen, and no rank is blamed for it."""

COLLECTIVE_SLACK_S, LONGEST_STALL_S = 30.0, 1e6

STACKS_FILE = "stacks.txt"
"""In the run's folder: where every rank was when one of them failed without a word."""

LONGEST_LINE, LONGEST_HELLO = 1 << 20, 1 << 10
"""Bytes; the stacks of all threads of a rank are some ten thousand."""


@dataclass(frozen=True)
class HeartbeatLimits:
    """When a rank has failed that has neither raised nor died.

    stall_timeout_s: in a method without progress. heartbeat_timeout_s: without a sign of life. stacks_file: where the
    stacks of all ranks are written when one of them has failed so; None: nowhere.
    """

    stall_timeout_s: float = math.inf
    heartbeat_timeout_s: float = 30.0
    stacks_file: Path | None = None

    @property
    def collective_timeout(self) -> timedelta:
        """When a collective gives up: later than the watch, which says more."""
        return timedelta(seconds=min(self.stall_timeout_s, LONGEST_STALL_S) + COLLECTIVE_SLACK_S)


class Connection(enum.Enum):
    """Of a rank to the driver."""

    AWAITED = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()


@dataclass(frozen=True)
class Sign:
    """The last sign of life of a rank. heard_at: of the driver's monotonic clock, or when the connection broke."""

    heard_at: float
    connection: Connection = Connection.AWAITED
    role: str = ""
    method: str = ""
    idle_s: float = 0.0


class Hang(enum.Enum):
    """What is wrong with a rank; the first of these that any rank has is what its peers wait for."""

    GONE = enum.auto()
    SILENT = enum.auto()
    STALLED = enum.auto()


def judge(signs: Mapping[int, Sign], now: float, limits: HeartbeatLimits) -> dict[int, Hang]:
    """The ranks that have failed, all with the same trouble; empty while all is well.

    GONE: its connection broke and did not come back. SILENT: no sign of life in time, perhaps because it never
    connected. STALLED: it answers and its method makes no progress. Once a rank has stalled, it probably waits for one
    that has missed several signs of life, which is then SILENT already.
    """
    silences = {rank: now - sign.heard_at for rank, sign in signs.items()}
    idle = {rank: sign.idle_s + silences[rank] for rank, sign in signs.items() if sign.method}
    stalled = {rank for rank, seconds in idle.items() if seconds > limits.stall_timeout_s}
    if stalled:
        # Ranks that entered the method together are judged together: the first to be late may only wait for another.
        stalled = {rank for rank, seconds in idle.items() if seconds > limits.stall_timeout_s - INTERVAL_S}
    longest_silence = MISSED_SIGNS_S if stalled else limits.heartbeat_timeout_s
    found: dict[int, Hang] = {}
    for rank, silence in silences.items():
        if signs[rank].connection is Connection.BROKEN and silence > RECONNECT_S:
            found[rank] = Hang.GONE
        elif silence > longest_silence:
            found[rank] = Hang.SILENT
        elif rank in stalled:
            found[rank] = Hang.STALLED
    worst = min(found.values(), key=lambda trouble: trouble.value, default=None)
    return {rank: trouble for rank, trouble in found.items() if trouble is worst}


_WAITING = (
    "torch/distributed/",
    "vllm/distributed/",
    "megatron_rl/hybrid_engine/exchange.py",
    "megatron_rl/hybrid_engine/transport.py",
)
"""Files whose functions wait for other ranks."""


def waits_for_peers(stacks: str) -> bool:
    """Whether the main thread of a rank, the first one in `stacks`, is in a collective or a message."""
    main = stacks.split("\nthread ")[0]
    innermost = [line for line in main.splitlines() if line.lstrip().startswith("File ")][-3:]
    return any(file in line for file in _WAITING for line in innermost)


class HeartbeatMonitor:
    """Listens on `host` for the signs of life of `num_ranks` ranks, in a thread, until `close`.

    trouble: what `judge` found last, a second ago at most. failures: what ranks said that they failed with.
    """

    def __init__(self, host: str, num_ranks: int, limits: HeartbeatLimits) -> None:
        self.limits = limits
        self.trouble: dict[int, Hang] = {}
        self.failures: list[RankFailure] = []
        self.token = secrets.token_hex(16)
        now = time.monotonic()
        self._signs = {rank: Sign(now) for rank in range(num_ranks)}
        self._connections: dict[int, RankConnection] = {}
        self._stacks: dict[int, str] = {}
        self._listener = socket.create_server((host, 0), backlog=num_ranks)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def address(self) -> MonitorAddress:
        """What a rank needs to connect."""
        host, port, *_ = self._listener.getsockname()
        return MonitorAddress(host, port, self.token)

    @property
    def signs(self) -> dict[int, Sign]:
        """Rank -> its last sign of life."""
        return dict(self._signs)

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Ask every connected rank for the stacks of its threads; those that have answered after `timeout_s`."""
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
        """Stop listening. Repeating it is free."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def connected(self, rank: int, connection: RankConnection) -> None:
        """A rank has proved who it is."""
        self._connections[rank] = connection
        self._signs[rank] = Sign(time.monotonic(), Connection.OPEN)

    def disconnected(self, rank: int, connection: RankConnection) -> None:
        """The connection has ended; the rank may have made another one before."""
        if self._connections.get(rank) is connection:
            del self._connections[rank]
            self._signs[rank] = replace(self._signs[rank], connection=Connection.BROKEN, heard_at=time.monotonic())

    def heard(self, rank: int, content: dict[str, Any]) -> None:
        """A rank said something."""
        if "stacks" in content:
            self._stacks[rank] = str(content["stacks"])
        elif "failure" in content:
            self.failures.append(RankFailure.from_json(content["failure"]))
        else:
            doing, idle_s = (str(content["role"]), str(content["method"])), float(content["idle_s"])
            self._signs[rank] = Sign(time.monotonic(), Connection.OPEN, *doing, idle_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: RankConnection(self), sock=self._listener)
        )
        self._look(time.monotonic())
        self._loop.run_forever()
        server.close()
        for connection in self._connections.values():
            connection.transport.abort()
        self._loop.run_until_complete(server.wait_closed())
        self._loop.close()

    def _look(self, before: float) -> None:
        """Judge, and again in a second; a pause of this process itself is nobody's silence."""
        now = time.monotonic()
        if (pause := now - before) > LONG_PAUSE_S:
            self._signs = {rank: replace(sign, heard_at=sign.heard_at + pause) for rank, sign in self._signs.items()}
        self.trouble = judge(self._signs, now, self.limits)
        self._loop.call_later(1.0, self._look, now)


class RankConnection(asyncio.Protocol):
    """The driver's end of one rank's connection; closed where the other side does not know the token."""

    def __init__(self, watch: HeartbeatMonitor) -> None:
        self.transport: asyncio.Transport
        self._watch = watch
        self._rank: int | None = None
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            for line in lines:
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError):  # somebody else
            self.transport.abort()
        if len(self._unread) > (LONGEST_LINE if self._rank is not None else LONGEST_HELLO):
            self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._rank is not None:
            self._watch.disconnected(self._rank, self)

    def ask_for_stacks(self) -> None:
        """Have the rank send the stacks of its threads."""
        self.transport.write(b"stacks\n")

    def _take(self, content: dict[str, Any]) -> None:
        if self._rank is not None:
            self._watch.heard(self._rank, content)
        elif hmac.compare_digest(str(content["token"]), self._watch.token):
            self._rank = int(content["rank"])
            self._watch.connected(self._rank, self)
        else:
            self.transport.abort()
