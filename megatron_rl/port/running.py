"""Run a script's shell to its end in a folder of its own, within limits, and remove the folder."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from megatron_rl.errors import ConfigError
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.scratch_folder import remove_folder

POLL_S = 0.2
MOST_PROCESSES, MOST_FILES, MOST_BYTES = sandbox.TOTALS[:3]
"""Most processes of a script's group, and most files and bytes of its folder, at once."""
MOST_READ_BYTES = 1 << 20
"""Bytes of stderr that are kept, from the end."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make an empty folder, removed at the end, and on SIGTERM and SIGHUP, with all that is in it.

    It may be of any depth; links are not followed.
    """
    folder = Path(tempfile.mkdtemp(prefix="megatron_rl_port_"))
    try:
        with _raised((signal.SIGTERM, signal.SIGHUP)):
            yield folder
    finally:
        remove_folder(folder)


@contextlib.contextmanager
def _raised(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Make signals raise SystemExit with their exit codes; in other threads than the main one, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_script(
    script: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    work: Path,
    time_limit_s: float,
    is_trusted: bool,
) -> str:
    """Run a script and return the end of its stderr. work: its current folder; it can write to the parent of it alone.

    Every process of its group has ended when this returns, and only a trusted script can leave the group. Raises
    ConfigError where the kernel does not sandbox it, and at the limits.
    """
    read, write = os.pipe()
    program = ["/bin/bash", str(script.resolve()), *arguments]
    if not is_trusted:
        program = [sys.executable, "-I", "-S", sandbox.__file__, str(write), str(work.parent), *program]
    with open(read, "rb") as status:
        try:
            shell = subprocess.Popen(
                program,
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(write,),
            )
        finally:
            os.close(write)
        try:
            if not is_trusted:
                _refuse_unconfined(script, status.read())
            return _wait(script, shell, work.parent, time_limit_s).decode(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            if shell.stderr is not None:
                shell.stderr.close()


def read_record(file: Path) -> bytes:
    """Read what the stubs wrote; empty where the script left no regular file."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        is_file = stat.S_ISREG(os.fstat(opened).st_mode)
        return os.read(opened, sandbox.MOST_FILE_BYTES) if is_file else b""
    finally:
        os.close(opened)


def _refuse_unconfined(script: Path, status: bytes) -> None:
    if status == sandbox.READY:
        return
    reason = status.removeprefix(sandbox.READY).decode(errors="replace") or "what confines it cannot be started"
    raise ConfigError(
        f"{script} is not run: {reason}, and nothing else keeps it from your files and processes; where you trust it: "
        f"megatron-rl port --trust-script {script}; or give its arguments themselves: megatron-rl port -- KEY=VALUE ..."
    )


def _wait(script: Path, shell: subprocess.Popen[bytes], folder: Path, time_limit_s: float) -> bytes:
    """Wait for the shell, and return the end of its stderr. Raises ConfigError where it passes a limit.

    It stays a zombie, so that no other process gets its number before its group is ended.
    """
    pipe: IO[bytes] | None = shell.stderr
    assert pipe is not None
    text, ended, limit = b"", os.pidfd_open(shell.pid), time.monotonic() + time_limit_s
    poll, checked = select.poll(), time.monotonic()
    poll.register(ended, select.POLLIN)
    poll.register(pipe, select.POLLIN)
    try:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * POLL_S)}
            if pipe.fileno() in ready:
                chunk = os.read(pipe.fileno(), MOST_READ_BYTES)  # all that a pipe holds
                text = (text + chunk)[-MOST_READ_BYTES:]
                if not chunk:
                    poll.unregister(pipe)
            if ended in ready:
                return text
            if time.monotonic() > checked + POLL_S:
                most = sandbox.TOTALS._replace(processes=MOST_PROCESSES, files=MOST_FILES, written=MOST_BYTES)
                rule = sandbox.passed_limit(str(folder), shell.pid, most)
                if rule is None and time.monotonic() > limit:
                    rule = f"did not end within {time_limit_s:g} s, although no program that it starts does anything"
                if rule is not None:
                    raise ConfigError(
                        f"{script} {rule}; give its arguments themselves: megatron-rl port -- KEY=VALUE ..."
                    )
                checked = time.monotonic()
    finally:
        os.close(ended)
