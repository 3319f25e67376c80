"""Messages between the members of one process group, by member number, and how two pools come to have such a group.

A pool's ranks are a torch.distributed world of their own. `open_joint_group` makes one more group over the ranks of
two worlds, on a store of its own: it belongs to neither world, and their own collectives go on beside it.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.device import Device


class Transport:
    """What an exchange asks of its group; a member's number is its rank in the group. Counts the bytes of messages.

    group: one that `torch.distributed` knows, or one of `open_joint_group`. Tensors travel over the group's backend
    for their device, objects over the one for the CPU.
    is_own: nothing else uses the group, so that it may be left for good.
    received_from, sent_to: number of the other member -> bytes of the messages so far.
    """

    def __init__(self, group: dist.ProcessGroup, is_own: bool = False) -> None:
        self._group: dist.ProcessGroup | None = group
        self.is_own = is_own
        self.received_from: Counter[int] = Counter()
        self.sent_to: Counter[int] = Counter()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group. Raises RuntimeError after `close`."""
        if self._group is None:
            raise RuntimeError("this rank has left the group")
        return self._group

    def close(self) -> None:
        """Leave a group of one's own: what others wait for from this rank fails at once. Nothing happens twice.

        Gloo closes connections once nothing names the group or a message in it; NCCL is told to.
        """
        if self._group is not None and self.is_own:
            if any(name != "gloo" for name in backend_names(self._group)):
                self._group.abort()
            self._group = None

    @property
    def number(self) -> int:
        """This member's number."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many members there are."""
        return self.group.size()

    def start(self, send: tuple[Tensor, int] | None, receive: tuple[Tensor, int] | None) -> list[dist.Work]:
        """Begin to send a tensor to, and to receive another from, the members whose numbers stand beside them."""
        device = next(message[0].device for message in (send, receive) if message is not None)
        # NCCL runs the calls of a group in order: without one, two ranks that both send first would block each other.
        is_one_call = self.group._get_backend(device).supports_coalescing
        if is_one_call:
            self.group._start_coalescing(device)
        works = []
        if send is not None:
            tensor, to = send
            works.append(self.group.send([tensor], to, 0))
            self.sent_to[to] += tensor.numel() * tensor.element_size()
        if receive is not None:
            tensor, source = receive
            works.append(self.group.recv([tensor], source, 0))
            self.received_from[source] += tensor.numel() * tensor.element_size()
        return [self.group._end_coalescing(device)] if is_one_call else works

    def finish(self, works: Sequence[dist.Work], receive: tuple[Tensor, int] | None) -> None:
        """Wait until what `start` began is done and the received tensor may be read."""
        for work in works:
            work.wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by number; they must have one shape. Every member must call."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group.allgather([gathered], [tensor.contiguous()]).wait()
        return gathered

    def all_gather_object(self, value: Any) -> list[Any]:
        """What all members gave, by number; it must be picklable. Every member must call."""
        pickled = pickle.dumps(value)
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(pickled)]))]
        padded = torch.frombuffer(bytearray(pickled.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        gathered = self.all_gather(padded)
        return [pickle.loads(data[:length].numpy().tobytes()) for data, length in zip(gathered, lengths, strict=True)]


def backend_names(group: dist.ProcessGroup) -> set[str]:
    """What moves tensors in it."""
    return {group._get_backend(kind).name() for kind in group._device_types}


def open_joint_group(
    store: dist.Store, rank: int, size: int, device: Device, timeout: timedelta, name: str = "bridge"
) -> dist.ProcessGroup:
    """One group over the ranks of two worlds; every one of its `size` ranks must call, with its own `rank` in it.

    store: one that all of them reach, a second `TCPStore` say. name: of this group among those that use the store.
    timeout: how long opening waits for missing ranks, and a message for its other end.
    The group is not known to `torch.distributed`: use it through `Transport`. After a failure or a time-out it is
    broken for all its ranks. Raises torch.distributed.DistStoreError or RuntimeError when ranks are missing.
    """
    store = dist.PrefixStore(name, store)
    store.set_timeout(timeout)
    group = dist.ProcessGroup(store, rank, size)
    for kind, backend_name in device.backends.items():
        own_store = dist.PrefixStore(kind, store)
        if backend_name == "gloo":
            backend: Any = dist.ProcessGroupGloo(own_store, rank, size, timeout)
            backend_type = dist.ProcessGroup.BackendType.GLOO
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(own_store, rank, size, options)
            backend_type = dist.ProcessGroup.BackendType.NCCL
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(kind), backend_type, backend)
        group._set_default_backend(backend_type)
    return group
