"""A count of finished work in this process, by which the heartbeat tells a slow process from one that hangs.

Only a change of the count means something. A loop that can take minutes raises it once per round: a micro-batch, a step
of the engine, a message, a tensor read from a file.
"""

from __future__ import annotations

_count = 0


def made_progress() -> None:
    """Count one finished piece of work, from any thread: a lost count does no harm."""
    global _count
    _count += 1


def progress_count() -> int:
    """Return the number of pieces of work that this process has finished."""
    return _count
