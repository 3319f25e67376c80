"""Copies whose adapters are in slots of generation: the least recently used one leaves for another. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class ResidentCopies:
    """Which copy is in which of `num_slots` slots, none at first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[str, int] = {}  # the least recently used first

    def use(self, copy: str) -> int | None:
        """Return the slot of a copy, which is the most recently used one then; None: it is in none."""
        slot = self._slots.pop(copy, None)
        if slot is not None:
            self._slots[copy] = slot
        return slot

    def make_room(self) -> int:
        """Return a slot without a copy; where all have one, the least recently used copy leaves."""
        free = set(range(self.num_slots)).difference(self._slots.values())
        return min(free) if free else self._slots.pop(next(iter(self._slots)))

    def note(self, copy: str, slot: int) -> None:
        """Note that a copy is in a slot that `make_room` has returned."""
        self._slots[copy] = slot

    def forget(self, copy: str) -> None:
        """Note that a copy is in no slot any more, if it was in one."""
        self._slots.pop(copy, None)


def batches(copies: Sequence[str], num_slots: int) -> Iterator[list[int]]:
    """Yield the places of samples for one batch: those of at most `num_slots` copies, each with all of its
    places.
    """
    distinct = list(dict.fromkeys(copies))
    for first in range(0, len(distinct), num_slots):
        together = distinct[first : first + num_slots]
        yield [place for place, copy in enumerate(copies) if copy in together]
