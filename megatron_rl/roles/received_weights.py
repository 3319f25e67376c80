"""The rollout's weights where they come over a bridge."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.config.roles import RoleSpec
from megatron_rl.device import side_stream, synchronize
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.bridge import BridgeReceiver
from megatron_rl.hybrid_engine.bridge_end import BrokenBridgeError
from megatron_rl.hybrid_engine.engine import TransitionReport
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.model.families import VOCAB_PADDING
from megatron_rl.observe.memory import storage_bytes
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.roles.bridge_address import BridgeAddress, join_bridge
from megatron_rl.roles.rank import Rank

if TYPE_CHECKING:
    from megatron_rl.roles.model_source import ModelSource


@dataclass(frozen=True)
class Arrival:
    """How one transfer ended on this rank. version: of what came, None where nothing did.

    broken: why it broke off, when a rank of either side was lost in it; all must rejoin then. transition: what it cost.
    """

    version: int | None
    broken: str = ""
    transition: TransitionReport | None = None


class Arrivals:
    """The transfers to one rank, and the thread in which one runs while generation goes on.

    Until it has ended, that thread alone makes calls in the group of both sides.
    """

    def __init__(self, receiver: BridgeReceiver, device: torch.device) -> None:
        self.receiver, self._device = receiver, device
        self._thread: threading.Thread | None = None
        self._arrival: Arrival | None = None
        self._failure: Exception | None = None

    def receive(self) -> TransitionReport:
        """Take what training sends, and let generation read it."""
        self._must_be_idle()
        transition = self._receive()
        if self.receiver.has_second_buffer:
            self.receiver.swap()
        return transition

    def try_receive(self) -> Arrival:
        """The same; a transfer that broke is an answer, not an error."""
        self._must_be_idle()
        try:
            transition = self.receive()
        except BrokenBridgeError as error:
            return Arrival(None, str(error))
        return Arrival(self.receiver.version, "", transition)

    def begin(self) -> None:
        """Let the next weights arrive in the second buffer, in a thread; those that were there and were not taken go.

        Raises RuntimeError where there is no such buffer, and when nobody has waited for the thread before.
        """
        self._must_be_idle()
        if not self.receiver.has_second_buffer:
            raise RuntimeError("weights cannot arrive beside generation: there is no second buffer")
        self._arrival = None
        self._thread = threading.Thread(
            target=self._arrive, args=(side_stream(self._device),), name="weights that arrive", daemon=True
        )
        self._thread.start()

    def end(self) -> Arrival:
        """Wait until the thread has ended; how it did. Raises RuntimeError when it failed in another way than that a
        rank was lost, and when none was begun.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        if self._arrival is None:
            raise RuntimeError("no weights are arriving: begin_receive() comes first")
        return self._arrival

    def check(self) -> None:
        """Raise RuntimeError when the thread failed, with its error."""
        if self._failure is not None:
            kind = type(self._failure).__name__
            raise RuntimeError(f"weights that arrived beside generation: {kind}: {self._failure}") from self._failure

    def leave(self) -> None:
        """Leave the group of both sides, once nothing is under way in it any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        self.receiver.close()

    def rejoin(self, member: Member, transport: Transport) -> None:
        """Receive over another group from now on; collective over both sides. No memory is taken, none moves."""
        self.receiver.rejoin(member, transport)
        self._arrival = None

    def lacks(self, version: int) -> str:
        """Wait for a version that generation is to read next: "" when it is here, else why the transfer broke.

        Raises RuntimeError when it was not even sent, and as `end`.
        """
        self.check()
        if self.receiver.version == version:
            return ""
        if self._thread is not None:
            self.end()
        if self.receiver.arrived == version:
            return ""
        if self._arrival is not None and self._arrival.broken:
            return self._arrival.broken
        raise RuntimeError(
            f"a slice asks for version {version} of the weights; here is {self.receiver.version}, and "
            f"{self.receiver.arrived} has arrived"
        )

    def take(self, version: int) -> None:
        """Let generation read a version that is here."""
        if self.receiver.version != version:
            self.receiver.swap()

    def _must_be_idle(self) -> None:
        if self._thread is not None:  # ended or not: all ranks of a replica must say the same
            raise RuntimeError("weights are arriving: end_receive(), or a slice with their version, comes first")
        self.check()

    def _arrive(self, stream: AbstractContextManager[Any]) -> None:
        try:
            with stream:
                transition = self._receive()
                synchronize(self._device)
            self._arrival = Arrival(self.receiver.arrived, "", transition)
        except BrokenBridgeError as error:
            self._arrival = Arrival(None, str(error))
        except Exception as error:  # for the next verb
            self._failure = error

    def _receive(self) -> TransitionReport:
        report = self.receiver.receive()
        return TransitionReport(
            report.bytes_received,
            report.lower_bound_bytes,
            report.network_bytes,
            report.network_bound_bytes,
            seconds=report.exchange_seconds + report.verify_seconds,
            exchange_seconds=report.exchange_seconds,
            verify_seconds=report.verify_seconds,
        )


class ReceivedWeights:
    """A rollout shard that comes over a bridge, as `HybridEngine` wants weights: entering rollout mode moves nothing.

    Raises RuntimeError on entering before any weights came.
    """

    lower_bound = Bytes(0, 0)

    def __init__(self, receiver: BridgeReceiver, device: torch.device) -> None:
        self.receiver = receiver
        self.arrivals = Arrivals(receiver, device)
        self.tensors = receiver.tensors
        for tensor in self.tensors.values():
            tensor.zero_()  # vLLM runs once while it is built, before the first weights come

    @property
    def version(self) -> int | None:
        """That of the weights that generation reads; None before any came, and after a transfer into them broke."""
        return self.receiver.version

    def memory(self) -> dict[str, int]:
        """The shard, and the second buffer."""
        arriving = {"arriving weights": self.receiver.arriving_bytes} if self.receiver.has_second_buffer else {}
        return {"rollout weights": storage_bytes(list(self.tensors.values()))} | arriving

    def gather(self) -> Bytes:
        """Nothing: they are here."""
        if self.receiver.version is None:
            raise RuntimeError("no weights have come over the bridge yet: receive_weights() comes first")
        return Bytes(0, 0)

    def verify(self) -> None:
        """Nothing: they were compared when they came."""

    def drop_training(self) -> None:
        """Nothing: training is elsewhere."""

    def restore_training(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing: they stay where they are."""


def receiving_member(bridge: BridgeAddress, rank: Rank, grid: RolloutGrid) -> Member:
    """This rank's place among those that receive."""
    number = rank.groups.rank
    return Member(
        rank=bridge.first_receiver + number,
        node=rank.node,
        tp_rank=grid.tp_rank(number),
        held=(),
        wanted=grid.place(number, VOCAB_PADDING),
    )


def received_weights(
    bridge: BridgeAddress, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> ReceivedWeights:
    """The rollout shard that will come over a bridge; collective over both sides."""
    receiver = BridgeReceiver(
        receiving_member(bridge, rank, grid),
        {one.tensor.name: one.tensor for one in source.specs.values()},
        torch_dtype(spec.megatron.dtype),
        rank.device.torch_device,
        join_bridge(bridge, bridge.receiver(rank.groups.rank), rank),
        bucket_bytes=spec.settings.update_weights_bucket_megabytes << 20,
        verify_every=spec.settings.verify_weights_every,
        second_buffer=bridge.second_buffer,
    )
    return ReceivedWeights(receiver, rank.device.torch_device)


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16, by its name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
