"""Recognise on any process that a file cannot be written, and report it on the driver in one sentence.

Needs neither torch nor Megatron.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.checkpoint.folders import find
from megatron_rl.checkpoint.manifest import ManifestError, broken_files, read_manifest
from megatron_rl.errors import MegatronRLError, StorageError

CUT_SHORT = re.compile(r"iostream error|inline_container\.cc|PytorchStreamWriter failed writing|file write failed")
"""torch's message for a file of which the system took only a part, without the reason."""
_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOENT, errno.EACCES, errno.EPERM)
FREE = "bytes are free"
QUOTED_ERRNO = re.compile(rf"(\[Errno |\(os error )({'|'.join(map(str, _NUMBERS))})[\])]")
"""The form in which megatron-core and safetensors quote the system's error in errors that are no OSError."""


@contextmanager
def writing(target: Path | None = None) -> Iterator[None]:
    """On any process: raise StorageError with the reason alone if the body cannot write a file.

    target: the path that is being written. The message has the free bytes of its disk at the moment of the failure,
    while the half-written file is still there.
    """
    try:
        yield
    except Exception as error:
        reason = storage_reason(error)
        if reason is None:
            raise
        raise StorageError(reason if target is None else _with_room(reason, target)) from error


@contextmanager
def storing(what: str, root: Path) -> Iterator[None]:
    """On the driver: raise StorageError with all that a user needs if ranks or the driver cannot write for a run.

    what: the subject of the sentence. root: the run's folder, whose free bytes and last checkpoint are named.
    """
    try:
        yield
    except Exception as error:
        reason = storage_reason(error)
        if reason is None:
            raise
        reason = _with_room(reason, root)
        raise StorageError(f"{what} could not be written to {root}: {reason}; {last_checkpoint(root)}") from error


def _with_room(reason: str, target: Path) -> str:
    """Add the free bytes to an error, unless its message has them already."""
    return reason if FREE in reason else f"{reason}; {free_space(target)}"


def storage_reason(error: BaseException) -> str | None:
    """The reason why a file could not be written, in one line; None if `error` has another cause."""
    if isinstance(error, StorageError | ManifestError):
        return _first_line(error)
    if isinstance(error, MegatronRLError):
        return None
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        if error.strerror is None:
            return _first_line(error)
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if CUT_SHORT.search(str(error)):
        cause = error.__context__
        return (isinstance(cause, OSError) and storage_reason(cause)) or "a file could not be written in full"
    return _first_line(error) if QUOTED_ERRNO.search(str(error)) else None


def free_space(root: Path) -> str:
    """A clause with the number of free bytes on the disk of `root`, which need not exist."""
    for folder in (root, *root.absolute().parents):
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            continue
        return f"{usage.free:,} of {usage.total:,} {FREE} there"
    return "its free space is unknown"


def last_checkpoint(root: Path) -> str:
    """A clause that names the checkpoint from which the run can be resumed."""
    try:
        for found in find(root):
            try:
                if not broken_files(found.path, read_manifest(found.path), checksums=False):
                    return f"the last complete checkpoint is {found.path.name}; the same command resumes from it"
            except ManifestError:
                continue
    except OSError as error:
        return f"its checkpoints cannot be read: {error}"
    return "there is no complete checkpoint"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].removeprefix("Worker failure: ")  # megatron-core's
