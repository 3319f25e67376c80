"""The name of this program in a command that it prints, so that the command works as it is printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "megatron-rl"


def program_name() -> str:
    """Return what a shell must be given to start this program again, quoted.

    `megatron-rl` where a shell finds this installation by that name, as after `source .venv/bin/activate`; else the
    file that was started, or the one next to this Python, relative to the working folder where it lies below it.
    """
    if sys.argv[0] == NAME:
        return NAME
    given = Path(sys.argv[0])
    file = given if given.name == NAME else Path(sys.executable).with_name(NAME)
    if not file.is_file():
        return f"{shlex.quote(sys.executable)} -m megatron_rl"
    found = shutil.which(NAME)
    if found is not None and os.path.samefile(found, file):
        return NAME
    if file.is_absolute() and file.is_relative_to(Path.cwd()):
        file = file.relative_to(Path.cwd())
    return shlex.quote(str(file))


def next_command(*words: object) -> str:
    """Return a command of this program, as it can be copied into a shell."""
    return f"{program_name()} {shlex.join(map(str, words))}"


def name_hint(text: str) -> str:
    """Return how to call this program where a text names a command of it and a shell would not find it; else ""."""
    name = program_name()
    if f"{NAME} " not in text or name == NAME:
        return ""
    return f"(a shell finds megatron-rl after `source .venv/bin/activate`; without it, type {name})"
