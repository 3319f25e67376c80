"""Bytes of the storages on the fake device: now, at the peak, and what was alive then by where it was made."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

BLOCK = 512
"""Bytes to which torch's caching allocator rounds a small tensor up."""
NEW_PEAK = 1.01
"""A peak this much above the last one that was looked into is looked into again: it costs a walk over all storages."""


class MemoryTracker:
    """The storages of one process. changed: called with the bytes in use after every change.

    now, peak: bytes. at_peak: line and operation that made a storage -> bytes, at the peak or up to 1% below it.
    """

    def __init__(self, changed: Callable[[int], None] = lambda now: None) -> None:
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._live: dict[int, tuple[int, str]] = {}
        self._looked_at = 0
        self._changed = changed

    def begin(self) -> None:
        """Begin a new measurement of the peak."""
        self.peak = self._looked_at = self.now
        self.at_peak = self.held()

    def note(self, storage: Any, made_by: Callable[[], str]) -> None:
        """Count the storage of a tensor on the device, which may be known. made_by: asked for a new one."""
        key = storage._cdata
        if key not in self._live:
            self._account(key, storage.nbytes(), made_by())
            weakref.finalize(storage, self._freed, key)

    def resized(self, storage: Any) -> None:
        """Count a new size of the storage; do nothing if it is not on the device."""
        if storage._cdata in self._live:
            self._account(storage._cdata, storage.nbytes(), self._live[storage._cdata][1])

    def held(self) -> Counter[str]:
        """Return the bytes that are alive now, by where they were made."""
        held: Counter[str] = Counter()
        for num_bytes, made_by in self._live.values():
            held[made_by] += num_bytes
        return held

    def _account(self, key: int, num_bytes: int, made_by: str) -> None:
        rounded = -(-num_bytes // BLOCK) * BLOCK
        before, _ = self._live.get(key, (0, ""))
        self._live[key] = rounded, made_by
        self._add(rounded - before)

    def _freed(self, key: int) -> None:
        num_bytes, _ = self._live.pop(key, (0, ""))
        self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self._changed(self.now)
        if self.now > self.peak:
            self.peak = self.now
            if self.now > self._looked_at * NEW_PEAK:
                self._looked_at, self.at_peak = self.now, self.held()
