"""The bytes that a rank holds in each phase of a step.

The ledger adds up the tensors that this project owns, which costs microseconds, and asks CUDA for its peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

GB = 1e9


@dataclass
class PhaseMemory:
    """Bytes of one phase, each the largest since the last `MemoryLedger.take`.

    owned: by name, at the end of the phase. peak: most bytes that CUDA's allocator had allocated; None on a CPU.
    """

    owned: dict[str, int] = field(default_factory=dict)
    peak: int | None = None

    @property
    def num_bytes(self) -> int:
        """The peak on CUDA, on a CPU the owned bytes."""
        return sum(self.owned.values()) if self.peak is None else self.peak


class MemoryLedger:
    """Keeps a `PhaseMemory` for every phase by its name.

    owned: returns name -> bytes held. reset_peak, peak: of the device; peak returns None on a CPU.
    """

    def __init__(
        self, owned: Callable[[], dict[str, int]], reset_peak: Callable[[], None], peak: Callable[[], int | None]
    ) -> None:
        self._owned, self._reset_peak, self._peak = owned, reset_peak, peak
        self._phases: dict[str, PhaseMemory] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the body as phase `name`, with a peak of its own; nothing is recorded when it raises."""
        self._reset_peak()
        yield
        self.note(name)

    def note(self, name: str, also: Mapping[str, int] | None = None) -> None:
        """Record the bytes held at this moment, and the peak since the last phase began, for the phase `name`.

        also: further bytes, by name.
        """
        held = self._owned() | dict(also or {})
        memory, peak = self._phases.setdefault(name, PhaseMemory()), self._peak()
        memory.owned = {key: max(size, memory.owned.get(key, 0)) for key, size in held.items()}
        memory.peak = peak if peak is None else max(peak, memory.peak or 0)

    def take(self) -> dict[str, PhaseMemory]:
        """Return all phases since the last call, and forget them."""
        taken, self._phases = self._phases, {}
        return taken


def memory_metrics(ranks: list[dict[str, PhaseMemory]], planned: dict[str, dict[str, int]]) -> dict[str, float]:
    """The largest rank of every phase, measured and planned, in GB.

    planned: phase -> name -> bytes, of the rank for which most is planned. On a CPU only owned bytes are measured, so
    only these are taken from the plan.
    """
    metrics: dict[str, float] = {}
    peaks = [memory.peak for phases in ranks for memory in phases.values() if memory.peak is not None]
    for phase in dict.fromkeys(phase for phases in ranks for phase in phases):
        entries = [phases[phase] for phases in ranks if phase in phases]
        metrics[f"perf/memory_gb/{phase}"] = max(entry.num_bytes for entry in entries) / GB
        if phase in planned:
            names = {name for entry in entries for name in entry.owned} if entries[0].peak is None else planned[phase]
            sizes = [size for name, size in planned[phase].items() if name in names]
            metrics[f"perf/memory_planned_gb/{phase}"] = sum(sizes) / GB
    return metrics | ({"perf/max_memory_allocated_gb": max(peaks) / GB} if peaks else {})


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the different storages behind `tensors`; a storage whose memory was given back has 0."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
