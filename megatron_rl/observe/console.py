"""What a program prints is for people: where nobody reads it any more, it is dropped and the program goes on."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

STANDARD = (0, 1, 2)
"""stdin, stdout and stderr, which the files of a program must never become."""
NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)
"""What writing to a closed pipe, a closed terminal and a closed descriptor fails with."""


def drop_unread_output() -> None:
    """Let no write to stdout or stderr raise from now on in this process; call it before anything is printed.

    Dropped is what a closed pipe (`| head -1`), a closed terminal, a full disk behind `> file` or a descriptor that was
    never open (`>&-`) does not take. Characters that the encoding lacks are written as escapes. A stream that somebody
    has put in place of the interpreter's own is left alone.
    """
    _fill_closed()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # the descriptor was closed when the interpreter started; it may be another file by now
            replacement = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="backslashreplace")
        else:
            with suppress(OSError):
                stream.flush()
            replacement = _forgiving(stream, descriptor)
        setattr(sys, name, replacement)
        setattr(sys, f"__{name}__", replacement)


def lost_output(stream: TextIO) -> OSError | None:
    """Why text was dropped that somebody waits for, as behind `> file` on a full disk; None where none was."""
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "lost", None)


class _Forgiving(io.FileIO):
    """A descriptor that takes everything, and drops what cannot be written."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NOBODY_READS:
                self.lost = error
            return memoryview(data).nbytes


def _forgiving(stream: io.TextIOWrapper, descriptor: int) -> io.TextIOWrapper:
    raw = _Forgiving(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _fill_closed() -> None:
    """Open what is closed of `STANDARD`: the next file would get such a number, and all that is printed to it."""
    opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    while opened in STANDARD:
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
