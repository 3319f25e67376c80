"""What operations of a rehearsed rank do with memory, and on which stream: faults that a GPU shows as wrong numbers.

Streams, events, works and waits of the host are edges (`third_party_patches/torch/stream_clocks.py`); an access of
memory that no edge orders is a fault, and so is one of memory that has been released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from megatron_rl.rehearse.access_order import COLLECTIVES, Access, TrackedMemory
from third_party_patches.stream_clocks import HOST, Clock, Queue, join
from third_party_patches.torch.fake_cuda import current_stream

SHAPE_ALONE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros"),
    *("new_ones", "new_full", "new_empty_strided", "detach", "detach_", "alias", "lift_fresh", "_unsafe_view"),
    *("resize_", "resize_as_", "set_", "record_stream", "is_pinned", "sym_size", "sym_stride", "sym_numel"),
}
"""Operations that read no element of their arguments."""


class StreamOrder:
    """The memories of one rank. fault: called with a sentence. line: returns the present line of code."""

    def __init__(self, fault: Callable[[str], None], line: Callable[[], str]) -> None:
        self._fault, self._line = fault, line
        self._memories: dict[int, TrackedMemory] = {}
        self._pinned: set[int] = set()
        self._groups: dict[Any, Queue] = {}
        self._works: dict[int, Clock] = {}

    def operation(self, func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note an operation of the current stream. read: its arguments, those among them that are written too."""
        if func.is_view or func.namespace == "prim" or func.__name__.split(".")[0] in SHAPE_ALONE:
            return
        queue = current_stream()
        tick, line = queue.begin(), self._line()
        for tensor in read:
            if tensor.device.type != "cuda":
                continue
            is_write = any(tensor is one for one in written)
            self._access(tensor, is_write, queue, tick, line)

    def read(self, tensors: Sequence[Tensor]) -> None:
        """Note that the current stream reads tensors of the device."""
        queue = current_stream()
        tick, line = queue.begin(), self._line()
        for tensor in tensors:
            if tensor.device.type == "cuda":
                self._access(tensor, False, queue, tick, line)

    def made(self, tensors: Sequence[Tensor]) -> None:
        """Note tensors that the last operation of the current stream has made."""
        queue = current_stream()
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if tensor.device.type == "cuda" and key not in self._memories:
                self._access(tensor, True, queue, queue.clock.get(queue.number, 0), self._line())

    def host_waits(self) -> None:
        """Let the host wait for the current stream, as a copy without `non_blocking` does."""
        HOST.wait_for(current_stream().clock)

    # Host memory of asynchronous copies

    def pin(self, tensor: Tensor) -> None:
        """Note pinned host memory: only there a copy may still run after its call."""
        key = tensor.untyped_storage()._cdata
        if key not in self._pinned:
            self._pinned.add(key)
            self._keep(tensor.untyped_storage(), TrackedMemory(HOST))

    def copy_with_host(self, host: Tensor, is_write: bool) -> None:
        """Note that the last operation of the current stream reads or writes host memory."""
        if host.untyped_storage()._cdata in self._pinned:
            queue = current_stream()
            self._access(host, is_write, queue, queue.clock.get(queue.number, 0), self._line())

    def on_host(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written_of: Callable[..., list[Tensor]]
    ) -> None:
        """Note what the program itself does with tensors on the CPU. written_of: returns the written ones."""
        if not self._pinned or func.is_view:
            return
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        pinned = [tensor for tensor in tensors if tensor.untyped_storage()._cdata in self._pinned]
        if pinned:
            tick, line, written = HOST.begin(), self._line(), written_of(func, args, kwargs)
            for tensor in pinned:
                self._access(tensor, any(tensor is one for one in written), HOST, tick, line)

    # Collectives

    def collective(self, group: Any, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note a collective of a group, which begins when the current stream comes to it. name: of the group."""
        queue = self._groups.setdefault(group, Queue(f"{COLLECTIVES} of {name or 'a group'}"))
        join(queue.clock, current_stream().clock)
        tick, line = queue.begin(), self._line()
        for tensors, is_write in ((read, False), (written, True)):
            for tensor in tensors:
                self._access(tensor, is_write, queue, tick, line)

    def begin_work(self, number: int, group: Any) -> None:
        """Note that a work stands for the last collective of a group."""
        if group in self._groups:
            self._works[number] = dict(self._groups[group].clock)

    def wait_for_work(self, number: int) -> None:
        """Let the current stream wait for a work."""
        current_stream().wait_for(self._works.pop(number, {}))

    # Memory that comes and goes

    def record(self, tensor: Tensor, stream: Queue) -> None:
        """Keep freed bytes until a stream has come here: `Tensor.record_stream`."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            memory.recorded.add(stream.number)

    def resized(self, storage: Any) -> None:
        """Note that a storage got or lost its bytes."""
        memory = self._memories.get(storage._cdata)
        if memory is None:
            return
        if storage.nbytes():
            memory.owner, memory.freed_at = current_stream(), ""
            memory.accesses.clear()
            memory.recorded.clear()
        else:
            memory.freed_at = self._line()
            self._check_freed(memory, f"memory released at {memory.freed_at}", holds=False)

    def _freed(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        if key in self._pinned:
            self._pinned.discard(key)  # torch keeps pinned memory until copies from it are over
        elif memory is not None and not memory.freed_at and len(memory.accesses) > 1:
            self._check_freed(memory, "memory freed", holds=True)

    def _check_freed(self, memory: TrackedMemory, what: str, holds: bool) -> None:
        join(memory.owner.clock, HOST.clock)
        found = memory.in_use(holds)
        if found is not None:
            self._fault(
                f"{what} may be used again while the {found} still runs: nothing orders them; wait for an event or a "
                "work before, or call record_stream"
            )

    def _access(self, tensor: Tensor, is_write: bool, queue: Queue, tick: int, line: str) -> None:
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = TrackedMemory(queue)
            self._keep(storage, memory)
        start, stop = _bytes_of(tensor)
        access = Access(queue, tick, start, stop, is_write, line)
        if memory.freed_at or stop > storage.nbytes():  # views of fake tensors make a storage grow
            released = f", released at {memory.freed_at}" if memory.freed_at else ""
            self._fault(
                f"the {access} takes {stop - start} bytes of a storage that has {storage.nbytes()}{released}: allocate "
                "them before"
            )
            return
        earlier = memory.add(access)
        if earlier is not None:
            self._fault(
                f"the {access} takes {stop - start} bytes of the {earlier}, and nothing orders them: wait for an "
                "event, a work or the stream between"
            )

    def _keep(self, storage: Any, memory: TrackedMemory) -> None:
        self._memories[storage._cdata] = memory
        weakref.finalize(storage, self._freed, storage._cdata)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind the last."""
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * size, (start + int(last) + 1) * size
