"""Ask a program of the system, which may hang, print without an end, or leave children behind."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_rl.cluster.child_processes import adopting_orphans, how_ended, variables_with
from megatron_rl.cluster.stale_processes import descendants, end, variable_of

ASKED = "MEGATRON_RL_ASKED"
"""The environment variable of a program that was asked, and of all that it starts."""
PIECE = 1 << 16


@dataclass(frozen=True)
class ProgramAnswer:
    """What a program printed, to stdout and stderr, and why that is not a whole reply; "" for exit code 0."""

    text: str
    fault: str = ""


def answer_of(
    command: Sequence[str], limit_s: float, most_bytes: int = 1 << 20, temporary: Path | None = None
) -> ProgramAnswer:
    """Run a program until it ends, for `limit_s` seconds and `most_bytes` of output at most.

    Then it is killed, and so is all that it has started, also where that has left its session. temporary: a folder for
    its temporary files.
    """
    mark = secrets.token_hex(8)
    variables = {ASKED: mark} | ({} if temporary is None else {"TMPDIR": str(temporary)})
    with adopting_orphans():
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=variables_with(**variables),
            )
        except OSError as error:
            return ProgramAnswer("", f"{command[0]} cannot be started: {error.strerror}")
        try:
            output, fault = _read(process, command[0], limit_s, most_bytes)
        finally:
            process.kill()
            code = process.wait()
            end(lambda: _left_of(mark))
            assert process.stdout is not None
            process.stdout.close()
    if not fault and code:
        fault = f"{command[0]} {how_ended(code)}"
    return ProgramAnswer(output.decode(errors="replace"), fault)


def _read(process: subprocess.Popen[bytes], name: str, limit_s: float, most_bytes: int) -> tuple[bytes, str]:
    """Read until the process ends: its children may keep the pipe. Returns the output and a fault, or ""."""
    assert process.stdout is not None
    pipe, deadline = process.stdout.fileno(), time.monotonic() + limit_s
    os.set_blocking(pipe, False)
    ended, output = os.pidfd_open(process.pid), b""
    waited = select.poll()
    waited.register(pipe, select.POLLIN)
    waited.register(ended, select.POLLIN)
    try:
        while True:
            ready = [descriptor for descriptor, _ in waited.poll(1000 * max(0.0, deadline - time.monotonic()))]
            if pipe in ready:
                piece = os.read(pipe, PIECE)
                output += piece
                if not piece:
                    waited.unregister(pipe)
            if len(output) > most_bytes:
                return output[:most_bytes], f"{name} printed more than {most_bytes} bytes"
            if ready == [ended]:
                return output, ""
            if time.monotonic() >= deadline:
                return output, f"{name} did not end within {limit_s:g} s"
    finally:
        os.close(ended)


def _left_of(mark: str) -> set[psutil.Process]:
    """The living processes of a program that was asked; those that have ended are waited for."""
    left = {process for process in descendants() if variable_of(process, ASKED) == mark}
    for process in [*left]:
        try:
            if os.waitpid(process.pid, os.WNOHANG)[0]:
                left.discard(process)
        except ChildProcessError:  # the child of another one that is still to be killed
            continue
    return left
