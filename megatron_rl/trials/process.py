"""One process in a session of its own, whose whole family ends with it.

Killing a process group is not enough: Ray's workers and the reward's processes leave it for groups and sessions of
their own. So this process adopts all orphans below it while the command runs (Linux's child subreaper). That makes the
whole family its descendants, and at the end it kills and waits for all that are left.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from megatron_rl.cluster.child_processes import adopting_orphans, die_with
from megatron_rl.cluster.stale_processes import descendants, end


@contextmanager
def supervised(command: Sequence[str], output: Path, grace_s: float = 10.0) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` in a session of its own and append its output to `output`; the body watches it.

    At the end of the body, also by an exception, a process that still runs gets SIGTERM and `grace_s` seconds to end by
    itself; a second signal to this process cuts them short. Then the rest of its family is killed and waited for. The
    process gets SIGKILL when this process dies. Raises RuntimeError when a process cannot be killed.
    """
    before = descendants()
    with adopting_orphans(), output.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        try:
            yield process
        finally:
            try:
                if process.poll() is None:
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(grace_s)
            finally:
                _kill_family(process, before)


def _kill_family(process: subprocess.Popen[bytes], before: set[psutil.Process]) -> None:
    """Kill and wait for all descendants that are not in `before`. Signals are blocked until then."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        process.kill()
        process.wait()
        left = end(lambda: _unreaped(descendants() - before))
        if left:
            raise RuntimeError(f"processes that cannot be killed: {sorted(member.pid for member in left)}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _unreaped(family: set[psutil.Process]) -> set[psutil.Process]:
    """The processes that still run. The others are waited for, if they are children or adopted orphans."""
    reaped = set()
    for member in family:
        with suppress(ChildProcessError):
            if os.waitpid(member.pid, os.WNOHANG)[0]:
                reaped.add(member)
    return family - reaped
