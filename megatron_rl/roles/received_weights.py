"""The rollout's weights if they come by a weight transfer from the actor's pool."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.config.roles import RoleSpec
from megatron_rl.device import side_stream, synchronize
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.eight_bit_members import EightBitTensors
from megatron_rl.hybrid_engine.hybrid_engine import TransitionReport
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.streams import Constants
from megatron_rl.hybrid_engine.weight_transfer import BrokenTransferError, WeightReceiver
from megatron_rl.model.families import VOCAB_PADDING, eight_bit_names, tensors_of
from megatron_rl.observe.memory_ledger import storage_bytes
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.sharding import Place, shard_of
from megatron_rl.roles.eight_bit_views import quantized_base, read_as_elements
from megatron_rl.roles.expert_bias import biases_of, described_biases
from megatron_rl.roles.rank import Rank
from megatron_rl.roles.transfer_address import TransferAddress, TransferCalls, TransferSettings, join_transfer

if TYPE_CHECKING:
    from megatron_rl.roles.model_source import ModelSource


@dataclass(frozen=True)
class Arrival:
    """Result of one transfer on this rank. version: of the weights received, None if none were.

    broken: the reason if a rank of either side was lost; all must rejoin then. transition: cost of the transfer.
    """

    version: int | None
    broken: str = ""
    transition: TransitionReport | None = None


class Arrivals:
    """The transfers to one rank: in its methods, or with a second buffer in a thread during generation.

    The thread takes part in a transfer for each call of training; it alone communicates in the group of both sides.
    replica: the number of this rank's replica in the calls.
    """

    def __init__(self, receiver: WeightReceiver, device: torch.device, replica: int) -> None:
        self.receiver, self._device, self._replica = receiver, device, replica
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_arriving = False
        self._broken = ""
        self._failure: Exception | None = None

    def listen(self, calls: TransferCalls) -> None:
        """Start a thread that takes part in every transfer that training calls for, until the calls end."""
        self._broken = ""
        self._thread = threading.Thread(
            target=self._listen, args=(calls, side_stream(self._device)), name="weights that arrive", daemon=True
        )
        self._thread.start()

    def receive(self, with_constants: bool = False) -> TransitionReport:
        """Receive the weights that training sends, without a call. with_constants: see `WeightReceiver.receive`. Raises
        RuntimeError if a thread listens.
        """
        if self._thread is not None:
            raise RuntimeError("weights arrive during generation here: training asks for them")
        return self._receive(with_constants)

    def try_receive(self) -> Arrival:
        """Receive what training sends; a broken transfer is reported, not raised."""
        try:
            transition = self.receive()
        except BrokenTransferError as error:
            return Arrival(None, str(error))
        return Arrival(self.receiver.version, "", transition)

    def check(self) -> None:
        """Raise RuntimeError when the thread failed, with its error."""
        if self._failure is not None:
            kind = type(self._failure).__name__
            raise RuntimeError(f"weights that arrived during generation: {kind}: {self._failure}") from self._failure

    def leave(self) -> None:
        """Leave the group of both sides, once no transfer runs and training has ended the calls."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        self.receiver.close()

    def lacks(self, version: int) -> str:
        """Wait for the version that generation reads next; returns "" when it is here, else why the transfer broke.

        Raises RuntimeError if no transfer of it was called for, and if the thread failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has(version) or not self._is_arriving)
            self.check()
            if self._has(version):
                return ""
            if self._broken:
                return self._broken
            raise RuntimeError(
                f"a slice asks for version {version} of the weights; here is {self.receiver.version}, and "
                f"{self.receiver.arrived} has arrived"
            )

    def take(self, version: int | None = None) -> None:
        """Switch generation to a version that has arrived; None: to the newest, if there is one."""
        with self._changed:
            arrived = self.receiver.arrived
            if arrived is not None and version in (None, arrived):
                self.receiver.swap()
                synchronize(self._device)  # the thread may overwrite what was copied
                self._changed.notify_all()

    def _has(self, version: int) -> bool:
        return version in (self.receiver.version, self.receiver.arrived)

    def _holds(self, version: int | None) -> bool:
        held = self.receiver.version
        return version is None or (held is not None and held >= version)

    def _listen(self, calls: TransferCalls, stream: AbstractContextManager[Any]) -> None:
        try:
            with stream:
                while (holding := calls.next()) is not None:
                    self._answer(holding.get(self._replica))
        except BrokenTransferError as error:
            self._broken = str(error)
        except Exception as error:  # for the next method
            self._failure = error
            self.receiver.close()  # training waits for this rank
        finally:
            self._note(False)

    def _answer(self, holding: int | None) -> None:
        """Take part in one transfer, once generation holds the version of its last slice."""
        self._note(True)
        with self._changed:
            self._changed.wait_for(lambda: self._holds(holding))
        transition = self._receive()
        synchronize(self._device)
        self.receiver.conclude(transition)
        self._note(False)

    def _note(self, is_arriving: bool) -> None:
        with self._changed:
            self._is_arriving = is_arriving
            self._changed.notify_all()

    def _receive(self, with_constants: bool = False) -> TransitionReport:
        report = self.receiver.receive(with_constants)
        return TransitionReport(
            report.bytes_received + report.count_bytes,
            report.lower_bound_bytes + report.count_bytes,
            report.network_bytes,
            report.network_bound_bytes,
            seconds=report.exchange_seconds + report.verify_seconds,
            exchange_seconds=report.exchange_seconds,
            verify_seconds=report.verify_seconds,
            changed_share=report.changed_share,
        )


class ReceivedWeights:
    """A rollout shard that comes by a weight transfer, as `HybridEngine` expects it; entering rollout mode moves
    nothing.

    Entering raises RuntimeError before the first weights have arrived.
    """

    lower_bound = Bytes(0, 0)

    def __init__(
        self,
        receiver: WeightReceiver,
        rank: Rank,
        grid: RolloutGrid,
        replica: int,
        base: dict[str, torch.Tensor] | None = None,
        views: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """replica: the number of this rank's in the run. base: the weights next to which adapters arrive; None: whole
        weights arrive. views: what arrives, as generation reads it; None: as it arrives.
        """
        self.receiver = receiver
        self.arrivals = Arrivals(receiver, rank.device.torch_device, replica)
        self._rank, self._grid = rank, grid
        received = receiver.tensors if views is None else views
        self.tensors = received if base is None else base
        self.adapter_tensors = {} if base is None else {name: tensor[None] for name, tensor in received.items()}
        for tensor in receiver.tensors.values():
            tensor.zero_()  # vLLM runs once while it is built, before the first weights come

    def join(self, address: TransferAddress) -> None:
        """Connect to training, in place of an older weight transfer; collective over both sides. No memory moves.

        With a second buffer weights may arrive from now on. Raises BrokenTransferError if a rank is lost meanwhile.
        """
        self.arrivals.leave()
        number = self._rank.groups.rank
        transport = join_transfer(address, address.receiver(number), self._rank.device, self._rank.timeout)
        member = Member(
            rank=address.first_receiver + number,
            node=self._rank.node,
            tp_rank=self._grid.tp_rank(number),
            held=(),
            wanted=self._grid.place(number, VOCAB_PADDING),
        )
        self.receiver.join(member, transport)
        if self.receiver.has_second_buffer:
            self.arrivals.listen(TransferCalls(address, self._rank))

    @property
    def version(self) -> int | None:
        """Version of the weights that generation reads; None before the first, and after a transfer into them broke."""
        return self.receiver.version

    def fill_constants(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the folder's values to the constants that transfers may change; returns those, by name."""
        constants = self.receiver.constants
        return {} if constants is None else constants.fill(values)

    def memory(self) -> dict[str, int]:
        """The shard, and the second buffer."""
        arriving = {"arriving weights": self.receiver.arriving_bytes} if self.receiver.has_second_buffer else {}
        held = storage_bytes([*self.tensors.values(), *self.adapter_tensors.values()])
        return {"rollout weights": held} | arriving

    def gather(self) -> Bytes:
        """Switch to the weights that have arrived, if generation reads none yet."""
        if self.receiver.version is None:
            self.arrivals.take()
        if self.receiver.version is None:
            raise RuntimeError("no weights were transferred yet: training sends them first")
        return Bytes(0, 0)

    def verify(self) -> None:
        """Do nothing: the weights were verified on arrival."""

    def drop_training(self) -> None:
        """Do nothing: training is in another pool."""

    def restore_training(self) -> None:
        """Do nothing: training is in another pool."""

    def release(self) -> None:
        """Do nothing: the weights stay in place."""


def received_weights(
    transfer: TransferSettings, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> ReceivedWeights:
    """Memory for the rollout shard that will come by a weight transfer. Adapters that are not merged come alone; the
    base is read from its folder then. The biases of experts are undefined until they are filled.
    """
    place, dtype = grid.place(rank.groups.rank, VOCAB_PADDING), torch_dtype(spec.megatron.dtype)
    constants = None
    if biases := biases_of(source.model.constants):
        constants = Constants(described_biases(biases), rank.device.torch_device, transfer.second_buffer)
    alone, block = spec.lora.crosses_alone, spec.settings.quantization_block_size
    names = set[str]() if spec.settings.quantization is None else eight_bit_names(source.model.specs)
    tensors = tensors_of(source.adapter_specs if alone else source.model.specs)
    eight_bits = EightBitTensors.of(tensors, names, block) if names and not alone else None
    receiver = WeightReceiver(
        place,
        tensors if eight_bits is None else eight_bits.as_bytes(dtype.itemsize),
        dtype if eight_bits is None else torch.uint8,
        rank.device.torch_device,
        bucket_bytes=spec.settings.update_weights_bucket_megabytes << 20,
        verify_every=spec.settings.verify_weights_every,
        second_buffer=transfer.second_buffer,
        deltas=spec.settings.weight_deltas,
        constants=constants,
    )
    base = base_shard(source, place, dtype, rank.device.torch_device) if alone else None
    if base is not None and names:
        base = quantized_base(base, names, block)
    views = None if eight_bits is None else read_as_elements(receiver.tensors, eight_bits, dtype)
    return ReceivedWeights(receiver, rank, grid, grid.replica(rank.groups.rank) + transfer.first_replica, base, views)


def base_shard(source: ModelSource, place: Place, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """vLLM's name -> this place's shard of a folder's weights. Raises ConfigError as `load_hf_weights`."""
    from megatron_rl.checkpoint.hf_import import HFFolder, load_hf_weights

    specs = {spec.tensor.name: spec for spec in source.model.specs.values()}
    shards = {name: shard_of(spec.tensor, place) for name, spec in specs.items()}
    tensors = {name: torch.empty(shard.shape, dtype=dtype, device=device) for name, shard in shards.items()}
    load_hf_weights(tensors, specs, HFFolder(source.path), place)
    return tensors


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16, by its name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
