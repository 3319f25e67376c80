"""How far this process has come in what it is doing: a count that long loops raise, and that a watcher compares.

Only whether the count has changed means something. A loop that can take minutes raises it once per round: a
micro-batch, a step of the engine, a message, a tensor read from a file.
"""

from __future__ import annotations

_count = 0


def made_progress() -> None:
    """One more piece of work is done. Costs nothing to speak of; from any thread (a lost count does no harm)."""
    global _count
    _count += 1


def progress_count() -> int:
    """Pieces of work done by this process so far."""
    return _count
