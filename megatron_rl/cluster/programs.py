"""Programs that this process starts: what they read and print, how long they may take, and the end of their families.

A program may hang, print without an end, never read what it is given, and leave children in sessions of their own.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from megatron_rl.cluster.child_processes import die_with, how_ended, kill_group, variables_with
from megatron_rl.cluster.stale_processes import UNKILLABLE_AFTER_S, leaving_none_running

PIECE = 1 << 16
PIECES_OF_A_PIPE = 16
"""A pipe of Linux holds 1 MiB at most, unless the administrator permits more."""
LOOK_S, START_S = 0.2, 30.0
"""Seconds between two looks, and seconds in which a machine may come to permit a further process."""


def _started(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return start()
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOOK_S)


class Program:
    """A program in a session of its own. output: what it has printed, as far as it is kept.

    has_ended: it has ended, and waits for `close` as a zombie, so that no other process gets its number. is_silent: all
    that held its output have closed it.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        kept: slice,
        content: bytes = b"",
        folder: Path | None = None,
        errors_alone: bool = False,
        passed: Sequence[int] = (),
    ) -> None:
        """Start it. variables: its whole environment. kept: the part of its output. content: its standard input.

        folder: its current one. errors_alone: its output is stderr alone. passed: descriptors that it gets. Raises
        OSError, where the machine has too many processes after START_S seconds.
        """
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                bufsize=0,
                cwd=folder,
                env=variables,
                pass_fds=passed,
                start_new_session=True,
                stdin=pipe if content else nothing,
                stdout=nothing if errors_alone else pipe,
                stderr=pipe if errors_alone else subprocess.STDOUT,
            )

        self._process = _started(start)
        self.pid, self.output = self._process.pid, b""
        self.has_ended = self.is_silent = False
        self._kept, self._unread = kept, memoryview(content)
        self._selector = selectors.DefaultSelector()
        self._end = os.pidfd_open(self.pid)
        self._selector.register(self._end, selectors.EVENT_READ, self._note_end)
        printed = self._process.stderr if errors_alone else self._process.stdout
        for file, event, move in (
            (printed, selectors.EVENT_READ, self._read),
            (self._process.stdin, selectors.EVENT_WRITE, self._write),
        ):
            if file is not None:
                os.set_blocking(file.fileno(), False)
                self._selector.register(file, event, partial(move, file))

    def ended_within(self, seconds: float) -> bool:
        """Wait for its end, that long at most, and read meanwhile; return whether it has ended."""
        deadline = time.monotonic() + seconds
        while not self.has_ended and (left := deadline - time.monotonic()) > 0:
            self._move(left)
        return self.has_ended

    async def wait(self, is_silent: bool = False) -> None:
        """Wait for its end. is_silent: of its output."""
        loop, moves = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._selector.fileno(), moves.set)
        try:
            while not (self.is_silent if is_silent else self.has_ended):
                await moves.wait()
                moves.clear()
                self._move(0.0)
        finally:
            loop.remove_reader(self._selector.fileno())

    async def end(self) -> int:
        """Kill it, wait without holding up others, and close as `close`."""
        kill_group(self.pid)
        try:
            await self.wait()
        finally:
            code = self.close()
        return code

    def close(self) -> int:
        """Kill it and its process group, and read what is left; return its exit code, negative for a signal."""
        kill_group(self.pid)
        if self.ended_within(UNKILLABLE_AFTER_S):
            self._process.wait()
        for _ in range(PIECES_OF_A_PIPE):  # a process that has left the group may print on
            if not self._move(0.0):
                break
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None:
                file.close()
        self._selector.close()
        os.close(self._end)
        return -signal.SIGKILL if self._process.returncode is None else self._process.returncode

    def _move(self, timeout_s: float) -> bool:
        """Read and write what is possible after that wait at most; return whether anything was."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            key.data()
        return bool(events)

    def _note_end(self) -> None:
        self.has_ended = True
        self._selector.unregister(self._end)

    def _read(self, file: IO[bytes]) -> None:
        piece = os.read(file.fileno(), PIECE)
        self.output = (self.output + piece)[self._kept]
        if not piece:
            self.is_silent = True
            self._selector.unregister(file)

    def _write(self, file: IO[bytes]) -> None:
        try:
            self._unread = self._unread[os.write(file.fileno(), self._unread[:PIECE]) :]
        except BrokenPipeError:  # it does not read all
            self._unread = memoryview(b"")
        if not self._unread:
            self._selector.unregister(file)
            file.close()


@dataclass(frozen=True)
class ProgramAnswer:
    """The output of a program, stdout and stderr. fault: why it is not a whole reply; "": the exit code is 0."""

    text: str
    fault: str = ""


def answer_of(
    command: Sequence[str], limit_s: float, most_bytes: int = 1 << 20, temporary: Path | None = None
) -> ProgramAnswer:
    """Run a program until it ends, for `limit_s` seconds and `most_bytes` of output at most.

    Then it is killed, and so is all that it has started, also where that has left its session. temporary: a folder for
    its temporary files.
    """
    variables = variables_with(**({} if temporary is None else {"TMPDIR": str(temporary)}))
    deadline = time.monotonic() + limit_s
    with leaving_none_running():
        try:
            program = Program(command, variables, kept=slice(most_bytes + 1))
        except OSError as error:
            return ProgramAnswer("", f"{command[0]} cannot be started: {error.strerror}")
        try:
            while not program.ended_within(min(LOOK_S, deadline - time.monotonic())):
                if len(program.output) > most_bytes or time.monotonic() >= deadline:
                    break
            in_time = program.has_ended
        finally:
            code = program.close()
    fault = "" if in_time else f"{command[0]} did not end within {limit_s:g} s"
    if len(program.output) > most_bytes:
        fault = f"{command[0]} printed more than {most_bytes} bytes"
    elif in_time and code:
        fault = f"{command[0]} {how_ended(code)}"
    return ProgramAnswer(program.output[:most_bytes].decode(errors="replace"), fault)


@contextmanager
def supervised(command: Sequence[str], output: Path, grace_s: float = 10.0) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` in a session of its own and append its output to `output`; the body watches it.

    At the end of the body, also by an exception, a process that still runs gets SIGTERM and `grace_s` seconds to end by
    itself; a second signal to this process cuts them short. Then the rest of its family is killed and waited for. The
    process gets SIGKILL when this process dies. Raises RuntimeError when a process cannot be killed.
    """
    with leaving_none_running() as left, output.open("ab") as file:
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
                process.kill()
                process.wait()
    if left:
        raise RuntimeError(f"processes that cannot be killed: {sorted(member.pid for member in left)}")
