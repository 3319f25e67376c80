"""Children of this process on Linux: forked with a pipe, killed by the kernel with their parent, adopted as orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37

_LIBC = ctypes.CDLL(None, use_errno=True)


def fork_child(serve: Callable[[Connection], None]) -> tuple[int, Connection]:
    """Fork a child that calls `serve` with its end of a pipe and then exits; return its pid and the other end.

    The child exits with 0, or with 1 after an error, which it prints. It gets SIGKILL when this process dies.
    """
    ours, theirs = Pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    code = 1
    try:
        ours.close()
        die_with(parent)
        serve(theirs)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. Exits if that has happened. Raises OSError."""
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def variables_with(**more: str) -> dict[str, str]:
    """Return the environment of a process that this one starts: its own, and `more`."""
    return {**os.environ, **more}


def how_ended(code: int) -> str:
    """Say how a process with this return code, as of `subprocess.Popen`, has ended."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make this process, instead of the machine's first one, the parent of every descendant that loses its parent."""
    was = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was))
    adopt_orphans()
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(was.value))


def adopt_orphans() -> None:
    """Do as `adopting_orphans`, until this process ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: object) -> None:
    unused = (ctypes.c_ulong(0),) * 3
    if _LIBC.prctl(option, argument, *unused):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
