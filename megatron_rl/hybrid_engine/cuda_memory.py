"""CUDA memory with fixed addresses: single allocations of vLLM's cumem allocator are unmapped and mapped again.

vLLM's allocator reserves an address range for each allocation and maps physical memory into it. Its own `sleep`
discards all allocations, and its `wake_up` maps more than the given tags. So this module selects allocations by the
storages in them, passes them one by one to the two calls below those methods, and marks each as vLLM would mark it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megatron_rl.device import GIVEN_BACK, release_cached
from megatron_rl.hybrid_engine.storages import as_bytes

Handle = tuple[Any, ...]
"""vLLM's handle: device, bytes, address, the driver's handle of the physical memory."""


class Allocation(Protocol):
    """One entry of vLLM's table (its `AllocationData`). is_asleep: no memory is mapped there now."""

    handle: Handle
    tag: str
    is_asleep: bool


def allocations_of(
    table: Mapping[int, Allocation], tag: str, storages: Sequence[tuple[int, int]]
) -> dict[int, Allocation]:
    """The allocations with `tag` that contain the storages, by address, ascending. storages: (address, bytes).

    Other allocations are left alone: their tensors are gone, or they belong to another buffer. Raises ValueError for a
    storage that is not wholly in one allocation with this tag.
    """
    bases = set()
    for address, num_bytes in storages:
        holding = [base for base, each in table.items() if base <= address and address + num_bytes <= base + size(each)]
        if not holding or table[holding[0]].tag != tag:
            tags = ", ".join(sorted({allocation.tag for allocation in table.values()})) or "none"
            where = f"is tagged {table[holding[0]].tag!r}" if holding else "is not vLLM's cumem allocator's"
            raise ValueError(
                f"{num_bytes} bytes at {address:#x} must be in memory that keeps its address, tagged {tag!r}; this "
                f"{where} (tags there: {tags})"
            )
        bases.add(holding[0])
    return {base: table[base] for base in sorted(bases)}


def size(allocation: Allocation) -> int:
    """Bytes of an allocation, a multiple of the driver's granularity."""
    num_bytes: int = allocation.handle[1]
    return num_bytes


class MappedMemory:
    """Storages in vLLM's allocations with one tag, which contain no other storages.

    table: vLLM's allocations by address. create_and_map, unmap_and_release: vLLM's two calls.
    """

    def __init__(
        self,
        storages: Sequence[torch.UntypedStorage],
        tag: str,
        device: torch.device,
        table: Mapping[int, Allocation],
        create_and_map: Callable[[Handle], None],
        unmap_and_release: Callable[[Handle], None],
    ) -> None:
        self._storages, self._device, self.tag = list(storages), device, tag
        self.num_bytes = sum(storage.nbytes() for storage in self._storages)
        places = [(storage.data_ptr(), storage.nbytes()) for storage in self._storages]
        self._allocations = list(allocations_of(table, tag, places).values())
        self._map, self._unmap = create_and_map, unmap_and_release
        weakref.finalize(self, GIVEN_BACK.note, id(self), device.index, 0)

    @property
    def is_allocated(self) -> bool:
        return not any(each.is_asleep for each in self._allocations)

    def allocate(self) -> None:
        """Raises OutOfMemoryError, with the mapping unchanged, if the GPU has too little memory."""
        asleep = [each for each in self._allocations if each.is_asleep]
        if not asleep:
            return
        release_cached(self._device)  # the driver can only take memory that torch has not cached
        done: list[Allocation] = []
        try:
            for allocation in asleep:
                self._map(allocation.handle)
                allocation.is_asleep = False
                done.append(allocation)
        except RuntimeError as error:
            for allocation in done:
                self._take_away(allocation)
            if "out of memory" not in str(error):
                raise
            wanted = sum(map(size, asleep)) / 2**20
            raise torch.OutOfMemoryError(f"CUDA out of memory: {wanted:.0f} MiB of {self.tag}: {error}") from error
        GIVEN_BACK.note(id(self), self._device.index, 0)

    def release(self) -> None:
        """Waits for the device's work, which may still read the memory."""
        mapped_now = [each for each in self._allocations if not each.is_asleep]
        if mapped_now:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for allocation in mapped_now:
                self._take_away(allocation)
            GIVEN_BACK.note(id(self), self._device.index, self.num_bytes)

    def clear(self) -> None:
        for storage in self._storages:
            as_bytes(storage).zero_()

    def _take_away(self, allocation: Allocation) -> None:
        try:
            self._unmap(allocation.handle)
        finally:
            allocation.is_asleep = True


def pool(tag: str) -> AbstractContextManager[None]:
    """A context whose allocations get a tag. There is one allocator per process; no vLLM engine is needed."""
    context: AbstractContextManager[None] = allocator().use_memory_pool(tag)
    return context


def mapped(storages: Sequence[torch.UntypedStorage], tag: str, device: torch.device) -> MappedMemory:
    """Memory of storages that were made in `pool(tag)`. Raises ValueError for others."""
    from vllm.device_allocator.cumem import create_and_map, unmap_and_release

    return MappedMemory(storages, tag, device, allocator().pointer_to_data, create_and_map, unmap_and_release)


def allocator() -> Any:
    """vLLM's allocator of this process. Raises RuntimeError if this build of vLLM has none."""
    from vllm.device_allocator.cumem import CuMemAllocator, cumem_available

    if not cumem_available:
        raise RuntimeError(
            "this build of vLLM has no cumem allocator (vllm.cumem_allocator), so that memory cannot keep its "
            "addresses; install vLLM's own build for CUDA"
        )
    return CuMemAllocator.get_instance()
