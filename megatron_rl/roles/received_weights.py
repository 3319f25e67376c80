"""The rollout's weights where they come over a bridge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_rl.config.roles import RoleSpec
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.engine import TransitionReport
from megatron_rl.model.families import VOCAB_PADDING
from megatron_rl.observe.memory import storage_bytes
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.roles.bridge_address import BridgeAddress, join_bridge
from megatron_rl.roles.rank import Rank

if TYPE_CHECKING:
    from megatron_rl.hybrid_engine.bridge import BridgeReceiver
    from megatron_rl.roles.model_source import ModelSource


class ReceivedWeights:
    """A rollout shard that comes over a bridge, as `HybridEngine` wants weights: entering rollout mode moves nothing.

    Raises RuntimeError on entering before any weights came.
    """

    lower_bound = Bytes(0, 0)

    def __init__(self, receiver: BridgeReceiver) -> None:
        self.receiver = receiver
        self.tensors = receiver.tensors
        for tensor in self.tensors.values():
            tensor.zero_()  # vLLM runs once while it is built, before the first weights come

    def receive(self) -> TransitionReport:
        """Take what training sends."""
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

    @property
    def version(self) -> int | None:
        """That of the weights that generation reads; None before any came, and after a transfer into them broke."""
        return self.receiver.version

    def take(self, version: int) -> None:
        """Let generation read this version. Raises RuntimeError when it is not here."""
        if version != self.version:
            raise RuntimeError(f"a slice asks for version {version} of the weights, here is {self.version}")

    def memory(self) -> dict[str, int]:
        """The shard."""
        return {"rollout weights": storage_bytes(list(self.tensors.values()))}

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


def received_weights(
    bridge: BridgeAddress, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid
) -> ReceivedWeights:
    """The rollout shard that will come over a bridge; collective over both pools."""
    from megatron_rl.hybrid_engine.bridge import BridgeReceiver
    from megatron_rl.hybrid_engine.plan import Member

    number, settings = bridge.first_receiver + rank.groups.rank, spec.settings
    tp_rank, wanted = grid.tp_rank(rank.groups.rank), grid.place(rank.groups.rank, VOCAB_PADDING)
    receiver = BridgeReceiver(
        Member(rank=number, node=rank.node, tp_rank=tp_rank, held=(), wanted=wanted),
        {one.tensor.name: one.tensor for one in source.specs.values()},
        torch_dtype(spec.megatron.dtype),
        rank.device.torch_device,
        join_bridge(bridge, bridge.receiver(rank.groups.rank), rank),
        bucket_bytes=settings.update_weights_bucket_megabytes << 20,
        verify_every=settings.verify_weights_every,
    )
    return ReceivedWeights(receiver)


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16, by its name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
