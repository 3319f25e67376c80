"""Streams of a weight transfer: tensors of one dtype with their own plan, byte bound and verifier over one transport.

Every rank of both pools builds the same streams in the same order, and runs and verifies them in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_rl.hybrid_engine.allgather_pp import slot_view
from megatron_rl.hybrid_engine.exchange import Exchange
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.plan import ExchangePlan, Member
from megatron_rl.hybrid_engine.schedule import make_schedule
from megatron_rl.hybrid_engine.transfer_plan import make_transfer_plan, model_numel, receiving_slots
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightVerifier
from megatron_rl.parallel.sharding import LogicalTensor, Place

WHOLE = Place(tp_rank=0, tp_size=1, vocab_multiple=1)


class Stream:
    """One stream on one rank, bound to its buffers, which never move.

    message_bytes: size of the longest message. bounds: least bytes that this rank can receive if everything moves: in
    all, and of these from other nodes. whole_bytes: what all senders together send then. was_compared: whether `verify`
    was called; the first time that a stream moves it always is.
    """

    def __init__(
        self, plan: ExchangePlan, buffers: Mapping[int, Tensor], transport: Transport, message_bytes: int
    ) -> None:
        number, size = transport.number, next(iter(buffers.values())).element_size()
        self.itemsize, self.message_numel = size, max(1, message_bytes // size)
        self.exchange = Exchange(make_schedule(plan, number, self.message_numel), [], buffers, transport)
        self._verifier = WeightVerifier(plan, number, buffers, transport)
        self.whole_bytes = model_numel(plan.tensors) * size
        self.bounds = plan.plans[number].numel_lacking * size, plan.numel_over_network(number) * size
        self.was_compared = False

    def run(self) -> None:
        """Move everything; every rank must call."""
        self.exchange.run()

    def verify(self) -> None:
        """Compare checksums; every rank must call. Raises WeightMismatchError on all ranks alike."""
        self.was_compared = True
        self._verifier.verify()


class Constants:
    """Float32 tensors that every rank of both pools has whole, in one buffer that never moves: biases of experts.

    described: by name. tensors: name -> view that generation reads. second_buffer: arriving values are read only after
    `swap`. moved: the buffer of a stream, by its number.
    """

    def __init__(
        self, described: Mapping[str, LogicalTensor], device: torch.device, second_buffer: bool = False
    ) -> None:
        self.described = described
        mine = receiving_slots(described, WHOLE)
        self._slots = mine.slots
        self._flat = torch.zeros(mine.foreign_numel, device=device)
        self._arriving = torch.zeros_like(self._flat) if second_buffer else self._flat
        self.moved = {FOREIGN: self._arriving}
        self.tensors = {name: slot_view({FOREIGN: self._flat}, slot) for name, slot in mine.slots.items()}

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the values of all names, in both buffers; returns the views."""
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])
        self._arriving.copy_(self._flat)
        return self.tensors

    @torch.no_grad()
    def swap(self) -> None:
        """Copy the second buffer's values to `tensors`."""
        self._flat.copy_(self._arriving)

    def plan(self, members: Sequence[Member], num_senders: int) -> ExchangePlan:
        """Plan the stream between the members of a weight transfer, the senders first; each sender has everything."""
        held = tuple(self._slots.values())
        senders = [replace(member, held=held, wanted=None) for member in members[:num_senders]]
        receivers = [replace(member, names=None) for member in members[num_senders:]]
        return make_transfer_plan(self.described, senders, receivers)
