"""Imports of processes: from the same folders, without the garbage collector, and leaving no empty folder behind."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder where torch caches compiled code between runs, and which it creates, empty, on
import. Torch sets an unset variable to a folder in the temporary folder."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause the garbage collector, then freeze the objects made by the imports.

    The objects that torch, Megatron and vLLM make on import stay until the process ends. Collections would scan them
    again and again: they took 28% of the CPU time of a rank's imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_path() -> str:
    """Return the folders that this process imports from, in the form of PYTHONPATH."""
    return os.pathsep.join(folder or os.getcwd() for folder in sys.path)


def folder_of_ranks() -> str:
    """Return the folder of ranks, which is not in their temporary folder, as that is removed with the run."""
    return f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"


@contextmanager
def leaving_none_empty() -> Iterator[None]:
    """After a command, remove the empty folders of this process and of its ranks; torch creates them again when needed.

    A folder that the user has named stays.
    """
    is_given = COMPILED in os.environ
    try:
        yield
    finally:
        if not is_given:
            for folder in {os.environ.get(COMPILED), folder_of_ranks()} - {None}:
                remove_if_empty(str(folder))


def remove_if_empty(folder: str) -> None:
    """Remove a folder if it exists and is empty."""
    with suppress(OSError):
        os.rmdir(folder)
