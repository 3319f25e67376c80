"""The journal of a service: every request that was taken, and every reply, in a file that only grows.

A record is a line of JSON, then as many bytes as it declares, then a line's end. The file can be read up to a record
that was cut off while it was written, as by kill -9; acknowledged ones are complete, since they were synchronised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError

JOURNAL_FILE = "journal"
REQUEST, REPLY, EXPIRY = "request", "reply", "expiry"
DIGEST_DIGITS = 16


def digest_of(content: bytes) -> str:
    """Digits that differ for different contents."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]


class RequestJournal:
    """Appends records. Every call returns when its record is on the disk."""

    def __init__(self, path: Path) -> None:
        """Continue a file, whose cut-off end is removed, or begin one."""
        self._file = path.open("ab")
        whole = sum(size for _, _, size in sized_records(path))
        self._file.truncate(whole)

    def add(self, head: dict[str, Any], content: bytes = b"") -> None:
        """Append one record; head: JSON."""
        sized = head | {"bytes": len(content), "sha256": digest_of(content)}
        self._file.write(json.dumps(sized, separators=(",", ":")).encode() + b"\n" + content + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def sized_records(path: Path) -> Iterator[tuple[dict[str, Any], bytes, int]]:
    """Yield (head, content, bytes of the record) of every whole record, up to the first that is cut off.

    Raises ConfigError for a file that is no journal.
    """
    with path.open("rb") as file:
        while line := file.readline():
            try:
                head = json.loads(line)
                size, digest = int(head["bytes"]), head["sha256"]
            except (ValueError, KeyError, TypeError):
                if not line.endswith(b"\n"):
                    return
                raise ConfigError(f"{path} is no journal of a service: its line {line[:60]!r} is no record") from None
            content = file.read(size)
            if file.read(1) != b"\n" or digest_of(content) != digest:
                return
            yield head, content, len(line) + size + 1


def records(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield (head, content) of every whole record; nothing where there is no file."""
    if path.exists():
        yield from ((head, content) for head, content, _ in sized_records(path))
