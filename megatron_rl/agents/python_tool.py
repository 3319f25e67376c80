"""A tool that runs Python programs of the policy's, confined by the kernel. No torch.

    from megatron_rl.agents.python_tool import python  # in the file of multi_turn.function_tool_path

A program has an empty folder of its own, in which alone it can write, and nothing of this run's environment. It can
open no socket, signal nothing, and has limits of memory and processor time, and of all its processes together
(`user_code.sandbox`). It can read what the user who started the run can read, and tell the policy: keep what is secret
elsewhere. Nothing stays from call to call.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_rl.agents.tools import tool
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.scratch_folder import remove_folder

MOST_OUTPUT = 1 << 16
"""Bytes of output that are kept; a program that writes more continues unread."""
VARIABLES = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

sandbox.way_of(sandbox.this_kernel())  # raises Refused where the kernel permits no confinement: the run does not start


@tool
async def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program
    """
    text = code.encode()  # on standard input: an argument may have 128 KiB, and is seen by other users
    with _scratch_folder() as folder:
        read, write = os.pipe()
        confined = [sys.executable, "-I", "-S", sandbox.__file__, "--totals", str(write), folder]
        program = [*confined, sys.executable, "-I", "-u", "-"]
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *program,
                cwd=folder,
                env=VARIABLES,
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(write,),
            )
        finally:
            os.close(write)
        try:
            await _feed(process, text)
            output = await _output_of(process)
            status = os.read(read, 4096)
        finally:
            os.close(read)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    reason = status.removeprefix(sandbox.READY).decode(errors="replace")
    if not status.startswith(sandbox.READY):
        raise RuntimeError(reason or "the program has not started")
    return f"{output}...(ended: it {reason})..." if reason else output


@contextmanager
def _scratch_folder() -> Iterator[str]:
    """An empty folder, removed at the end with all that is in it."""
    folder = tempfile.mkdtemp(prefix="python_tool_")
    try:
        yield folder
    finally:
        remove_folder(Path(folder))


async def _feed(process: asyncio.subprocess.Process, text: bytes) -> None:
    """Write a program to its interpreter, which reads all before it begins."""
    assert process.stdin is not None
    with suppress(ConnectionError):  # it has not started
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


async def _output_of(process: asyncio.subprocess.Process) -> str:
    """Read all that a program writes, and keep the beginning."""
    assert process.stdout is not None
    kept = b""
    while piece := await process.stdout.read(1 << 16):
        kept = kept if len(kept) > MOST_OUTPUT else kept + piece
    text = kept[:MOST_OUTPUT].decode(errors="replace")
    return text if len(kept) <= MOST_OUTPUT else f"{text}...(truncated)..."
