"""From a training pool to a rollout pool on other ranks: both ends of the weight transfer between two worlds.

A rollout rank receives exactly its shard; all training ranks together send the model once, however many replicas
generate (`bridge_plan.py`). Beside the weights themselves either end needs one bucket of memory while a transfer runs.

On every rank of both pools, training's ranks first, after each pool has made its own world:

    group = open_joint_group(store, number, num_training + num_rollout, device, timeout)
    transport = Transport(group)

    # training rank r, number r                         # rollout rank r, number num_training + r
    sender = BridgeSender(                              receiver = BridgeReceiver(
        flat, tensors, transport,                           member, tensors, dtype, device.torch_device, transport,
        bucket_bytes=64 << 20, verify_every=1)              bucket_bytes=64 << 20, verify_every=1)
                                                        bind(vllm_model, receiver.tensors)  # once: addresses stay
    sent = sender.send(version=num_steps)               came = receiver.receive()  # came.version == num_steps

`flat` is what `roles.flat_parameters` makes; `member` is `Member(rank=r, node=..., tp_rank=..., wanted=place)`.
Building an end is collective over both pools, and so is every transfer. A peer that dies or does not come ends in a
RuntimeError within the group's time-out; the group is broken then: open another, and build both ends again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.device import synchronize
from megatron_rl.hybrid_engine.allgather_pp import FlatParameters, slot_view
from megatron_rl.hybrid_engine.bridge_plan import make_bridge_plan, model_numel
from megatron_rl.hybrid_engine.exchange import NUM_SCRATCH, Exchange
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.memory_buffer import MemoryBuffer
from megatron_rl.hybrid_engine.plan import ExchangePlan, Member, MemberPlan
from megatron_rl.hybrid_engine.schedule import make_schedule
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightVerifier
from megatron_rl.parallel.sharding import LogicalTensor


@dataclass(frozen=True)
class Transfer:
    """What one transfer was on one rank. version: of the weights, in optimizer steps.

    model_bytes: of the whole model; what all senders together send. wait_seconds: until both pools were there.
    verify_seconds: comparing checksums, 0 when this transfer had none.
    """

    version: int
    model_bytes: int
    wait_seconds: float
    exchange_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class SendReport(Transfer):
    """bytes_sent: what left this training rank; summed over the pool it is `model_bytes`."""

    bytes_sent: int


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

    def send(self, version: int) -> SendReport:
        """Send the current weights, the same `version` on every training rank; they must not change meanwhile.

        Raises WeightMismatchError on all ranks of both pools when a piece arrived wrong on any.
        """
        before = self._end.transport.sent_to.total()
        transfer = self._end.transfer(version)
        return SendReport(**vars(transfer), bytes_sent=self._end.transport.sent_to.total() - before)


class BridgeReceiver:
    """A rollout rank's end: its shard of every tensor, in one flat buffer that never moves.

    member: this rank's place, which holds nothing. dtype: training's. tensors, bucket_bytes, verify_every and errors:
    as of BridgeSender. `tensors` of the instance: name -> view, undefined until the first transfer; rows that only pad
    a vocabulary are 0. version: that of the weights, None before the first transfer and after one that failed.
    """

    def __init__(
        self,
        member: Member,
        tensors: Mapping[str, LogicalTensor],
        dtype: torch.dtype,
        device: torch.device,
        transport: Transport,
        *,
        bucket_bytes: int,
        verify_every: int = 1,
    ) -> None:
        meeting = meet(Offer(member, False, dtype, bucket_bytes, digest(tensors)), tensors, transport)
        mine: MemberPlan = meeting.plan.plans[transport.number]
        buffers = {FOREIGN: torch.empty(mine.foreign_numel, dtype=dtype, device=device)}
        self.tensors = {name: slot_view(buffers, slot) for name, slot in mine.slots.items()}
        # Rows that only pad a vocabulary are nobody's: they never arrive, and no transfer writes them.
        for slot in mine.foreign:
            if slot.shard.is_padded:
                self.tensors[slot.name].zero_()
        self.version: int | None = None
        self._lower_bound = mine.numel_lacking * dtype.itemsize
        self._num_senders = meeting.num_senders
        self._nodes = [one.node for one in meeting.plan.members]
        self._node = member.node
        self._network_bound = meeting.plan.numel_over_network(transport.number) * dtype.itemsize
        self._end = BridgeEnd(meeting, buffers, transport, verify_every)

    @property
    def scratch(self) -> MemoryBuffer:
        """What a transfer takes beside the weights while it runs."""
        return self._end.scratch

    def receive(self) -> ReceiveReport:
        """Take the weights that training sends. Raises WeightMismatchError on all ranks alike when one is wrong."""
        transport = self._end.transport
        self.version = None
        came, passed_on = transport.received_from.copy(), transport.sent_to.total()
        transfer = self._end.transfer()
        came = transport.received_from - came
        self.version = transfer.version
        return ReceiveReport(
            **vars(transfer),
            bytes_received=came.total(),
            lower_bound_bytes=self._lower_bound,
            bytes_fetched=sum(came[number] for number in range(self._num_senders)),
            bytes_passed_on=transport.sent_to.total() - passed_on,
            network_bytes=sum(size for number, size in came.items() if self._nodes[number] != self._node),
            network_bound_bytes=self._network_bound,
        )


@dataclass(frozen=True)
class Offer:
    """What one rank tells all others when a bridge is built."""

    member: Member
    sends: bool
    dtype: torch.dtype
    bucket_bytes: int
    model: str


@dataclass(frozen=True)
class Meeting:
    """What all ranks of a bridge agree on. message_numel: elements of the longest message."""

    plan: ExchangePlan
    num_senders: int
    model_bytes: int
    message_numel: int


def digest(tensors: Mapping[str, LogicalTensor]) -> str:
    """The same for equal descriptions of a model, and for no others."""
    return hashlib.sha256(repr(sorted(tensors.items())).encode()).hexdigest()


def meet(mine: Offer, tensors: Mapping[str, LogicalTensor], transport: Transport) -> Meeting:
    """Exchange the offers and plan; collective. Raises ValueError on all ranks alike when they do not fit."""
    offers: Sequence[Offer] = transport.all_gather_object(mine)
    num_senders = sum(offer.sends for offer in offers)
    if not 0 < num_senders < len(offers) or not all(offer.sends for offer in offers[:num_senders]):
        ends = ["training" if offer.sends else "rollout" for offer in offers]
        raise ValueError(f"a bridge numbers its training ranks first and has both kinds of ends, not {ends}")
    dtypes = {str(offer.dtype) for offer in offers}
    if len(dtypes) > 1:
        raise ValueError(f"a bridge moves weights of one dtype, its ends have {sorted(dtypes)}")
    if len({offer.model for offer in offers}) > 1:
        raise ValueError("the ends of a bridge describe different models: names, shapes or cuts of tensors differ")
    members = [offer.member for offer in offers]
    plan = make_bridge_plan(tensors, members[:num_senders], members[num_senders:])
    size = mine.dtype.itemsize
    message_numel = max(1, min(offer.bucket_bytes for offer in offers) // size // NUM_SCRATCH)
    return Meeting(plan, num_senders, model_numel(tensors) * size, message_numel)


class BridgeEnd:
    """What both ends do: agree on a version, run the exchange, compare checksums."""

    def __init__(
        self, meeting: Meeting, buffers: Mapping[int, Tensor], transport: Transport, verify_every: int
    ) -> None:
        self.transport = transport
        self._meeting = meeting
        self._verify_every = verify_every
        self._num_transfers = 0
        self._device = next(iter(buffers.values())).device
        # NCCL connects a group at its first collective, and not all ranks take part in the first message.
        transport.all_gather(torch.zeros(1, device=self._device))
        number = transport.number
        steps = make_schedule(meeting.plan, number, meeting.message_numel)
        self._exchange = Exchange(steps, [], buffers, transport)
        self._verifier = WeightVerifier(meeting.plan, number, buffers, transport)

    @property
    def scratch(self) -> MemoryBuffer:
        """What a transfer takes beside the weights while it runs."""
        return self._exchange.scratch

    def transfer(self, version: int = 0) -> Transfer:
        """Move the weights. version: of what a training rank sends; that of a rollout rank is not looked at.

        Raises RuntimeError on all ranks alike when training's ranks send different versions.
        """
        start = time.perf_counter()
        asked = torch.tensor([version, self._is_verified()], dtype=torch.int64)
        headers = torch.stack(self.transport.all_gather(asked))
        self._num_transfers += 1
        versions = headers[: self._meeting.num_senders, 0].unique().tolist()
        if len(versions) > 1:
            raise RuntimeError(f"the training ranks send weights of different versions: {versions}")
        before_exchange = time.perf_counter()
        self._exchange.run()
        synchronize(self._device)
        before_verify = time.perf_counter()
        if headers[:, 1].any():
            self._verifier.verify()
        after = time.perf_counter()
        return Transfer(
            version=versions[0],
            model_bytes=self._meeting.model_bytes,
            wait_seconds=before_exchange - start,
            exchange_seconds=before_verify - before_exchange,
            verify_seconds=after - before_verify,
        )

    def _is_verified(self) -> bool:
        """The first always is: a wrong plan or a wrong order of messages is wrong from the start."""
        return self._num_transfers == 0 or (self._verify_every > 0 and self._num_transfers % self._verify_every == 0)
