"""Messages between the members of one process group, by member number, and a group over the ranks of two pools.

A pool's ranks are a torch.distributed world of their own. `open_joint_group` makes one more group over the ranks of
two worlds, on a store of its own: it belongs to neither world, and their own collectives continue next to it.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.device import Device

POLL_S = 1e-3
"""Seconds between two looks at a message of an own group on a GPU."""


class Transport:
    """Messages of an exchange over a process group; counts their bytes. A member's number is its rank in the group.

    group: a group that `torch.distributed` knows, or one of `open_joint_group`. Tensors travel over the group's backend
    for their device, objects over the backend for the CPU.
    is_own: nothing else uses the group, so `close` may leave it. timeout: of a message in such a group; the backend's
    own would end the process. None: as for every collective.
    received_from, sent_to: number of the other member -> bytes of messages so far.
    """

    def __init__(self, group: dist.ProcessGroup, is_own: bool = False, timeout: timedelta | None = None) -> None:
        self._group: dist.ProcessGroup | None = group
        self.is_own, self.timeout = is_own, timeout
        self.received_from: Counter[int] = Counter()
        self.sent_to: Counter[int] = Counter()

    @property
    def group(self) -> dist.ProcessGroup:
        """The group. Raises RuntimeError after `close`."""
        if self._group is None:
            raise RuntimeError("this rank has left the group")
        return self._group

    def close(self) -> None:
        """Leave the group if it `is_own`: what others wait for from this rank fails at once. May be called twice.

        Gloo closes connections once nothing references the group or a message in it; NCCL needs a call.
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
        """Begin to send a tensor to one member and to receive another one from a member: (tensor, member number)."""
        device = next(message[0].device for message in (send, receive) if message is not None)
        # NCCL runs calls in order: without one coalesced call, two ranks that both send first would block each other.
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
        """Wait until what `start` began is done and the received tensor may be read.

        Raises RuntimeError in an own group where a message is not over after `timeout`; the group is aborted then.
        """
        if self.is_own and self.timeout is not None and self._waits_on_device:
            self._wait_on_host(works, self.timeout)
        for work in works:
            work.wait()

    @property
    def _waits_on_device(self) -> bool:
        """Whether `wait` lets a stream wait and not the host, as NCCL's does: a lost peer is not noticed there."""
        return any(name != "gloo" for name in backend_names(self.group))

    def _wait_on_host(self, works: Sequence[dist.Work], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not all(work.is_completed() for work in works):
            if time.monotonic() > deadline:
                self.group.abort()
                raise RuntimeError(f"a message was not over after {timeout.total_seconds():g} s; its peer may be lost")
            time.sleep(POLL_S)

    def connect(self, device: torch.device) -> None:
        """Open the group's connections for a device; every member must call.

        NCCL connects a group at its first collective, and not all ranks take part in the first message.
        """
        self.all_gather(torch.zeros(1, device=device))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by number; they must have one shape. Every member must call."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group.allgather([gathered], [tensor.contiguous()]).wait()
        return gathered

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all members, by number; they must be picklable. Every member must call."""
        pickled = pickle.dumps(value)
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(pickled)]))]
        padded = torch.frombuffer(bytearray(pickled.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        gathered = self.all_gather(padded)
        return [pickle.loads(data[:length].numpy().tobytes()) for data, length in zip(gathered, lengths, strict=True)]


def backend_names(group: dist.ProcessGroup) -> set[str]:
    """Names of the backends of a group."""
    return {group._get_backend(kind).name() for kind in group._device_types}


def open_joint_group(store: dist.Store, rank: int, size: int, device: Device, timeout: timedelta) -> dist.ProcessGroup:
    """One group over the ranks of two worlds; every one of its `size` ranks must call, with its own `rank` in it.

    store: reachable from all ranks, for example a second `TCPStore`; a second group needs a prefix of its own there.
    timeout: how long opening waits for missing ranks, and a message for its peer. `torch.distributed` does not
    know the group: use it through `Transport`. After a failure or a time-out it is broken for all its ranks. Raises
    torch.distributed.DistStoreError or RuntimeError if ranks are missing.
    """
    store = dist.PrefixStore("weight_transfer", store)
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
