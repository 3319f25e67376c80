"""Finished work of this process: a count by which the heartbeat tells a slow process from one that hangs, and how far
the present method is.

Only a change of the count means something. A loop that can take minutes raises it once per round: a micro-batch, a step
of the engine, a message, a tensor read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

_count = 0
_work: WorkDone | None = None


class WorkDone(NamedTuple):
    """How far a method is: `done` of `total` things, such as responses or micro-batches."""

    things: str
    done: int
    total: int

    def __str__(self) -> str:
        return f"{self.done} of {self.total} {self.things}"


def made_progress() -> None:
    """Count one finished piece of work, from any thread: a lost count does no harm."""
    global _count
    _count += 1


def progress_count() -> int:
    """Return the number of pieces of work that this process has finished."""
    return _count


@contextmanager
def counting(things: str, total: int) -> Iterator[None]:
    """Report inside how many of `total` things are finished; the main thread calls it, and `finished_one` for each."""
    global _work
    before, _work = _work, WorkDone(things, 0, total)
    try:
        yield
    finally:
        _work = before


def finished_one() -> None:
    """Count one of the things of `counting`; outside it nothing."""
    global _work
    if _work is not None:
        _work = _work._replace(done=_work.done + 1)


def current_work() -> WorkDone | None:
    """Return how far the present method is, None where it does not count; any thread may ask."""
    return _work
