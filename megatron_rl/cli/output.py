"""The products of commands: lines, JSON and files, and the checks that they can be written."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.output_paths import refuse_in_checkpoint
from megatron_rl.checkpoint.storage import writing
from megatron_rl.config.file_kinds import DEVICE, FILE, PIPE, kind_of
from megatron_rl.errors import ConfigError, StorageError
from megatron_rl.observe.appended_file import replace_file
from megatron_rl.observe.console import lost_output
from megatron_rl.observe.summary import finite_or_null
from megatron_rl.observe.terminal import Terminal

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, which may have room again when the file is written."""


def say(text: object, console: Terminal | None = None) -> None:
    """Print a line as it is, without markup, colours or breaks: names and values may have brackets."""
    (console or Terminal()).print(text, soft_wrap=True, highlight=False, markup=False)


def print_json(content: dict[str, Any]) -> None:
    """Print to stdout, indented, with null for numbers that JSON does not have."""
    sys.stdout.write(json.dumps(finite_or_null(content), indent=2, allow_nan=False) + "\n")


def refuse_to_lose_output() -> None:
    """Raise StorageError where output could not be written to its file; for commands whose product is printed."""
    error = lost_output(sys.stdout)
    if error is not None:
        raise StorageError(f"the output could not be written to stdout: {error.strerror}")


def check_output_file(option: str, file: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raise ConfigError for a file that cannot be written, or would be in a checkpoint, before the work for it starts.

    Only trying shows that. Leaves no new file or folder. suffixes: allowed endings of its name, the usual one first;
    without them, all.
    """
    if file is None:
        return
    refuse_in_checkpoint(option, file)
    if suffixes and file.suffix.lower() not in suffixes:
        nearest = file.with_suffix(suffixes[0]) if file.name else Path(f"picture{suffixes[0]}")
        raise ConfigError(f"{option} {file} must end in one of {', '.join(suffixes)}; try: {option} {nearest}")
    if os.path.islink(file) and kind_of(file) == FILE and is_of_the_system(file.parent):
        whole = os.path.realpath(file)  # of /dev/stdout, which must not be replaced
        rule = f"leads to {whole}, which other output goes to"
        raise ConfigError(f"{option} {file} {rule}; try: {option} {whole}.new")
    reason = _why_unwritable(file)
    if reason is not None:
        nearest = Path("outputs", option.removeprefix("--")).with_suffix(suffixes[0] if suffixes else ".yaml")
        rule = f"must be a file that can be written: {reason}"
        raise ConfigError(f"{option} {file} {rule}; try: {option} {nearest}")


def write_output(file: Path, content: bytes) -> None:
    """Write a file of a command, in place of an earlier one, and make its folder. Raises StorageError.

    A pipe or device, such as /dev/null, is written to and stays what it is.
    """
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if kind_of(file) in (PIPE, DEVICE):
            file.write_bytes(content)
        else:
            replace_file(file, content)


def is_of_the_system(folder: Path) -> bool:
    """Whether names in a folder are the system's: /dev, and all below /proc."""
    whole = folder.resolve()
    return whole == Path("/dev") or whole.is_relative_to("/proc")


def check_output_folder(option: str, folder: Path) -> None:
    """Raise ConfigError for a folder in which no file can be written, or that is in a checkpoint. It need not exist,
    and is not made.
    """
    refuse_in_checkpoint(option, folder)
    reason = "File exists" if kind_of(folder) == FILE else _why_unwritable(folder / ".written")
    if reason is not None:
        rule = f"must be a folder that can be written: {reason}"
        raise ConfigError(f"{option} {folder} {rule}; try: {option} outputs/new")


def _why_unwritable(file: Path) -> str | None:
    made: list[Path] = []
    file = Path(os.path.realpath(file))  # a link to nothing is one to a new file
    try:
        for folder in reversed(file.parents):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        if file.is_fifo():
            return None  # opening it would wait for its reader
        is_new = not file.exists()
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666))
        if is_new:
            file.unlink()
    except OSError as error:
        return None if error.errno in FULL else error.strerror
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # something of another process is in it
                folder.rmdir()
    return None
