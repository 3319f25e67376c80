"""From a training pool to a rollout pool on other ranks: both ends of the weight transfer between two worlds.

A rollout rank receives exactly its shard; all training ranks together send the model once, however many replicas
generate (`bridge_plan.py`). Beside the weights themselves either end needs one bucket of memory while a transfer runs.

On every rank of both pools, training's ranks first, after each pool has made its own world:

    group = open_joint_group(store, number, num_training + num_rollout, device, timeout)
    transport = Transport(group)

    # training rank r, number r                         # rollout rank r, number num_training + r
                                                        receiver = BridgeReceiver(
                                                            place, tensors, dtype, device.torch_device,
                                                            bucket_bytes=64 << 20, verify_every=1)
                                                        bind(vllm_model, receiver.tensors)  # once: addresses stay
    sender = BridgeSender(                              receiver.join(member, transport)
        flat, tensors, transport,
        bucket_bytes=64 << 20, verify_every=1)
    sent = sender.send(version=num_steps)               came = receiver.receive()  # came.version == num_steps

`flat` is what `roles.flat_parameters` makes; `member` is `Member(rank=r, node=..., tp_rank=..., wanted=place)`.
Building a sender and `join` are collective over both pools, and so is every transfer. A peer that dies ends in a
BrokenBridgeError on all ranks that have not finished, one that does not come within the group's time-out. All must then
open another group: training builds new senders, a receiver that is left keeps its memory and joins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megatron_rl.hybrid_engine.allgather_pp import FlatParameters, slot_view
from megatron_rl.hybrid_engine.bridge_end import BridgeEnd, Offer, Transfer, digest, meet
from megatron_rl.hybrid_engine.bridge_plan import receiving_slots
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.memory_buffer import MemoryBuffer
from megatron_rl.hybrid_engine.plan import ExchangePlan, Member
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.parallel.sharding import LogicalTensor, Place


@dataclass(frozen=True)
class SendReport(Transfer):
    """bytes_sent: what left this training rank; summed over the pool it is `model_bytes`."""

    bytes_sent: int


@dataclass(frozen=True)
class SendAttempt:
    """How sending one version ended, on all training ranks alike. broken: why not, when a rank was lost in it.

    report: this rank's, where it did not break. concluded: what the receiving ranks said, where they were called.
    """

    version: int
    broken: str = ""
    report: SendReport | None = None
    concluded: Sequence[Any] = ()


@dataclass(frozen=True)
class ReceiveReport(Transfer):
    """bytes_received: in all; lower_bound_bytes: the rank's rollout shard without padding, which it must equal.

    bytes_fetched: of those received, what came out of training; summed over the pool it is `model_bytes`.
    bytes_passed_on: what this rank sent to other rollout ranks.
    network_bytes: of those received, what came from other nodes; network_bound_bytes: what the plan brings from there.
    """

    bytes_received: int
    lower_bound_bytes: int
    bytes_fetched: int
    bytes_passed_on: int
    network_bytes: int
    network_bound_bytes: int


class BridgeSender:
    """A training rank's end. Every training rank must build one, all replicas and stages, and every transfer is theirs.

    own: this rank's flat buffers, which stay where they are, and its slots in them. tensors: every logical tensor of
    the model. bucket_bytes: scratch memory of a transfer; the smallest of all ranks' is taken. verify_every: compare
    checksums at the first transfer and at every so many later ones, 0: at the first only; a transfer is verified when
    either end asks for it.

    Raises ValueError, on all ranks of both pools alike, when the ends do not fit each other or training's shards do
    not make up the model.
    """

    def __init__(
        self,
        own: FlatParameters,
        tensors: Mapping[str, LogicalTensor],
        transport: Transport,
        *,
        bucket_bytes: int,
        verify_every: int = 1,
    ) -> None:
        like = own.buffers[0]
        offer = Offer(replace(own.member, wanted=None), True, like.dtype, bucket_bytes, digest(tensors))
        meeting = meet(offer, tensors, transport)
        self._end = BridgeEnd(meeting, dict(enumerate(own.buffers)), transport, verify_every)

    @property
    def scratch(self) -> MemoryBuffer:
        """What a transfer takes beside the weights while it runs."""
        return self._end.scratch

    def close(self) -> None:
        """Leave the group: whoever still waits for this rank in it fails."""
        self._end.transport.close()

    def send(self, version: int) -> SendReport:
        """Send the current weights, the same `version` on every training rank; they must not change meanwhile.

        Raises WeightMismatchError on all ranks of both pools when a piece arrived wrong on any, and BrokenBridgeError
        on some when a rank was lost; others may have finished.
        """
        before = self._end.transport.sent_to.total()
        transfer = self._end.transfer(version)
        return SendReport(**vars(transfer), bytes_sent=self._end.transport.sent_to.total() - before)

    def conclude(self) -> list[Any]:
        """What every receiving rank says about the transfer, by number: it is over on all of them. Together with their
        `conclude`. Raises BrokenBridgeError when a rank was lost.
        """
        return self._end.conclude(None)[self._end.num_senders :]


@dataclass(frozen=True)
class Joined:
    """A receiver's place in a group. number: among its members; itemsize: bytes of an element."""

    end: BridgeEnd
    plan: ExchangePlan
    number: int
    itemsize: int

    @cached_property
    def lower_bound_bytes(self) -> int:
        """What the rank lacks."""
        return self.plan.plans[self.number].numel_lacking * self.itemsize

    @cached_property
    def network_bound_bytes(self) -> int:
        """What the plan brings from other nodes."""
        return self.plan.numel_over_network(self.number) * self.itemsize

    def is_elsewhere(self, number: int) -> bool:
        """Whether another member is on another node."""
        return self.plan.members[number].node != self.plan.members[self.number].node


class BridgeReceiver:
    """A rollout rank's end: its shard of every tensor, in one flat buffer that never moves. `join` comes first.

    place: of the shard. dtype: training's. tensors, bucket_bytes, verify_every and errors: as of BridgeSender.
    second_buffer: receive into another buffer of the same layout, so that the weights that generation reads stay until
    `swap`.

    Of the instance: tensors: name -> view, undefined until the first transfer; rows that only pad a vocabulary are 0.
    version: that of those weights, None before any came and, without a second buffer, after a transfer that failed.
    arrived: that of the second buffer's, until they are swapped.
    """

    def __init__(
        self,
        place: Place,
        tensors: Mapping[str, LogicalTensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bucket_bytes: int,
        verify_every: int = 1,
        second_buffer: bool = False,
    ) -> None:
        self._tensors, self._dtype, self._bucket_bytes = tensors, dtype, bucket_bytes
        self._verify_every = verify_every
        mine = receiving_slots(tensors, place)
        self._slots = mine.slots
        # Rows that only pad a vocabulary are nobody's: they never arrive, no transfer writes them, and so they stay 0.
        make = torch.zeros if any(slot.shard.is_padded for slot in mine.foreign) else torch.empty
        self._flat = make(mine.foreign_numel, dtype=dtype, device=device)
        self._arriving = make(mine.foreign_numel, dtype=dtype, device=device) if second_buffer else None
        self.tensors = {name: slot_view({FOREIGN: self._flat}, slot) for name, slot in mine.slots.items()}
        self.version: int | None = None
        self.arrived: int | None = None
        self._joined: Joined | None = None

    @property
    def scratch(self) -> MemoryBuffer:
        """What a transfer takes beside the weights while it runs."""
        return self._there.end.scratch

    @property
    def has_second_buffer(self) -> bool:
        """Whether weights may arrive while those of an earlier version are read."""
        return self._arriving is not None

    @property
    def arriving_bytes(self) -> int:
        """What the second buffer takes; 0 where there is none."""
        return 0 if self._arriving is None else self._arriving.untyped_storage().nbytes()

    def close(self) -> None:
        """Leave the group: whoever still waits for this rank in it fails. Nothing happens where there is none."""
        if self._joined is not None:
            self._joined.end.transport.close()

    def join(self, member: Member, transport: Transport) -> None:
        """Meet the other ends in a group; collective over all that are in it. All memory stays where it is.

        member: this rank's place, which holds nothing. What has arrived over another group and was not swapped is
        forgotten, for it may not have arrived everywhere. Raises ValueError, on all ranks alike, when the ends do not
        fit each other, and on this one when the shard would be another than that of its place.
        """
        self.close()
        self.arrived = None
        offer = Offer(member, False, self._dtype, self._bucket_bytes, digest(self._tensors))
        meeting = meet(offer, self._tensors, transport)
        mine = meeting.plan.plans[transport.number]
        if mine.slots != self._slots:
            raise ValueError(f"{member.name} would receive another shard than the one that it has room for")
        target = self._flat if self._arriving is None else self._arriving
        end = BridgeEnd(meeting, {FOREIGN: target}, transport, self._verify_every)
        self._joined = Joined(end, meeting.plan, transport.number, self._flat.element_size())

    def receive(self) -> ReceiveReport:
        """Take the weights that training sends. Raises WeightMismatchError on all ranks alike when one is wrong, and
        BrokenBridgeError on some when a rank was lost; others may have finished.
        """
        joined = self._there
        transport = joined.end.transport
        self.arrived = None
        if self._arriving is None:
            self.version = None
        came, passed_on = transport.received_from.copy(), transport.sent_to.total()
        transfer = joined.end.transfer()
        came = transport.received_from - came
        if self._arriving is None:
            self.version = transfer.version
        else:
            self.arrived = transfer.version
        return ReceiveReport(
            **vars(transfer),
            bytes_received=came.total(),
            lower_bound_bytes=joined.lower_bound_bytes,
            bytes_fetched=sum(came[number] for number in range(joined.end.num_senders)),
            bytes_passed_on=transport.sent_to.total() - passed_on,
            network_bytes=sum(size for number, size in came.items() if joined.is_elsewhere(number)),
            network_bound_bytes=joined.network_bound_bytes,
        )

    def conclude(self, said: Any) -> None:
        """Tell the senders that the transfer is over here; with their `conclude`. Raises BrokenBridgeError as there."""
        self._there.end.conclude(said)

    @torch.no_grad()
    def swap(self) -> None:
        """Let `tensors` be what arrived in the second buffer, by a copy. Raises RuntimeError when nothing has."""
        if self._arriving is None or self.arrived is None:
            raise RuntimeError("no weights have arrived in a second buffer")
        self._flat.copy_(self._arriving)
        self.version, self.arrived = self.arrived, None

    @property
    def _there(self) -> Joined:
        if self._joined is None:
            raise RuntimeError("there is no bridge: join() comes first")
        return self._joined
