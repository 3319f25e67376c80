"""Children of this process on Linux: forked with a channel, killed with their parent, adopted as orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Self

from megatron_rl.cluster.channel import LONGEST, Channel

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ForkedChild:
    """A fork of this process. pidfd: readable once it has ended. channel: this process's end."""

    pid: int
    pidfd: int
    channel: Channel

    @classmethod
    def start(cls, serve: Callable[[Channel], None], longest: int = LONGEST) -> Self:
        """Fork a child that calls `serve` with its end of a channel and then exits.

        The child exits with 0, or with 1 after an error, which it prints. It gets SIGKILL when this process dies.
        longest: bytes of a message of the child's.
        """
        ours, theirs = Channel.pair(longest)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return cls(pid, os.pidfd_open(pid), ours)
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

    def end(self) -> int:
        """Kill it, and its process group if it has made one; return its exit code, negative for a signal.

        Raises ChildProcessError where it is not this process's child, or has been waited for.
        """
        self.channel.close()
        os.close(self.pidfd)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        kill_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def kill_group(leader: int) -> None:
    """Kill a process group, if there is one of this leader. The leader must not have been waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. Exits if that has happened. Raises OSError."""
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(0)


def variables_with(**more: str) -> dict[str, str]:
    """Return the environment of a process that this one starts: its own, and `more`."""
    return {**os.environ, **more}


def mark_children(variable: str, value: str) -> None:
    """Have all that this process starts from here on inherit an environment variable."""
    os.environ[variable] = value


def how_ended(code: int) -> str:
    """Say how a process with this return code, as of `subprocess.Popen`, has ended."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


def signal_name(number: int) -> str:
    """Return the name of a signal; of real-time signals Python knows the first and the last one alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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


def adopter() -> int:
    """Return the process that becomes the parent of this one's orphaned descendants: itself, if it adopts orphans, else
    its parent, as it does.
    """
    adopts = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts))
    return os.getpid() if adopts.value else os.getppid()


def adopt_orphans() -> None:
    """Do as `adopting_orphans`, until this process ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: object) -> None:
    unused = (ctypes.c_ulong(0),) * 3
    if _LIBC.prctl(option, argument, *unused):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
