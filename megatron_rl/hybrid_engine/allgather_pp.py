"""Give every rank the rollout shard of the whole model, so that PP and the spared TP become DP for generation.

A shard that training keeps in the form that generation needs stays where it is. Everything else is in a `MemoryBuffer`
that exists only during generation: the stages of other ranks, and shards merged from several TP ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_rl.hybrid_engine.exchange import NUM_SCRATCH, Exchange, copy_all, region_view
from megatron_rl.hybrid_engine.layout import FOREIGN, Slot
from megatron_rl.hybrid_engine.offload import HostBuffer
from megatron_rl.hybrid_engine.plan import Member, MemberPlan, plan_memory
from megatron_rl.hybrid_engine.schedule import local_copies, make_schedule
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightVerifier
from megatron_rl.parallel.sharding import LogicalTensor

FOREIGN_POOL = "megatron_rl received weights"
"""The tag of the receive buffer in vLLM's CUDA allocator. No two buffers may have one tag."""


@dataclass(frozen=True)
class FlatParameters:
    """A rank's training parameters: its flat buffers (Megatron's `param_data`, one dtype), and the slots in them."""

    buffers: tuple[torch.Tensor, ...]
    member: Member


class Bytes(NamedTuple):
    """Bytes that a rank receives: in total, and of these from other nodes."""

    total: int
    network: int


class AllGatherPPModel:
    """This rank's rollout shard of the whole model, as named views of training's buffers and of the receive buffer.

    The constructor is collective over `transport`, that of the exchange group, and exchanges the layouts once. The
    receive buffer starts released. All ranks of the group must call `gather` and `verify` together.

    tensors: every logical tensor of the model. bucket_bytes: scratch memory of a gather. drop_train_weights: let
    `drop_training` release training's buffers on the ranks that would otherwise hold their shards twice. memory_pool:
    of the receive buffer in vLLM's CUDA allocator.

    Raises ValueError if training's shards do not make up the model, or if they are to be dropped and the rollout shards
    do not contain them.
    """

    def __init__(
        self,
        own: FlatParameters,
        tensors: Mapping[str, LogicalTensor],
        transport: Transport,
        *,
        bucket_bytes: int,
        drop_train_weights: bool = False,
        memory_pool: str = FOREIGN_POOL,
    ) -> None:
        self.own = own
        self.transport = transport
        self.number = transport.number
        members = transport.all_gather_object(own.member)
        self.plan, self.is_dropping = plan_memory(tensors, members, self.number, drop_train_weights)
        like = own.buffers[0]
        transport.connect(like.device)
        self.foreign = MemoryBuffer(self.mine.foreign_numel, like.dtype, like.device, memory_pool)
        buffers = dict(enumerate(own.buffers)) | {FOREIGN: self.foreign.data}
        message_numel = max(1, bucket_bytes // like.element_size() // NUM_SCRATCH)
        self._exchange = Exchange(
            make_schedule(self.plan, self.number, message_numel),
            local_copies(self.plan, self.number),
            buffers,
            transport,
        )
        self._verifier = WeightVerifier(self.plan, self.number, buffers, transport)
        self.tensors = {name: slot_view(buffers, slot) for name, slot in self.mine.slots.items()}
        self._padded = [self.tensors[slot.name] for slot in self.mine.foreign if slot.shard.is_padded]
        self._restore = self._restore_copies(buffers) if self.is_dropping else []
        self.foreign.release()

    @property
    def mine(self) -> MemberPlan:
        """This rank's part of the plan."""
        return self.plan.plans[self.number]

    @property
    def lower_bound(self) -> Bytes:
        """The least that a gather must bring to this rank: bytes needed minus bytes held, and the part its node does
        not have.

        A piece that a node does not have is counted for the one rank of the node that fetches it.
        """
        size = self.own.buffers[0].element_size()
        return Bytes(self.mine.numel_lacking * size, self.plan.numel_over_network(self.number) * size)

    @property
    def scratch(self) -> MemoryBuffer:
        """Memory that a gather takes next to the receive buffer while it runs."""
        return self._exchange.scratch

    @torch.no_grad()
    def gather(self) -> Bytes:
        """Fill the receive buffer with the current weights; returns what was received."""
        self.foreign.allocate()
        before = self.transport.received_from.copy()
        # No rank holds the rows that only pad a vocabulary; memory that was never written may hold NaN.
        for tensor in self._padded:
            tensor.zero_()
        self._exchange.run()
        received, members = self.transport.received_from - before, self.plan.members
        far = sum(num_bytes for source, num_bytes in received.items() if members[source].node != self.own.member.node)
        return Bytes(received.total(), far)

    def verify(self) -> None:
        """Raise WeightMismatchError on every rank if a gathered piece differs from its owner's on any."""
        self._verifier.verify()

    def drop_training(self) -> None:
        """Release training's buffers, if that was asked for and the receive buffer contains them."""
        if self.is_dropping:
            for buffer in self.own.buffers:
                buffer.untyped_storage().resize_(0)

    @torch.no_grad()
    def restore_training(self) -> None:
        """Undo `drop_training`: copy every shard back from the receive buffer, bit for bit."""
        if not self.is_dropping:
            return
        for buffer in self.own.buffers:
            storage = buffer.untyped_storage()
            num_bytes = buffer.numel() * buffer.element_size()
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
                # What no shard covers is padding, which training keeps at 0.
                buffer.zero_()
        copy_all(self._restore)

    def memory(self) -> dict[str, int]:
        """Bytes next to training's buffers, by the names of the memory plan."""
        return {"received shards": self.foreign.num_bytes if self.foreign.is_allocated else 0}

    def copy_on_host(self) -> HostBuffer:
        """Copy the receive buffer to host memory, pinned where the buffer is on a GPU."""
        copy = HostBuffer(self.foreign.data.is_cuda)
        copy.keep(self.foreign.data)
        return copy

    def take_from(self, copy: HostBuffer) -> None:
        """Fill the receive buffer from its copy on the host."""
        self.foreign.allocate()
        copy.give(self.foreign.data)

    def release(self) -> None:
        """Release the receive buffer's memory, and not training's."""
        self.foreign.release()

    def _restore_copies(self, buffers: Mapping[int, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (
                region_view(buffers, slot.region(part.segment, part.box)),
                region_view(buffers, self.mine.slots[slot.name].region(part.segment, part.box)),
            )
            for slot in self.own.member.held
            for part in slot.shard.parts
        ]


def slot_view(buffers: Mapping[int, torch.Tensor], slot: Slot) -> torch.Tensor:
    """A whole shard, in its shape."""
    return buffers[slot.buffer][slot.offset : slot.stop].view(slot.shard.shape)
