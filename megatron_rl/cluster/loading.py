"""Import large libraries without the garbage collector, which would slow the imports down."""

from __future__ import annotations

import gc
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
