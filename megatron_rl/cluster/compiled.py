"""The folder in which torch keeps what it compiles from run to run, and which it makes on import, empty."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder. Where it is unset, torch sets it, to a folder in the temporary one."""


def folder_of_ranks() -> str:
    """Where ranks keep it, whose own temporary folder ends with the run."""
    return f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"


@contextmanager
def leaving_none_empty() -> Iterator[None]:
    """Round a command: removes the folders of this process and of its ranks where nothing is in them; torch makes one
    again when it needs it. A folder that the user has named stays.
    """
    is_given = VARIABLE in os.environ
    try:
        yield
    finally:
        if not is_given:
            for folder in {os.environ.get(VARIABLE), folder_of_ranks()} - {None}:
                remove_if_empty(str(folder))


def remove_if_empty(folder: str) -> None:
    """Remove a folder unless something is in it, or it is not there."""
    with suppress(OSError):
        os.rmdir(folder)
