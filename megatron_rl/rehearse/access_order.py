"""Whether the accesses of one memory are ordered: those of two queues, of which one writes. No torch.

A later access is ordered if the clock of its queue has the earlier one. Bytes count by their range; of tensors
with gaps all from the first to the last count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from third_party_patches.stream_clocks import Queue

MOST_ACCESSES = 64
"""Accesses of one queue that are kept of each memory. The oldest are forgotten: a fault may be missed, none made up."""


@dataclass(frozen=True)
class Access:
    """An operation of a queue on bytes `start` to `stop` of a memory. tick: its number in the queue. line: of code."""

    queue: Queue
    tick: int
    start: int
    stop: int
    is_write: bool
    line: str

    def __str__(self) -> str:
        return f"{'write' if self.is_write else 'read'} at {self.line} on {self.queue.name}"

    def covers(self, other: Access) -> bool:
        """Whether whatever is ordered after this one, and meets the other, is ordered after the other."""
        return self.start <= other.start and self.stop >= other.stop and self.is_write >= other.is_write

    def conflicts(self, other: Access) -> bool:
        """Whether both meet and one writes."""
        return (self.is_write or other.is_write) and self.start < other.stop and other.start < self.stop


@dataclass
class TrackedMemory:
    """One storage. owner: the queue that allocated it, and may allocate its bytes again as soon as they are freed.

    recorded: numbers of queues for which freed bytes wait. freed_at: the line that released it; "": nothing did.
    """

    owner: Queue
    recorded: set[int] = field(default_factory=set)
    freed_at: str = ""
    accesses: dict[int, list[Access]] = field(default_factory=dict)

    def add(self, access: Access) -> Access | None:
        """Note an access; returns an earlier one from which nothing orders it."""
        clock, number = access.queue.clock, access.queue.number
        found = None
        if len(self.accesses) > 1 or number not in self.accesses:
            found = next((one for one in self._after(clock, number) if one.conflicts(access)), None)
        own = [one for one in self.accesses.get(number, ()) if not access.covers(one)]
        self.accesses[number] = [*own[1 - MOST_ACCESSES :], access]
        return found

    def in_use(self, holds: bool) -> Access | None:
        """Return an access that may still run where the owner uses the freed bytes again.

        holds: works keep their tensors, so that collectives do not count; they do where the storage loses its bytes.
        """
        clock = self.owner.clock
        for one in self._after(clock, self.owner.number):
            is_held = holds and one.queue.name.startswith(COLLECTIVES)
            if one.queue.number not in self.recorded and not is_held:
                return one
        return None

    def _after(self, clock: dict[int, int], number: int) -> Iterator[Access]:
        """Yield accesses of other queues that a clock does not have."""
        for other, accesses in self.accesses.items():
            if other != number and accesses[-1].tick > clock.get(other, 0):
                yield from (one for one in accesses if one.tick > clock.get(other, 0))


COLLECTIVES = "collectives"
"""Begins the name of a queue of a group's collectives."""
