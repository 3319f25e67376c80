"""The driver's side of the heartbeat: which ranks no longer answer, and which no longer get on with their verb.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl.controller.pulse import INTERVAL_S, WatchAddress

RECONNECT_S = 10.0
"""A rank whose connection broke, and that has not connected again after this time, is gone."""

LONG_PAUSE_S = 3 * INTERVAL_S
"""Between two looks; after a longer one it was the driver that did not listen, and no rank is blamed for it."""

LONGEST_LINE = 1 << 20
"""Bytes; the stacks of all threads of a rank are some ten thousand."""


@dataclass(frozen=True)
class Limits:
    """When a rank has failed that has neither raised nor died.

    stall_timeout_s: in a verb without progress. heartbeat_timeout_s: without a sign of life. stacks_file: where the
    stacks of all ranks are written when one of them has failed so; None: nowhere.
    """

    stall_timeout_s: float = math.inf
    heartbeat_timeout_s: float = 60.0
    stacks_file: Path | None = None


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
    verb: str = ""
    idle_s: float = 0.0


class Trouble(enum.Enum):
    """What is wrong with a rank; the first of these that any rank has is what its peers wait for."""

    GONE = enum.auto()
    SILENT = enum.auto()
    STALLED = enum.auto()


def judge(signs: Mapping[int, Sign], now: float, limits: Limits) -> dict[int, Trouble]:
    """The ranks that have failed, all with the same trouble; empty while all is well.

    GONE: its connection broke and did not come back. SILENT: no sign of life in time, perhaps because it never
    connected. STALLED: it answers and its verb makes no progress.
    """
    found: dict[int, Trouble] = {}
    for rank, sign in signs.items():
        silence = now - sign.heard_at
        if sign.connection is Connection.BROKEN and silence > RECONNECT_S:
            found[rank] = Trouble.GONE
        elif silence > limits.heartbeat_timeout_s:
            found[rank] = Trouble.SILENT
        elif sign.verb and sign.idle_s + silence > limits.stall_timeout_s:
            found[rank] = Trouble.STALLED
    worst = min(found.values(), key=lambda trouble: trouble.value, default=None)
    return {rank: trouble for rank, trouble in found.items() if trouble is worst}


_WAITING = ("torch/distributed/", "vllm/distributed/", "megatron_rl/hybrid_engine/exchange.py")
"""Files whose functions wait for other ranks."""


def waits_for_peers(stacks: str) -> bool:
    """Whether the main thread of a rank, the first one in `stacks`, is in a collective or a message."""
    main = stacks.split("\nthread ")[0]
    innermost = [line for line in main.splitlines() if line.lstrip().startswith("File ")][-3:]
    return any(file in line for file in _WAITING for line in innermost)


@dataclass
class Watch:
    """Listens on `host` for the signs of life of `num_ranks` ranks, in a thread, until `close`.

    `expect` starts the clock of ranks that have yet to connect; `trouble` is what `judge` found last.
    """

    host: str
    num_ranks: int
    limits: Limits
    trouble: dict[int, Trouble] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((self.host, 0), backlog=self.num_ranks)
        self._signs: dict[int, Sign] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._stacks: dict[int, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def address(self) -> WatchAddress:
        """What a rank needs to connect."""
        return WatchAddress(*self._listener.getsockname()[:2], self._token)

    @property
    def signs(self) -> dict[int, Sign]:
        """Rank -> its last sign of life."""
        return dict(self._signs)

    def expect(self, ranks: Sequence[int]) -> None:
        """From now on these ranks must give signs of life."""
        now = time.monotonic()
        self._signs |= {rank: Sign(now) for rank in ranks if rank not in self._signs}

    def stacks(self, timeout_s: float) -> dict[int, str]:
        """Ask every connected rank for the stacks of its threads; those that have answered after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._stacks = {}
        asked = list(self._writers)
        for rank in asked:
            self._loop.call_soon_threadsafe(self._ask, rank)
        while len(self._stacks) < len(asked) and time.monotonic() < deadline:
            time.sleep(0.05)
        return dict(sorted(self._stacks.items()))

    def close(self) -> None:
        """Stop listening. Repeating it is free."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._listen_to, sock=self._listener, limit=LONGEST_LINE)
        )
        looking = self._loop.create_task(self._look())
        self._loop.run_forever()
        looking.cancel()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _look(self) -> None:
        """Judge once a second; a pause of this process itself is nobody's silence."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            if (pause := now - before) > LONG_PAUSE_S:
                self._signs = {
                    rank: replace(sign, heard_at=sign.heard_at + pause) for rank, sign in self._signs.items()
                }
            before = now
            self.trouble = judge(self._signs, now, self.limits)

    async def _listen_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), timeout=10.0))
            if not hmac.compare_digest(str(hello["token"]), self._token):
                return
            rank = int(hello["rank"])
            self._writers[rank] = writer
            self._signs[rank] = Sign(time.monotonic(), Connection.OPEN)
            while line := await reader.readline():
                self._take(rank, json.loads(line))
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass  # a stranger, or a connection that broke in the middle of a line
        finally:
            if rank is not None and self._writers.get(rank) is writer:
                del self._writers[rank]
                self._signs[rank] = replace(
                    self._signs[rank], connection=Connection.BROKEN, heard_at=time.monotonic()
                )
            writer.close()

    def _take(self, rank: int, content: dict) -> None:
        if "stacks" in content:
            self._stacks[rank] = str(content["stacks"])
        else:
            doing, idle_s = (str(content["role"]), str(content["verb"])), float(content["idle_s"])
            self._signs[rank] = Sign(time.monotonic(), Connection.OPEN, *doing, idle_s)

    def _ask(self, rank: int) -> None:
        with suppress(KeyError, OSError):
            self._writers[rank].write(b"stacks\n")
