"""A tool that runs Python programs of the policy's, confined by the kernel. No torch.

    from megatron_rl.agents.python_tool import python  # in the file of multi_turn.function_tool_path

A program has an empty folder of its own, in which alone it can write, and nothing of this run's environment. It can
open no socket, signal nothing, and has limits of memory and processor time (`user_code.confine`). It can read what the
user who started the run can read, and tell the policy: keep what is secret elsewhere. Nothing stays from call to call.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress

from megatron_rl.agents.tools import tool
from megatron_rl.user_code import confine

MOST_OUTPUT = 1 << 16
"""Bytes of output that are kept; a program that writes more goes on unread."""
VARIABLES = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

confine.way_of(confine.this_kernel())  # raises Refused where the kernel permits no confinement: the run does not start


@tool
async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program
    """
    with tempfile.TemporaryDirectory(prefix="python_tool_", ignore_cleanup_errors=True) as folder:
        read, write = os.pipe()
        program = [
            sys.executable,
            "-I",
            "-S",
            confine.__file__,
            str(write),
            folder,
            sys.executable,
            "-I",
            "-u",
            "-c",
            code,
        ]
        pipe, out = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *program,
                cwd=folder,
                env=VARIABLES,
                stdin=pipe,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(write,),
            )
        finally:
            os.close(write)
        try:
            output = await _output_of(process)
            status = os.read(read, 4096)
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if status != confine.READY:
        raise RuntimeError(status.removeprefix(confine.READY).decode(errors="replace") or "the program has not started")
    return output


async def _output_of(process: asyncio.subprocess.Process) -> str:
    """Read all that a program writes, and keep the beginning."""
    assert process.stdout is not None
    kept = b""
    while piece := await process.stdout.read(1 << 16):
        kept = kept if len(kept) > MOST_OUTPUT else kept + piece
    text = kept[:MOST_OUTPUT].decode(errors="replace")
    return text if len(kept) <= MOST_OUTPUT else f"{text}...(truncated)..."
