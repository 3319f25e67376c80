"""A tool that runs Python programs of the policy's, confined by the kernel. No torch.

    from megatron_rl.agents.python_tool import python  # in the file of multi_turn.function_tool_path

A program has an empty folder of its own, in which alone it can write, and nothing of this run's environment. It can
open no socket, signal nothing, and has limits of memory and processor time, and of all its processes together
(`user_code.sandbox`). It can read what the user who started the run can read, and tell the policy: keep what is secret
elsewhere. Nothing stays from call to call.
"""

from __future__ import annotations

import sys

from megatron_rl.agents.tools import tool
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.confined_program import ConfinedProgram, scratch_folder

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
    with scratch_folder("python_tool_") as folder:
        program = ConfinedProgram(
            [sys.executable, "-I", "-u", "-"],
            VARIABLES,
            folder,
            folder=folder,
            kept=slice(MOST_OUTPUT + 1),
            content=code.encode(),  # an argument may have 128 KiB, and is seen by other users
            has_totals=True,
        )
        try:
            await program.wait(is_silent=True)
        finally:
            await program.end()
    reason = program.status.removeprefix(sandbox.READY).decode(errors="replace")
    if not program.status.startswith(sandbox.READY):
        raise RuntimeError(reason or "the program has not started")
    output = program.output[:MOST_OUTPUT].decode(errors="replace")
    output += "...(truncated)..." if len(program.output) > MOST_OUTPUT else ""
    return f"{output}...(ended: it {reason})..." if reason else output
