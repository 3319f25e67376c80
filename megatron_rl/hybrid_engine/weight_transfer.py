"""Transfer weights from a training pool to a rollout pool on other ranks: the senders' and the receivers' side.

A rollout rank receives exactly its shard; all training ranks together send the model once, however many replicas
generate (`transfer_plan.py`). Each rank needs one bucket of memory next to the weights while a transfer runs.

On every rank of both pools, training's ranks first, after each pool has made its own world:

    group = open_joint_group(store, number, num_training + num_rollout, device, timeout)
    transport = Transport(group)

    # training rank r, number r                         # rollout rank r, number num_training + r
                                                        receiver = WeightReceiver(
                                                            place, tensors, dtype, device.torch_device,
                                                            bucket_bytes=64 << 20, verify_every=1)
                                                        bind(vllm_model, receiver.tensors)  # once: addresses stay
    sender = WeightSender(                              receiver.join(member, transport)
        flat, tensors, transport,
        bucket_bytes=64 << 20, verify_every=1)
    sent = sender.send(version=num_steps)               came = receiver.receive()  # came.version == num_steps

`flat` comes from `roles.flat_parameters`; `member` is `Member(rank=r, node=..., tp_rank=..., wanted=place)`. Building a
sender, `join` and every transfer are collective over both pools. If a peer dies or does not come within the group's
time-out, all ranks that have not finished raise BrokenTransferError. All must then open another group: training builds
new senders; a remaining receiver keeps its memory and joins again.

With `deltas` at all ends only what changed since the last transfer travels (`delta_exchange.py`), if that was over this
group and ended well on all ranks, and else everything. So everything travels first, after joining, and after an error.

A transfer is a list of streams (`streams.py`): the weights, and constants of another dtype in the transfers that
training marks, once they differ from those of the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.device import settled_seconds
from megatron_rl.hybrid_engine.allgather_pp import FlatParameters, slot_view
from megatron_rl.hybrid_engine.delta_exchange import Changes, DeltaExchange
from megatron_rl.hybrid_engine.exchange import NUM_SCRATCH
from megatron_rl.hybrid_engine.layout import FOREIGN
from megatron_rl.hybrid_engine.plan import ExchangePlan, Member
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.hybrid_engine.streams import Constants, Stream
from megatron_rl.hybrid_engine.transfer_plan import make_transfer_plan, named, receiving_slots
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightMismatchError, is_verified
from megatron_rl.parallel.sharding import LogicalTensor, Place

Result = TypeVar("Result")
NO_BASE = -1
CONNECTING_BROKE = "the ranks of a weight transfer could not connect"


class BrokenTransferError(RuntimeError):
    """A rank of either side died or stayed away before a transfer was over. Every rank must join a new group."""


class MixedVersionsError(RuntimeError):
    """The training ranks sent weights of different versions."""


@dataclass(frozen=True)
class Transfer:
    """One transfer on one rank. version: of the weights, in optimizer steps.

    model_bytes: of the whole model. leaving_bytes: what all senders together send, `model_bytes` if all weights travel
    and no constants.
    changed_share: of the elements of the model; None if they were not compared. count_bytes: received from other ranks
    to know what changed where. wait_seconds: until both pools were ready.
    verify_seconds: comparing checksums; 0 if this transfer was not verified.
    """

    version: int
    model_bytes: int
    leaving_bytes: int
    changed_share: float | None
    count_bytes: int
    wait_seconds: float
    exchange_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class SendReport(Transfer):
    """bytes_sent: by this training rank; the sum over the pool is `leaving_bytes`."""

    bytes_sent: int


@dataclass(frozen=True)
class SendAttempt:
    """The result of sending one version, equal on all training ranks. broken: the reason, if a rank was lost.

    report: this rank's report if the transfer did not break. concluded: the receivers' reports, if they were asked.
    """

    version: int
    broken: str = ""
    report: SendReport | None = None
    concluded: Sequence[Any] = ()


@dataclass(frozen=True)
class ReceiveReport(Transfer):
    """bytes_received: in all; it must equal lower_bound_bytes, the rank's rollout shard without padding, or where only
    changes travel the values and indices of those (`delta_sizes.py`). `count_bytes` are no part of these.

    bytes_fetched: received from training ranks; the sum over the pool is `leaving_bytes`. bytes_passed_on: sent to
    other rollout ranks. network_bytes: received from other nodes; network_bound_bytes: what the plan brings from there.
    """

    bytes_received: int
    lower_bound_bytes: int
    bytes_fetched: int
    bytes_passed_on: int
    network_bytes: int
    network_bound_bytes: int


@dataclass(frozen=True)
class Offer:
    """Message of one rank to all others when a weight transfer is built. model: `digest` of its description, constants
    included.
    """

    member: Member
    sends: bool
    dtype: torch.dtype
    bucket_bytes: int
    model: str
    deltas: bool


@dataclass(frozen=True)
class Agreement:
    """Facts that all ranks of a weight transfer agree on. message_bytes: size of the longest message. deltas: whether
    only what changed travels.
    """

    plan: ExchangePlan
    num_senders: int
    message_bytes: int
    deltas: bool


def digest(tensors: Mapping[str, LogicalTensor], constants: Constants | None) -> str:
    """A hash of the description of a model, and of the constants that travel next to its weights."""
    beside = {} if constants is None else constants.described
    return hashlib.sha256(repr([sorted(tensors.items()), sorted(beside.items())]).encode()).hexdigest()


def or_leave(transport: Transport, what: str, body: Callable[[], Result]) -> Result:
    """Return what `body` returns. If its messages fail, this rank leaves the group and raises BrokenTransferError with
    `what`. Ranks that wait for this one then fail at once and not after the group's time-out.
    """
    try:
        return body()
    except (WeightMismatchError, MixedVersionsError):
        raise
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}"
        clear_frames(error.__traceback__)  # a referenced message keeps the connections open
    transport.close()
    raise BrokenTransferError(f"{what}: {reason}")


def agree(mine: Offer, tensors: Mapping[str, LogicalTensor], transport: Transport) -> Agreement:
    """Exchange the offers and plan; collective. Raises ValueError on all ranks alike if they do not fit, and
    BrokenTransferError if a rank was lost.
    """
    offers: Sequence[Offer] = or_leave(transport, CONNECTING_BROKE, lambda: transport.all_gather_object(mine))
    num_senders = sum(offer.sends for offer in offers)
    if not 0 < num_senders < len(offers) or not all(offer.sends for offer in offers[:num_senders]):
        ends = ["training" if offer.sends else "rollout" for offer in offers]
        raise ValueError(f"a weight transfer lists training ranks first and has both kinds of ends, not {ends}")
    dtypes = {str(offer.dtype) for offer in offers}
    if len(dtypes) > 1:
        raise ValueError(f"a weight transfer has one dtype, and its ends have {sorted(dtypes)}")
    if len({offer.model for offer in offers}) > 1:
        raise ValueError(
            "the ends of a weight transfer have different models: names, shapes or shards of tensors differ"
        )
    members = [offer.member for offer in offers]
    plan = make_transfer_plan(tensors, members[:num_senders], members[num_senders:])
    message_bytes = min(offer.bucket_bytes for offer in offers) // NUM_SCRATCH
    return Agreement(plan, num_senders, message_bytes, all(offer.deltas for offer in offers))


class TransferEnd:
    """Steps of both sides: agree on a version, run the exchange, compare checksums.

    bounds: the least bytes that this rank could receive in the last transfer: in all, and of these from other nodes.
    """

    def __init__(
        self,
        agreement: Agreement,
        buffers: Mapping[int, Tensor],
        transport: Transport,
        verify_every: int,
        constants: Constants | None,
    ) -> None:
        self.transport, self.plan, self.num_senders = transport, agreement.plan, agreement.num_senders
        self._verify_every = verify_every
        self._num_transfers = 0
        self._device = next(iter(buffers.values())).device
        or_leave(transport, CONNECTING_BROKE, lambda: transport.connect(self._device))
        self._weights = Stream(self.plan, buffers, transport, agreement.message_bytes)
        self._constants: Stream | None = None
        if constants is not None:
            plan = constants.plan(self.plan.members, self.num_senders)
            self._constants = Stream(plan, constants.moved, transport, agreement.message_bytes)
        self.bounds = (0, 0)
        self.deltas: DeltaExchange | None = None
        if agreement.deltas:
            self.deltas = DeltaExchange(self.plan, buffers, transport, self._weights.message_numel)
        self._base = NO_BASE  # the number of the last transfer, if what it brought is here, or kept here as it was sent

    @property
    def scratch(self) -> MemoryBuffer:
        """Memory that a transfer takes next to the weights while it runs."""
        return self._weights.exchange.scratch

    def transfer(self, version: int = 0, with_constants: bool = False) -> Transfer:
        """Move the weights. version: that of a training rank; a rollout rank's is ignored. with_constants: the
        constants move, too; they do if it is true on one rank.

        Raises MixedVersionsError on all ranks alike if training's ranks send different versions, and
        BrokenTransferError if messages fail (see `or_leave`).
        """
        return or_leave(self.transport, "a transfer of weights broke", lambda: self._transfer(version, with_constants))

    def conclude(self, mine: Any) -> list[Any]:
        """Gather one value from every rank after its part of a transfer, by number; every rank must call.

        When it returns, the weights have arrived everywhere. Raises BrokenTransferError as `transfer`.
        """
        gather = self.transport.all_gather_object
        return or_leave(self.transport, "a transfer of weights broke", lambda: gather(mine))

    def _transfer(self, version: int, with_constants: bool) -> Transfer:
        start = settled_seconds(self._device)
        number, every = self._num_transfers, self._verify_every
        asked = torch.tensor([version, is_verified(number, every), self._base, with_constants], dtype=torch.int64)
        headers = torch.stack(self.transport.all_gather(asked))
        self._num_transfers, self._base = number + 1, NO_BASE
        versions = headers[: self.num_senders, 0].unique().tolist()
        if len(versions) > 1:
            raise MixedVersionsError(f"the training ranks send weights of different versions: {versions}")
        before_exchange = settled_seconds(self._device)
        changes = None
        if self.deltas is not None and number > 0 and headers[:, 2].eq(number - 1).all():
            changes = self.deltas.compare()
        self._move(changes)
        beside = self._constants if headers[:, 3].any() else None
        if beside is not None:
            beside.run()
            self.bounds = self.bounds[0] + beside.bounds[0], self.bounds[1] + beside.bounds[1]
        before_verify = settled_seconds(self._device)
        is_asked = bool(headers[:, 1].any())
        for stream in (self._weights, beside):
            if stream is not None and (is_asked or not stream.was_compared):
                stream.verify()
        after = settled_seconds(self._device)
        self._base = number
        weights = self._weights
        leaving_bytes = weights.whole_bytes if changes is None else changes.leaving_bytes
        return Transfer(
            version=versions[0],
            model_bytes=weights.whole_bytes,
            leaving_bytes=leaving_bytes + (0 if beside is None else beside.whole_bytes),
            changed_share=None if changes is None else changes.total * weights.itemsize / weights.whole_bytes,
            count_bytes=0 if changes is None or self.deltas is None else self.deltas.count_bytes,
            wait_seconds=before_exchange - start,
            exchange_seconds=before_verify - before_exchange,
            verify_seconds=after - before_verify,
        )

    def _move(self, changes: Changes | None) -> None:
        """Move what changed, or everything."""
        if self.deltas is not None and changes is not None and not changes.is_whole:
            self.bounds = self.deltas.bound(changes)
            self.deltas.run(changes)
            return
        self.bounds = self._weights.bounds
        self._weights.run()
        if self.deltas is not None and changes is None:
            self.deltas.remember()


class WeightSender:
    """The side of a training rank. Every training rank must build one and take part in every transfer.

    own: this rank's flat buffers, which stay where they are, and its slots in them. tensors: every logical tensor of
    the model. bucket_bytes: scratch memory of a transfer; the smallest value of all ranks is used. verify_every:
    compare checksums at the first transfer and at every Nth later one, 0: at the first only. A transfer is
    verified if either side asks for it. deltas: send only what changed, if the other ranks' are true, too.
    constants: whole on every training rank, filled before a `send` that moves them; receivers have the same names.

    Raises ValueError, on all ranks of both pools alike, if the sides do not fit each other or training's shards do not
    make up the model.
    """

    def __init__(
        self,
        own: FlatParameters,
        tensors: Mapping[str, LogicalTensor],
        transport: Transport,
        *,
        bucket_bytes: int,
        verify_every: int = 1,
        deltas: bool = False,
        constants: Constants | None = None,
    ) -> None:
        dtype = own.buffers[0].dtype
        agreement = agree(
            Offer(replace(own.member, wanted=None), True, dtype, bucket_bytes, digest(tensors, constants), deltas),
            tensors,
            transport,
        )
        self._end = TransferEnd(agreement, dict(enumerate(own.buffers)), transport, verify_every, constants)

    @property
    def scratch(self) -> MemoryBuffer:
        """Memory that a transfer takes next to the weights while it runs."""
        return self._end.scratch

    @property
    def kept_bytes(self) -> int:
        """Bytes of the copy of what this rank sent last; 0 without deltas."""
        return 0 if self._end.deltas is None else self._end.deltas.kept_bytes

    def close(self) -> None:
        """Leave the group; ranks that still wait for this one fail."""
        self._end.transport.close()

    def send(self, version: int, with_constants: bool = False) -> SendReport:
        """Send the current weights, the same `version` on every training rank; they must not change meanwhile.

        with_constants: send those, too; once they differ from the folder's, with every version, because receivers that
        join later begin with the folder's.
        Raises WeightMismatchError on all ranks of both pools if a piece arrived wrong on any, and
        BrokenTransferError on some ranks if one was lost; others may have finished.
        """
        before = self._end.transport.sent_to.total()
        transfer = self._end.transfer(version, with_constants)
        return SendReport(**vars(transfer), bytes_sent=self._end.transport.sent_to.total() - before)

    def conclude(self) -> list[Any]:
        """The reports of all receivers, by number, once the transfer is over on all of them; together with their
        `conclude`. Raises BrokenTransferError if a rank was lost.
        """
        return self._end.conclude(None)[self._end.num_senders :]


class WeightReceiver:
    """The side of a rollout rank: its shard of every tensor in one flat buffer that never moves. Call `join` first.

    place: that of the shard. names: tensors whose shards come; None: all. dtype: training's. tensors,
    bucket_bytes, verify_every, deltas and errors: see WeightSender. second_buffer: receive into another buffer of the
    same layout; generation reads the old weights until `swap`, which copies them, so that this buffer always holds what
    arrived last. constants: with a second buffer, too.

    Attributes: tensors: name -> view, undefined until the first transfer; rows that only pad a vocabulary are 0.
    version: the version of those weights; None before the first, and without a second buffer after a failed transfer.
    arrived: the version in the second buffer until it is swapped, else None.
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
        deltas: bool = False,
        constants: Constants | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.constants = constants
        self._tensors, self._dtype, self._bucket_bytes = tensors, dtype, bucket_bytes
        self._verify_every, self._deltas = verify_every, deltas
        mine = receiving_slots(named(tensors, names), place)
        self._slots = mine.slots
        # No transfer writes the rows that only pad a vocabulary, so they stay 0.
        make = torch.zeros if any(slot.shard.is_padded for slot in mine.foreign) else torch.empty
        self._flat = make(mine.foreign_numel, dtype=dtype, device=device)
        self._arriving = make(mine.foreign_numel, dtype=dtype, device=device) if second_buffer else None
        self.tensors = {name: slot_view({FOREIGN: self._flat}, slot) for name, slot in mine.slots.items()}
        self.version: int | None = None
        self.arrived: int | None = None
        self._joined: TransferEnd | None = None

    @property
    def scratch(self) -> MemoryBuffer:
        """Memory that a transfer takes next to the weights while it runs."""
        return self._end.scratch

    @property
    def flat(self) -> Tensor:
        """The buffer that `tensors` are views of."""
        return self._flat

    @property
    def has_second_buffer(self) -> bool:
        """Whether weights may arrive while those of an earlier version are read."""
        return self._arriving is not None

    @property
    def arriving_bytes(self) -> int:
        """Bytes of the second buffer; 0 without one."""
        return 0 if self._arriving is None else self._arriving.untyped_storage().nbytes()

    def close(self) -> None:
        """Leave the group; ranks that still wait for this one fail. Does nothing without a group."""
        if self._joined is not None:
            self._joined.transport.close()

    def join(self, member: Member, transport: Transport) -> None:
        """Connect to the other ranks of a group; collective over all of them. All memory stays where it is.

        member: this rank's place, which holds nothing. Weights that arrived over another group and were not swapped are
        forgotten, because they may not have arrived everywhere. Raises ValueError, on all ranks alike, if the sides do
        not fit each other, and on this rank if the shard would be another than that of its place.
        """
        self.close()
        self.arrived = None
        model = digest(self._tensors, self.constants)
        offer = Offer(member, False, self._dtype, self._bucket_bytes, model, self._deltas)
        agreement = agree(offer, self._tensors, transport)
        if agreement.plan.plans[transport.number].slots != self._slots:
            raise ValueError(f"{member.name} would receive another shard than the one that it has room for")
        target = self._flat if self._arriving is None else self._arriving
        self._joined = TransferEnd(agreement, {FOREIGN: target}, transport, self._verify_every, self.constants)

    def receive(self, with_constants: bool = False) -> ReceiveReport:
        """Take the weights that training sends, and the constants if it sends some; with_constants: it will, for a
        rehearsal, in which no message arrives. Raises WeightMismatchError on all ranks alike if one is wrong, and
        BrokenTransferError on some ranks if one was lost; others may have finished.
        """
        end = self._end
        transport, members = end.transport, end.plan.members
        self.arrived = None
        if self._arriving is None:
            self.version = None
        received_before, passed_on = transport.received_from.copy(), transport.sent_to.total()
        transfer = end.transfer(with_constants=with_constants)
        received = transport.received_from - received_before
        if self._arriving is None:
            self.version = transfer.version
        else:
            self.arrived = transfer.version
        node = members[transport.number].node
        return ReceiveReport(
            **vars(transfer),
            bytes_received=received.total(),
            lower_bound_bytes=end.bounds[0],
            bytes_fetched=sum(received[sender] for sender in range(end.num_senders)),
            bytes_passed_on=transport.sent_to.total() - passed_on,
            network_bytes=sum(size for other, size in received.items() if members[other].node != node),
            network_bound_bytes=end.bounds[1],
        )

    def conclude(self, report: Any) -> None:
        """Report to the senders that the transfer is over here; together with their `conclude`, and raises as that."""
        self._end.conclude(report)

    @torch.no_grad()
    def swap(self) -> None:
        """Copy the second buffer's weights to `tensors`. Raises RuntimeError if nothing has arrived in it."""
        if self._arriving is None or self.arrived is None:
            raise RuntimeError("no weights have arrived in a second buffer")
        self._flat.copy_(self._arriving)
        if self.constants is not None:
            self.constants.swap()
        self.version, self.arrived = self.arrived, None

    @property
    def _end(self) -> TransferEnd:
        if self._joined is None:
            raise RuntimeError("the weight transfer is not connected: call join() first")
        return self._joined
