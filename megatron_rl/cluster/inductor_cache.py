"""The folder where torch caches compiled code between runs, and which it creates, empty, on import."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder. Torch sets an unset variable to a folder in the temporary folder."""


def folder_of_ranks() -> str:
    """Return the folder of ranks, which is not in their temporary folder, as that is removed with the run."""
    return f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"


@contextmanager
def leaving_none_empty() -> Iterator[None]:
    """After a command, remove the empty folders of this process and of its ranks; torch creates them again when needed.

    A folder that the user has named stays.
    """
    is_given = VARIABLE in os.environ
    try:
        yield
    finally:
        if not is_given:
            for folder in {os.environ.get(VARIABLE), folder_of_ranks()} - {None}:
                remove_if_empty(str(folder))


def remove_if_empty(folder: str) -> None:
    """Remove a folder if it exists and is empty."""
    with suppress(OSError):
        os.rmdir(folder)
