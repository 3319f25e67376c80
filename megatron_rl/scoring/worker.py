"""The process that calls the reward function sample by sample, and the lines of JSON that it sends to the keeper.

The user's code runs here. The keeper may kill this process at any moment, and it rebuilds no object of the user's: an
answer is one line of numbers and texts. The user's code may also write to any descriptor, so the keeper never waits for
the rest of a line and checks every line.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.errors import ConfigError
from megatron_rl.scoring.function import RewardSource, load_reward_function
from megatron_rl.scoring.outcome import FAILURES, Outcome, failed, score_sample

READY = "ready"
"""The worker has loaded the reward function."""

LARGEST_LINE = 1 << 24
"""Bytes of one answer."""

READ_AT_ONCE = 1 << 16


class GarbledError(Exception):
    """The keeper received a line that no worker sends; the message quotes it."""


def work(connection: Connection, source: RewardSource) -> None:
    """Load the function, send READY (or the reason why it cannot be loaded), then score lists of (row, Sample).

    Returns when the connection ends.
    """
    os.setsid()  # the processes that the function starts are in this group and are killed with it
    for number in (signal.SIGTERM, signal.SIGINT):  # the function's children must not inherit the keeper's handlers
        signal.signal(number, signal.SIG_DFL)
    try:
        function = load_reward_function(source)
    except ConfigError as error:
        send(connection, str(error))
        return
    send(connection, READY)
    while True:
        try:
            chunk = connection.recv()
        except EOFError:
            return
        for row, sample in chunk:
            send(connection, (row, score_sample(function, sample)))


def send(connection: Connection, message: str | tuple[int, Outcome]) -> None:
    """Send READY, the reason why the function cannot be loaded, or (row, outcome). Raises OSError."""
    line = _line(message)
    if len(line) > LARGEST_LINE and not isinstance(message, str):
        rule = f"an answer may take {LARGEST_LINE} bytes"
        reason = f"the reward function returned numbers and texts of {len(line)} bytes; {rule}"
        line = _line((message[0], failed("no_score", reason)))
    while line:
        line = line[os.write(connection.fileno(), line) :]


def _line(message: str | tuple[int, Outcome]) -> bytes:
    content: Any = message
    if not isinstance(message, str):
        row, outcome = message
        content = [row, outcome.score, outcome.extras, outcome.failure, outcome.reason]
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class Inbox:
    """The keeper's end of one worker's connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._rest = b""

    def take(self) -> Iterator[str | tuple[int, Outcome]]:
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


def read_line(line: bytes) -> str | tuple[int, Outcome]:
    """Parse one message; its values are of exactly the plain types. Raises GarbledError."""
    try:
        content = json.loads(line)
        if isinstance(content, str):
            return content
        row, score, extras, failure, reason = content
        is_valid = (
            isinstance(row, int) and isinstance(failure, str) and isinstance(reason, str) and isinstance(extras, dict)
        )
        is_valid = is_valid and all(isinstance(value, str) or _is_finite(value) for value in extras.values())
        is_valid = is_valid and (failure in FAILURES and score is None if failure else _is_finite(score))
    except (ValueError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise GarbledError(f"{line[:80]!r}")
    return row, Outcome(score, extras, failure, reason)


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
