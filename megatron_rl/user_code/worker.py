"""The process that runs the user's code job by job, and the JSON that it sends to the supervisor.

The supervisor may kill this process at any moment, and it rebuilds no object of the user's: a reply is numbers and
texts. The user's code may also write to any descriptor, so the supervisor checks every message. Jobs whose function is
`async` run side by side; others run one after the other, in the main thread. This process alone may wait until it is
read: the supervisor reads whenever there is something.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from megatron_rl.cluster.channel import Channel, GarbledError
from megatron_rl.errors import ConfigError
from megatron_rl.user_code.user_calls import is_worn_out

READY = "ready"
"""A worker has loaded the user's code."""

WORN_OUT = "worn out"
"""A worker has lost that many threads to calls that do not return that it asks to be replaced."""

TIMED_OUT, CRASHED = "timed_out", "crashed"
"""How a job can fail in the process around it."""
LONGEST_ANSWER = 1 << 24
"""Bytes of one reply."""
NUMBER = struct.Struct("!q")
WITHOUT_ANSWER = -1
"""The number of a job that nobody waits for."""

Message = str | int | tuple[int, Any]
"""READY, WORN_OUT or why the user's code cannot be loaded; the number of a job that begins; (number, reply)."""


class Work(Protocol):
    """The work of a supervisor's workers. It is pickled; its replies travel as JSON.

    noun: what the user's code is, in messages. timeout_key: of the time limit. unusable: how a job fails whose reply
    cannot be used.
    """

    @property
    def noun(self) -> str: ...
    @property
    def timeout_key(self) -> str: ...
    @property
    def unusable(self) -> str: ...

    def load(self) -> Callable[[Any], Any]:
        """Return the function that turns a job's content into a reply, or into an awaitable one.

        Raises ConfigError when the user's code cannot be loaded.
        """

    def written(self, answer: Any) -> Any:
        """Return a reply as JSON values."""

    def read(self, content: Any) -> Any:
        """Return the reply that JSON values are. Raises ValueError for others."""

    def failed(self, kind: str, reason: str) -> Any:
        """Return the reply to a job that has failed. kind: `TIMED_OUT`, `CRASHED`, `unusable`."""


def packed_job(number: int | None, content: bytes) -> bytes:
    """Return a job as the message for a worker. content: pickled. number: None if nobody waits for the reply."""
    return NUMBER.pack(WITHOUT_ANSWER if number is None else number) + content


def work(supervisor: Channel, of: Work) -> None:
    """Load the user's code, send READY or the reason why it cannot be loaded, then do jobs.

    Returns when the supervisor has ended.
    """
    os.setsid()  # the processes that the user's code starts are in this group and are killed with it
    for number in (signal.SIGTERM, signal.SIGINT):  # they must not inherit the supervisor's handlers
        signal.signal(number, signal.SIG_DFL)
    try:
        function = of.load()
    except ConfigError as error:
        supervisor.send_whole(message_of(str(error)))
        return
    supervisor.send_whole(message_of(READY))
    jobs = _Jobs(supervisor, of, function)
    while True:
        try:
            message = supervisor.receive()
        except EOFError:
            return
        (number,) = NUMBER.unpack_from(message)
        jobs.do(None if number == WITHOUT_ANSWER else number, pickle.loads(memoryview(message)[NUMBER.size :]))


class _Jobs:
    """The jobs of one worker. What waits (`async`) does so in a thread of its own, next to the main thread."""

    def __init__(self, supervisor: Channel, of: Work, function: Callable[[Any], Any]) -> None:
        self._supervisor, self._work, self._function = supervisor, of, function
        self._loop: asyncio.AbstractEventLoop | None = None

    def do(self, number: int | None, content: Any) -> None:
        """Do a job, or begin it if it is one that waits. number: None if nobody waits for the reply."""
        if number is not None:
            self._supervisor.send_whole(message_of(number))
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
        message = message_of((number, self._work.written(answer)))
        if len(message) > LONGEST_ANSWER:
            reason = f"{self._work.noun} returned values of {len(message)} bytes; "
            reason += f"a reply may take {LONGEST_ANSWER} bytes"
            message = message_of((number, self._work.written(self._work.failed(self._work.unusable, reason))))
        if is_worn_out():  # said before the reply, behind which the supervisor may deal the next job
            self._supervisor.send_whole(message_of(WORN_OUT))
        self._supervisor.send_whole(message)


def message_of(message: Message) -> bytes:
    """Return a message for the supervisor."""
    return json.dumps(message, ensure_ascii=False, allow_nan=False).encode()


def read_message(content: bytes) -> Message:
    """Parse a message of a worker, whose values are of exactly the plain types. Raises GarbledError."""
    try:
        read = json.loads(content)
        if isinstance(read, list):
            number, answer = read
            if type(number) is int:
                return number, answer
        elif isinstance(read, str) or type(read) is int:
            return read
    except (ValueError, TypeError, RecursionError):
        pass
    raise GarbledError(f"{content[:80]!r}")
