"""Adapters of several copies of one model, all resident for generation.

A copy has the layout of training: each rank has its shards. An exchange of its own, which reads a staging buffer and
not training's memory, makes the rollout shard of it; training keeps its weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.allgather_pp import AllGatherPPModel, Bytes
from megatron_rl.hybrid_engine.plan import IN_SLOTS, STAGED
from megatron_rl.hybrid_engine.verify import is_verified


class AdapterSlots:
    """A rank's rollout shards of `num_slots` adapters. All ranks of the exchange group must call `fill` together.

    exchange: brings one adapter from staging buffers of the ranks. tensors: name -> [slots, rows, columns]; they never
    move. verify_every: compare checksums at the first and at every Nth filling; 0: at the first only.
    """

    def __init__(self, exchange: AllGatherPPModel, num_slots: int, verify_every: int) -> None:
        """Allocate the slots, full of zeros."""
        self._exchange, self._verify_every = exchange, verify_every
        shapes = {name: (num_slots, *tensor.shape) for name, tensor in exchange.tensors.items()}
        like = exchange.own.buffers[0]
        self.tensors = {name: like.new_zeros(shape) for name, shape in shapes.items()}
        self._num_fillings = 0
        self._is_filled = [False] * num_slots

    @property
    def empty(self) -> list[int]:
        """Slots that were never filled, so that no request may name them."""
        return [slot for slot, is_filled in enumerate(self._is_filled) if not is_filled]

    @torch.no_grad()
    def fill(self, slot: int, shards: Sequence[Tensor]) -> Bytes:
        """Have a copy in a slot, in place of an older one; returns the bytes received.

        shards: this rank's training shards of the copy, flat, as the exchange's own buffers are. Raises
        WeightMismatchError if a piece arrives damaged, and leaves the slot empty.
        """
        self._is_filled[slot] = False
        for buffer, shard in zip(self._exchange.own.buffers, shards, strict=True):
            buffer.copy_(shard)
        try:
            received = self._exchange.gather()
            if is_verified(self._num_fillings, self._verify_every):
                self._exchange.verify()
            for name, tensor in self.tensors.items():
                tensor[slot].copy_(self._exchange.tensors[name])
        finally:
            self._exchange.release()
        self._num_fillings += 1
        self._is_filled[slot] = True
        return received

    def memory(self) -> dict[str, int]:
        """Bytes on this rank, by the names of the memory plan."""
        in_slots = sum(tensor.nbytes for tensor in self.tensors.values())
        return {IN_SLOTS: in_slots, STAGED: sum(buffer.nbytes for buffer in self._exchange.own.buffers)}
