"""Run a script's shell to its end in a folder of its own, within limits."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.cluster.programs import Program
from megatron_rl.cluster.stale_processes import leaving_none_running
from megatron_rl.errors import ConfigError
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.confined_program import ConfinedProgram

POLL_S = 0.2
MOST_PROCESSES, MOST_FILES, MOST_BYTES = sandbox.TOTALS[:3]
"""Most processes of a script's group, and most files and bytes of its folder, at once."""
MOST_READ_BYTES = 1 << 20
"""Bytes of stderr that are kept, from the end."""


def run_script(
    script: Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    work: Path,
    time_limit_s: float,
    is_trusted: bool,
) -> str:
    """Run a script and return the end of its stderr. work: its current folder; it can write to the parent of it alone.

    All that it has started has ended when this returns. Raises ConfigError where the kernel does not sandbox it, and at
    the limits.
    """
    command, kept = ["/bin/bash", str(script.resolve()), *arguments], slice(-MOST_READ_BYTES, None)
    with leaving_none_running():
        if is_trusted:
            shell = Program(command, variables, kept=kept, folder=work, errors_alone=True)
        else:
            shell = ConfinedProgram(command, variables, work.parent, kept=kept, folder=work, errors_alone=True)
        try:
            _wait(script, shell, work.parent, time_limit_s)
        finally:
            shell.close()
    if isinstance(shell, ConfinedProgram):
        _refuse_unconfined(script, shell.status)
    return shell.output.decode(errors="replace")


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


def _wait(script: Path, shell: Program, folder: Path, time_limit_s: float) -> None:
    """Wait for the shell. Raises ConfigError where it passes a limit."""
    limit = time.monotonic() + time_limit_s
    most = sandbox.TOTALS._replace(processes=MOST_PROCESSES, files=MOST_FILES, written=MOST_BYTES)
    while not shell.ended_within(POLL_S):
        rule = sandbox.passed_limit(str(folder), shell.pid, most)
        if rule is None and time.monotonic() > limit:
            rule = f"did not end within {time_limit_s:g} s, although no program that it starts does anything"
        if rule is not None:
            raise ConfigError(f"{script} {rule}; give its arguments themselves: megatron-rl port -- KEY=VALUE ...")
