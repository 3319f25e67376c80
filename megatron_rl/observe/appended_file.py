"""Files that a kill, a full disk or a deleted folder does not damage, and a link does not lead elsewhere."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def replace_file(path: Path, data: bytes) -> None:
    """Have a file consist of `data`, from one instant to the next, so that a kill leaves the old or the new content.

    A link at `path` is replaced, and what it leads to stays as it is. Raises OSError. `checkpoint.durable` also waits
    for the disk.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    with new_file(unfinished) as opened:
        opened.write(data)
    unfinished.replace(path)


def new_file(path: Path) -> BinaryIO:
    """Open a file for writing that was made by this call, in place of a file or link of its name. Raises OSError."""
    path.unlink(missing_ok=True)
    return path.open("xb")  # follows no link, either


def opened_to_append(path: Path) -> io.FileIO:
    """Open a file for reading and appending, unbuffered. Raises OSError, also where a link is in its place."""
    return io.FileIO(path, "a+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


class AppendedFile:
    """A file that only grows. One process holds it open for as long as it appends."""

    def __init__(self, path: Path) -> None:
        """Append to what is in `path`. Raises OSError."""
        self.path = path
        self._file = opened_to_append(path)

    def append(self, data: bytes) -> None:
        """Write all of `data` to the disk's cache, or raise OSError and write none of it.

        A file that was deleted, alone or with its folder, is made again with its content. A file that has taken its
        place is appended to.
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
            opened = opened_to_append(self.path)
        else:
            content = b""
            with suppress(OSError):  # over a network a deleted file cannot be read any more
                self._file.seek(0)
                content = self._file.readall()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, content)
            opened = opened_to_append(self.path)
        self._file.close()
        self._file = opened
