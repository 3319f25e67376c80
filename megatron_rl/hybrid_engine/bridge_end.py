"""What both ends of a bridge have: they meet, agree on a plan and a version, run the exchange, compare checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_rl.device import settled_seconds
from megatron_rl.hybrid_engine.bridge_plan import make_bridge_plan, model_numel
from megatron_rl.hybrid_engine.exchange import NUM_SCRATCH, Exchange
from megatron_rl.hybrid_engine.memory_buffer import MemoryBuffer
from megatron_rl.hybrid_engine.plan import ExchangePlan, Member
from megatron_rl.hybrid_engine.schedule import make_schedule
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.hybrid_engine.verify import WeightMismatchError, WeightVerifier
from megatron_rl.parallel.sharding import LogicalTensor

Result = TypeVar("Result")
MEETING_BROKE = "the ranks of a bridge could not meet"


class BrokenBridgeError(RuntimeError):
    """A rank of either side died, or stayed away, before a transfer was over. Every rank must join a new group."""


class MixedVersionsError(RuntimeError):
    """The training ranks sent weights of different versions."""


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


def or_leave(transport: Transport, what: str, body: Callable[[], Result]) -> Result:
    """What `body` returns. Where its messages fail this rank leaves the group and BrokenBridgeError says `what`: those
    that wait for this rank fail then too, and do not sit out the group's time-out.
    """
    try:
        return body()
    except (WeightMismatchError, MixedVersionsError):
        raise
    except RuntimeError as error:
        reason = f"{type(error).__name__}: {error}"
        clear_frames(error.__traceback__)  # a message that somebody still names keeps the connections open
    transport.close()
    raise BrokenBridgeError(f"{what}: {reason}")


def meet(mine: Offer, tensors: Mapping[str, LogicalTensor], transport: Transport) -> Meeting:
    """Exchange the offers and plan; collective. Raises ValueError on all ranks alike when they do not fit, and
    BrokenBridgeError when a rank was lost.
    """
    offers: Sequence[Offer] = or_leave(transport, MEETING_BROKE, lambda: transport.all_gather_object(mine))
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
        first = torch.zeros(1, device=self._device)
        or_leave(transport, MEETING_BROKE, lambda: transport.all_gather(first))
        number = transport.number
        steps = make_schedule(meeting.plan, number, meeting.message_numel)
        self._exchange = Exchange(steps, [], buffers, transport)
        self._verifier = WeightVerifier(meeting.plan, number, buffers, transport)

    @property
    def num_senders(self) -> int:
        """Training ranks, which have the first numbers."""
        return self._meeting.num_senders

    @property
    def scratch(self) -> MemoryBuffer:
        """What a transfer takes beside the weights while it runs."""
        return self._exchange.scratch

    def transfer(self, version: int = 0) -> Transfer:
        """Move the weights. version: of what a training rank sends; that of a rollout rank is not looked at.

        Raises MixedVersionsError on all ranks alike when training's ranks send different versions, and
        BrokenBridgeError when messages fail: this rank has left the group then, so that those that wait for it fail too
        and do not sit out the group's time-out.
        """
        return or_leave(self.transport, "a transfer of weights broke", lambda: self._transfer(version))

    def conclude(self, mine: Any) -> list[Any]:
        """What every rank says once its part of a transfer is over, by number; every rank must call.

        Whoever gets it knows that the weights have arrived everywhere. Raises BrokenBridgeError as `transfer`.
        """
        gather = self.transport.all_gather_object
        return or_leave(self.transport, "a transfer of weights broke", lambda: gather(mine))

    def _transfer(self, version: int) -> Transfer:
        start = settled_seconds(self._device)
        asked = torch.tensor([version, self._is_verified()], dtype=torch.int64)
        headers = torch.stack(self.transport.all_gather(asked))
        self._num_transfers += 1
        versions = headers[: self._meeting.num_senders, 0].unique().tolist()
        if len(versions) > 1:
            raise MixedVersionsError(f"the training ranks send weights of different versions: {versions}")
        before_exchange = settled_seconds(self._device)
        self._exchange.run()
        before_verify = settled_seconds(self._device)
        if headers[:, 1].any():
            self._verifier.verify()
        after = settled_seconds(self._device)
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
