"""The journal of a service: every request that was taken, and every reply, since the last snapshot.

A record is a line of JSON, then as many bytes as it declares, then a line's end. The file can be read up to a record
that was cut off while it was written, as by kill -9; acknowledged ones are complete, since they were synchronised.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.errors import ConfigError

JOURNAL_FILE = "journal"
REQUEST, REPLY, REFUSAL, EXPIRY, SNAPSHOT = "request", "reply", "refusal", "expiry", "snapshot"
DIGEST_DIGITS = 16


def digest_of(content: bytes) -> str:
    """Digits that differ for different contents."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]


class RequestJournal:
    """Appends records. Every call returns when its record is on the disk."""

    def __init__(self, path: Path) -> None:
        """Continue a file, whose cut-off end is removed, or begin one."""
        self._path, self._file = path, path.open("ab")
        self.num_bytes = sum(size for _, _, size in sized_records(path))
        """Bytes of records since the last snapshot."""
        self._file.truncate(self.num_bytes)

    def add(self, head: dict[str, Any], content: bytes = b"") -> None:
        """Append one record; head: JSON."""
        self.num_bytes += self._write(self._file, head, content)

    @staticmethod
    def _write(file: BinaryIO, head: dict[str, Any], content: bytes) -> int:
        sized = head | {"bytes": len(content), "sha256": digest_of(content)}
        record = json.dumps(sized, separators=(",", ":")).encode() + b"\n" + content + b"\n"
        file.write(record)
        file.flush()
        os.fsync(file.fileno())
        return len(record)

    def restart(self, head: dict[str, Any], content: bytes) -> None:
        """Replace the file by one with this record alone, whole or not at all."""
        unfinished = self._path.with_suffix(".unfinished")
        file = unfinished.open("wb")
        self._write(file, head, content)
        unfinished.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self._file.close()
        self._file, self.num_bytes = file, 0

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
