"""How processes import: from the same folders, and large libraries without the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
