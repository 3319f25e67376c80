"""Give every pipeline rank all the stages for generation, so that PP becomes DP.

The own stage stays where training keeps it; the other stages live in a `MemoryBuffer` that exists only while
generating.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.hybrid_engine.memory_buffer import MemoryBuffer
from megatron_rl.hybrid_engine.plan import PipelinePlan, Slot, StageLayout, make_plan, numel_lacking

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class FlatParameters:
    """One stage's parameters in one flat tensor: `data` [numel] is Megatron's buffer, `layout` says what is where."""

    data: torch.Tensor
    layout: StageLayout


class AllGatherPPModel:
    """The whole model (this TP shard of it) as named views of the own stage's buffer and of the foreign one.

    Building it is collective over `pp_group` and exchanges the layouts once; the foreign buffer starts released.
    `bytes_received` counts what arrived in the last `gather()`.
    """

    def __init__(self, own: FlatParameters, pp_group: dist.ProcessGroup) -> None:
        self.own = own
        self.pp_group = pp_group
        self.stage = pp_group.rank()
        layouts: list = [None] * pp_group.size()
        dist.all_gather_object(layouts, own.layout, group=pp_group)
        itemsize = own.data.element_size()
        self.plan: PipelinePlan = make_plan(layouts, BUCKET_BYTES // itemsize)
        self.lower_bound_bytes = numel_lacking(layouts, self.stage) * itemsize
        self.bytes_received = 0
        self.foreign = MemoryBuffer(self.plan.foreign_numel[self.stage], own.data.dtype, own.data.device)
        self.tensors = self._views()

    def _views(self) -> dict[str, torch.Tensor]:
        def view(data: torch.Tensor, slot: Slot) -> torch.Tensor:
            return data[slot.offset : slot.stop].view(slot.shape)

        own = {slot.name: view(self.own.data, slot) for slot in self.own.layout.slots}
        foreign = {slot.name: view(self.foreign.data, slot) for slot in self.plan.foreign[self.stage]}
        return own | foreign

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the foreign buffer with the current weights of the other stages. All of `pp_group` must call."""
        # Phase 1: memory
        self.foreign.allocate()
        # Phase 2: post every transfer, straight between the buffers
        self.bytes_received = 0
        pending = []
        for transfer in self.plan.transfers:
            pending += self._post(transfer)
        # Phase 3: wait
        for work in pending:
            work.wait()

    def _post(self, transfer) -> list[dist.Work]:
        """Start this rank's part of one transfer; a broadcast when all stages take part, else point to point."""
        is_source = self.stage == transfer.source
        if is_source:
            flat = self.own.data[transfer.start : transfer.stop]
        elif self.stage in transfer.receivers:
            offset = transfer.offset_at(self.stage)
            flat = self.foreign.data[offset : offset + transfer.numel]
            self.bytes_received += flat.numel() * flat.element_size()
        else:
            return []
        global_rank = dist.get_process_group_ranks(self.pp_group)
        if len(transfer.receivers) == self.plan.num_stages - 1:
            return [dist.broadcast(flat, src=global_rank[transfer.source], group=self.pp_group, async_op=True)]
        if is_source:
            return [dist.isend(flat, dst=global_rank[stage], group=self.pp_group) for stage in transfer.receivers]
        return [dist.irecv(flat, src=global_rank[transfer.source], group=self.pp_group)]

    def release(self) -> None:
        """Give the other stages' memory back; the own stage is untouched."""
        self.foreign.release()
