"""Vector clocks of streams that do nothing: which operations an operation comes after. No torch.

A queue is what runs in its order: a stream, the collectives of a group, the host. Its clock has, for each queue, how
many operations of that queue are over before its next one begins. Waiting joins clocks.
"""

from __future__ import annotations

from itertools import count

Clock = dict[int, int]
"""Number of a queue -> its operations."""
LATEST: Clock = {}
"""All operations that have begun."""
_NUMBERS = count()


def join(clock: Clock, other: Clock) -> None:
    """Let a clock be after another one too."""
    for number, ticks in list(other.items()):
        if clock.get(number, 0) < ticks:
            clock[number] = ticks


class Queue:
    """Operations that run in their order. number: of this queue, in this process. name: for messages."""

    def __init__(self, name: str) -> None:
        self.number = next(_NUMBERS)
        self.name = name
        self.clock: Clock = {}

    def wait_for(self, clock: Clock) -> None:
        """Let all that follows in this queue come after a clock."""
        join(self.clock, clock)

    def begin(self) -> int:
        """Begin an operation, which the host starts now: after all that the host has waited for. Returns its number."""
        join(self.clock, HOST.clock)
        tick = self.clock[self.number] = self.clock.get(self.number, 0) + 1
        LATEST[self.number] = tick
        return tick


HOST = Queue("the host")
"""What the program itself does and has waited for, in all of its threads."""
