"""What workers do, whatever it is: reward functions, environments. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

READY = "ready"
"""A worker has loaded the user's code."""

WORN_OUT = "worn out"
"""A worker has lost that many threads to calls that do not return that it asks to be replaced."""

TIMED_OUT, CRASHED = "timed_out", "crashed"
"""How a job can fail in the process around it."""


class Work(Protocol):
    """The work of a supervisor's workers. It is pickled; its replies travel as JSON."""

    @property
    def noun(self) -> str:
        """What the user's code is, in messages."""

    @property
    def timeout_key(self) -> str:
        """The configuration key of the time limit."""

    def load(self) -> Callable[[Any], Any]:
        """Return the function that turns a job's content into a reply, or into an awaitable one.

        Raises ConfigError when the user's code cannot be loaded.
        """

    def written(self, answer: Any) -> Any:
        """Return a reply as JSON values."""

    def read(self, content: Any) -> Any:
        """Return the reply that JSON values are. Raises ValueError for others."""

    def failed(self, kind: str, reason: str) -> Any:
        """Return the reply to a job that has failed. kind: `TIMED_OUT`, `CRASHED`."""

    def too_long(self, reason: str) -> Any:
        """Return the reply in place of one that is too long to be sent."""
