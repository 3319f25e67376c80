"""A file that only grows, and that neither a full disk nor a deleted folder damages."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class AppendedFile:
    """Opened by one process for as long as that appends to it."""

    def __init__(self, path: Path) -> None:
        """Append to what is in `path`. Raises OSError."""
        self.path = path
        self._file = path.open("a+b", buffering=0)

    def append(self, data: bytes) -> None:
        """Write all of `data` to the disk's cache, or, with OSError, nothing of it.

        Where the file has been deleted, with its folder or alone, it is there again with all that was in it. Where
        another has taken its place, that one is appended to.
        """
        if not self._is_in_place():
            self._open_again()
        size = os.fstat(self._file.fileno()).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _open_again(self) -> None:
        if self.path.exists():
            opened = self.path.open("a+b", buffering=0)
        else:
            content = b""
            with suppress(OSError):  # over a network a deleted file cannot be read any more
                self._file.seek(0)
                content = self._file.readall()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self.path.with_name(self.path.name + ".unfinished")
            unfinished.write_bytes(content)
            unfinished.replace(self.path)
            opened = self.path.open("a+b", buffering=0)
        self._file.close()
        self._file = opened
