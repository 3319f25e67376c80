"""The process that runs the user's code job by job, and the lines of JSON that it sends to the keeper.

The keeper may kill this process at any moment, and it rebuilds no object of the user's: an answer is one line of
numbers and texts. The user's code may also write to any descriptor, so the keeper never waits for the rest of a line
and checks every line. Jobs whose function is `async` run side by side; others run one after the other, in the main
thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.user_code.work import READY, Work

LARGEST_LINE = 1 << 24
"""Bytes of one answer."""

READ_AT_ONCE = 1 << 16

Message = str | int | tuple[int, Any]
"""READY or the reason why the user's code cannot be loaded; the number of a job that begins; (number, answer)."""


class GarbledError(Exception):
    """The keeper received a line that no worker sends; the message quotes it."""


def work(connection: Connection, of: Work) -> None:
    """Load the user's code, send READY or the reason why it cannot be loaded, then do lists of (number, content).

    Returns when the connection ends.
    """
    os.setsid()  # the processes that the user's code starts are in this group and are killed with it
    for number in (signal.SIGTERM, signal.SIGINT):  # they must not inherit the keeper's handlers
        signal.signal(number, signal.SIG_DFL)
    try:
        function = of.load()
    except ConfigError as error:
        send(connection, str(error))
        return
    send(connection, READY)
    jobs = _Jobs(connection, of, function)
    while True:
        try:
            received = connection.recv()
        except EOFError:
            return
        for number, content in received:
            jobs.do(number, content)


class _Jobs:
    """The jobs of one worker. What waits (`async`) does so in a thread of its own, beside the main thread."""

    def __init__(self, connection: Connection, of: Work, function: Callable[[Any], Any]) -> None:
        self._connection, self._work, self._function = connection, of, function
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def do(self, number: int | None, content: Any) -> None:
        """Do a job, or begin it if it is one that waits. number: None if nobody waits for the answer."""
        if number is not None:
            self._write(_line(number))
        answer = self._function(content)
        if inspect.isawaitable(answer):
            asyncio.run_coroutine_threadsafe(self._later(number, answer), self._running_loop())
        else:
            self._reply(number, answer)

    async def _later(self, number: int | None, answer: Any) -> None:
        try:
            self._reply(number, await answer)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return self._loop

    def _reply(self, number: int | None, answer: Any) -> None:
        if number is None:
            return
        line = _line((number, self._work.written(answer)))
        if len(line) > LARGEST_LINE:
            reason = f"{self._work.noun} returned numbers and texts of {len(line)} bytes; "
            reason += f"an answer may take {LARGEST_LINE} bytes"
            line = _line((number, self._work.written(self._work.too_long(reason))))
        self._write(line)

    def _write(self, line: bytes) -> None:
        with self._lock:
            _write(self._connection, line)


def send(connection: Connection, message: Message) -> None:
    """Send a message to the keeper. Raises OSError."""
    _write(connection, _line(message))


def _write(connection: Connection, line: bytes) -> None:
    while line:
        line = line[os.write(connection.fileno(), line) :]


def _line(message: Message) -> bytes:
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class Inbox:
    """The keeper's end of one worker's connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._rest = b""

    def take(self) -> Iterator[Message]:
        """Yield the messages that have arrived, without waiting. Raises GarbledError after the messages before it."""
        while self.connection.poll():
            try:
                chunk = os.read(self.connection.fileno(), READ_AT_ONCE)
            except OSError:
                return
            if not chunk:
                return
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                yield read_line(line)
            if len(self._rest) > LARGEST_LINE:
                raise GarbledError(f"a line of more than {LARGEST_LINE} bytes")


def read_line(line: bytes) -> Message:
    """Parse one message, whose values are of exactly the plain types. Raises GarbledError."""
    try:
        content = json.loads(line)
        if isinstance(content, list):
            number, answer = content
            if type(number) is int:
                return number, answer
        elif isinstance(content, str) or type(content) is int:
            return content
    except (ValueError, TypeError, RecursionError):
        pass
    raise GarbledError(f"{line[:80]!r}")
