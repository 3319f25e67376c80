"""CUDA memory that keeps its addresses: vLLM's cumem allocations, of which single ones are unmapped and mapped again.

vLLM's allocator reserves an address range for each of its allocations and maps physical memory into it. Its own
`sleep` discards all that it has, and its `wake_up` maps more than the tags that it is given. So allocations are picked
out here by the storages that lie in them, and handed to the two calls below those methods one by one; each is marked
as vLLM itself would mark it.
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
"""vLLM's: device, bytes, address, what the driver calls the physical memory."""


class Allocation(Protocol):
    """One entry of vLLM's table (its `AllocationData`), under its address. is_asleep: nothing is mapped there now."""

    handle: Handle
    tag: str
    is_asleep: bool


def allocations_of(
    table: Mapping[int, Allocation], tag: str, storages: Sequence[tuple[int, int]]
) -> dict[int, Allocation]:
    """The allocations with `tag` in which the storages lie, by address, ascending. storages: (address, bytes).

    An allocation in which none lies is left alone: its tensors have gone, or it is another buffer's. Raises ValueError
    for a storage that does not lie wholly in one allocation with this tag.
    """
    found = set()
    for address, num_bytes in storages:
        holding = [base for base, one in table.items() if base <= address and address + num_bytes <= base + size(one)]
        if not holding or table[holding[0]].tag != tag:
            tags = ", ".join(sorted({one.tag for one in table.values()})) or "none"
            where = f"is tagged {table[holding[0]].tag!r}" if holding else "is not vLLM's cumem allocator's"
            raise ValueError(
                f"{num_bytes} bytes at {address:#x} must lie in memory that keeps its address, tagged {tag!r}; this "
                f"{where} (tags there: {tags})"
            )
        found.add(holding[0])
    return {base: table[base] for base in sorted(found)}


def size(allocation: Allocation) -> int:
    """Its bytes, a multiple of the driver's granularity."""
    num_bytes: int = allocation.handle[1]
    return num_bytes


class MappedMemory:
    """Storages within allocations of vLLM's, all with one tag; nobody else's may lie in those.

    table: vLLM's allocations by address. create_and_map, unmap_and_release: its two calls.
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
        return not any(one.is_asleep for one in self._allocations)

    def allocate(self) -> None:
        """Raises OutOfMemoryError, with nothing mapped that was not, when the GPU has too little."""
        asleep = [one for one in self._allocations if one.is_asleep]
        if not asleep:
            return
        release_cached(self._device)  # the driver takes from what torch has not
        done: list[Allocation] = []
        try:
            for one in asleep:
                self._map(one.handle)
                one.is_asleep = False
                done.append(one)
        except RuntimeError as error:
            for one in done:
                self._take_away(one)
            if "out of memory" not in str(error):
                raise
            wanted = sum(map(size, asleep)) / 2**20
            raise torch.OutOfMemoryError(f"CUDA out of memory: {wanted:.0f} MiB of {self.tag}: {error}") from error
        GIVEN_BACK.note(id(self), self._device.index, 0)

    def release(self) -> None:
        """Waits for all that the device was given, which may still read it."""
        there = [one for one in self._allocations if not one.is_asleep]
        if there:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            for one in there:
                self._take_away(one)
            GIVEN_BACK.note(id(self), self._device.index, self.num_bytes)

    def clear(self) -> None:
        for storage in self._storages:
            as_bytes(storage).zero_()

    def _take_away(self, one: Allocation) -> None:
        try:
            self._unmap(one.handle)
        finally:
            one.is_asleep = True


def pool(tag: str) -> AbstractContextManager[None]:
    """What is made inside lies in memory of that tag. Of one instance a process; no vLLM engine need be there."""
    context: AbstractContextManager[None] = allocator().use_memory_pool(tag)
    return context


def mapped(storages: Sequence[torch.UntypedStorage], tag: str, device: torch.device) -> MappedMemory:
    """Storages that were made in `pool(tag)`. Raises ValueError for others."""
    from vllm.device_allocator.cumem import create_and_map, unmap_and_release

    return MappedMemory(storages, tag, device, allocator().pointer_to_data, create_and_map, unmap_and_release)


def allocator() -> Any:
    """vLLM's, of which a process has one. Raises RuntimeError where this build of vLLM has none."""
    from vllm.device_allocator.cumem import CuMemAllocator, cumem_available

    if not cumem_available:
        raise RuntimeError(
            "this build of vLLM has no cumem allocator (vllm.cumem_allocator), so that memory cannot keep its "
            "addresses; install vLLM's own build for CUDA"
        )
    return CuMemAllocator.get_instance()
