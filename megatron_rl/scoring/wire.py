"""What a reward worker says to its keeper: lines of JSON, so that no object of the user's is ever rebuilt there.

The user's code runs in the worker and may write to any descriptor, so the keeper never waits for the rest of a line
and takes nothing for an answer that is not one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.scoring.outcome import FAILURES, Outcome, failed

READY = "ready"
"""The worker has loaded the reward function."""

LARGEST_LINE = 1 << 24
"""Bytes of one answer."""

READ_AT_ONCE = 1 << 16


class GarbledError(Exception):
    """What came is nothing that a worker says; the message says what came."""


def send(connection: Connection, said: str | tuple[int, Outcome]) -> None:
    """Send READY, or why the function cannot be loaded, or (row, outcome). Raises OSError."""
    line = _line(said)
    if len(line) > LARGEST_LINE and not isinstance(said, str):
        rule = f"an answer may take {LARGEST_LINE} bytes"
        reason = f"the reward function returned numbers and texts of {len(line)} bytes; {rule}"
        line = _line((said[0], failed("no_score", reason)))
    while line:
        line = line[os.write(connection.fileno(), line) :]


def _line(said: str | tuple[int, Outcome]) -> bytes:
    content: Any = said
    if not isinstance(said, str):
        row, outcome = said
        content = [row, outcome.score, outcome.extras, outcome.failure, outcome.reason]
    return json.dumps(content, ensure_ascii=False, allow_nan=False).encode() + b"\n"


class Inbox:
    """The keeper's end of one worker's connection."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._rest = b""

    def take(self) -> Iterator[str | tuple[int, Outcome]]:
        """All that has come, without waiting. Raises GarbledError; what came before is yielded first."""
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
    """One thing that a worker said, of exact plain types. Raises GarbledError."""
    try:
        content = json.loads(line)
        if isinstance(content, str):
            return content
        row, score, extras, failure, reason = content
        right = (
            isinstance(row, int) and isinstance(failure, str) and isinstance(reason, str) and isinstance(extras, dict)
        )
        right = right and all(isinstance(value, str) or _is_finite(value) for value in extras.values())
        right = right and (failure in FAILURES and score is None if failure else _is_finite(score))
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise GarbledError(f"{line[:80]!r}")
    return row, Outcome(score, extras, failure, reason)


def _is_finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
