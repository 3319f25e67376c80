"""Tell files from pipes, devices and other things at a path, on which opening may wait forever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

FILE, NOTHING, PIPE, DEVICE = "a file", "nothing", "a pipe", "a device"
ABSENT = "it does not exist"
_KINDS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: PIPE,
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: DEVICE,
    stat.S_IFBLK: DEVICE,
}


def kind_of(path: Path) -> str:
    """The kind of the thing at `path`, with its article. Links are followed; nothing is opened."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "of a kind that cannot be read")
    except (FileNotFoundError, NotADirectoryError):
        return "a link to nothing" if path.is_symlink() else NOTHING
    except ValueError:  # a null byte, which no name has
        return NOTHING
    except OSError as error:
        return "a loop of links" if error.errno == errno.ELOOP else f"not to be looked at ({error.strerror})"


def instead_of_file(path: Path) -> str | None:
    """Return a clause that says what is there instead of a file, or None for a file."""
    kind = kind_of(path)
    if kind == FILE:
        return None
    return ABSENT if kind == NOTHING else f"it is {kind}"


def read_whole(path: Path, largest: int) -> bytes:
    """Return the content of a file. Neither a pipe nor a device at `path` can hold the reader up.

    largest: bytes. Raises OSError, with a reason for people in `strerror`, for what is no file, or has more bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        kind = _KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode), "of another kind")
        if kind != FILE:
            raise OSError(errno.EINVAL, f"it is {kind}, and no file")
        content: bytes | None = opened.read(largest + 1)
    if content is None:  # such as /proc/kmsg, which says that it is a file
        raise OSError(errno.EAGAIN, "reading it would wait")
    if len(content) > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes")
    return content
