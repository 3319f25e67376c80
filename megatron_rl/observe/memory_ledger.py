"""What a rank holds in each phase of a step: a ledger that is always kept, and a meter for tests.

The ledger adds up the tensors the project owns, which costs microseconds, and asks CUDA for its peak. The meter sees
every operation, so it also finds what lives only for a moment; it slows a CPU run down and is never on by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GB = 1e9


@dataclass
class PhaseMemory:
    """Bytes of one phase, each the largest since they were last taken.

    owned: by name, at the end of the phase. peak: what CUDA's allocator had handed out at the worst moment; None on a
    CPU, whose allocator does not say.
    """

    owned: dict[str, int] = field(default_factory=dict)
    peak: int | None = None

    @property
    def num_bytes(self) -> int:
        """The peak where it is known, else what is owned."""
        return sum(self.owned.values()) if self.peak is None else self.peak


class MemoryLedger:
    """Keeps a `PhaseMemory` for every phase by its name.

    owned: name -> bytes held now. reset_peak, peak: the device's, whose peak may be None.
    """

    def __init__(
        self, owned: Callable[[], dict[str, int]], reset_peak: Callable[[], None], peak: Callable[[], int | None]
    ) -> None:
        self._owned, self._reset_peak, self._peak = owned, reset_peak, peak
        self._phases: dict[str, PhaseMemory] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account for the body as `name`, from a new peak on; nothing is recorded when it raises."""
        self._reset_peak()
        yield
        self.note(name)

    def note(self, name: str, also: Mapping[str, int] | None = None) -> None:
        """Record what is held now, and the peak since the last phase began, as part of the phase `name`.

        also: what else is held, by name.
        """
        held = self._owned() | dict(also or {})
        found, peak = self._phases.setdefault(name, PhaseMemory()), self._peak()
        found.owned = {key: max(size, found.owned.get(key, 0)) for key, size in held.items()}
        found.peak = peak if peak is None else max(peak, found.peak or 0)

    def take(self) -> dict[str, PhaseMemory]:
        """All phases since the last call, which are forgotten."""
        taken, self._phases = self._phases, {}
        return taken


def memory_metrics(ranks: list[dict[str, PhaseMemory]], planned: dict[str, dict[str, int]]) -> dict[str, float]:
    """The worst rank of every phase, in GB, beside its plan.

    planned: phase -> name -> bytes, of the rank for which most is planned. On a CPU only what is owned is measured, so
    only that is taken from the plan.
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
    """Bytes of the different storages behind `tensors`, as they are now: 0 for one whose memory was given back."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class StorageMeter(TorchDispatchMode):
    """While active, follows every tensor storage that an operation makes until it is freed.

    excluded: storages that are not followed. owned: the bytes of those, added at every operation.
    Not seen: memory inside of a kernel, of collectives, and of what never was a tensor.
    """

    def __init__(self, excluded: list[torch.Tensor], owned: Callable[[], int]) -> None:
        super().__init__()
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._owned = owned
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._bytes = 0
        self.peak = owned()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self._bytes + self._owned())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._excluded or key in self._live:
            return
        self._live[key] = (weakref.ref(storage, lambda _: self._forget(key)), storage.nbytes())
        self._bytes += storage.nbytes()

    def _forget(self, key: int) -> None:
        _, num_bytes = self._live.pop(key)
        self._bytes -= num_bytes
