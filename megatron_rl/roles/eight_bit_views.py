"""A rollout's FP8 weights: codes, scales and what stays, in place as three exchanges, elsewhere as one of bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.roles import RoleSpec
from megatron_rl.hybrid_engine.adapter_slots import AdapterSlots
from megatron_rl.hybrid_engine.allgather_pp import FOREIGN_POOL, AllGatherPPModel, FlatParameters
from megatron_rl.hybrid_engine.block_codes import CODE, E4M3, SCALE, quantize
from megatron_rl.hybrid_engine.composed_weights import ComposedPart, OwnMemory
from megatron_rl.hybrid_engine.eight_bit_members import EightBitTensors
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.hybrid_engine.quantized_weights import OwnCodes, QuantizedWeights, trained_shards
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.model.families import VOCAB_PADDING, eight_bit_names, tensors_of
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.scale_blocks import SCALES
from megatron_rl.parallel.sharding import LogicalTensor, Place
from megatron_rl.roles.flat_parameters import flat_parameters
from megatron_rl.roles.merged_shards import MergedShards
from megatron_rl.roles.rank import Rank

if TYPE_CHECKING:
    from megatron_rl.roles.role import TrainedRole

CODES_POOL, SCALES_POOL = "megatron_rl received FP8 weights", "megatron_rl received FP8 scales"
"""Tags of received FP8 weights and scales in vLLM's CUDA allocator."""


@dataclass(frozen=True)
class EightBitShards:
    """A training rank's shards for a rollout with FP8 weights.

    own, merged: codes and scales, and what stays in training's dtype with adapters merged in; both are made of the
    current weights before they are read. trained: all training shards, in training's buffers or in that of `merged`.
    codes, scales, kept: this rank as a member of each exchange.
    """

    tensors: EightBitTensors
    own: OwnCodes
    merged: list[MergedShards]
    codes: Member
    scales: Member
    kept: Member
    trained: FlatParameters

    @classmethod
    def of(cls, actor: TrainedRole, rank: Rank, lora: LoraConfig, block: int, wanted: Place | None) -> EightBitShards:
        """Allocate them. wanted: this rank's place in generation; None: it does not generate."""
        held, specs = actor.source.place, actor.base.specs
        tensors = EightBitTensors.of(tensors_of(specs), eight_bit_names(specs), block)
        merged = [MergedShards(actor, without=tensors.codes)] if lora.is_merged else []
        places = held, wanted, rank.node
        trained = merged[0].flat(*places) if merged else flat_parameters(actor.base, rank.groups, *places)
        codes, scales, kept = (members[0] for members in tensors.members([trained.member]))
        shards = trained_shards(trained.buffers, trained.member, set(tensors.codes))
        now = merged[0].merging(shards) if merged else shards.__getitem__
        own = OwnCodes(now, codes, scales, block, rank.device.torch_device, lora.base_stays)
        return cls(tensors, own, merged, codes, scales, kept, trained)

    @property
    def made(self) -> list[OwnMemory]:
        """Memory that is made of the current weights, in order."""
        return [*self.merged, self.own]

    def as_bytes(self) -> tuple[FlatParameters, dict[str, LogicalTensor]]:
        """All of it as one stream of bytes, and its logical tensors."""
        element = self.trained.buffers[0].element_size()
        buffers = (self.own.codes.data, self.own.scales.data, *self.trained.buffers)
        member = self.tensors.bytes_member(self.trained.member, element)
        return FlatParameters(tuple(each.view(torch.uint8) for each in buffers), member), self.tensors.as_bytes(element)


def quantized_weights(
    actor: TrainedRole,
    spec: RoleSpec,
    rank: Rank,
    grid: RolloutGrid,
    adapters: Sequence[ComposedPart],
    slots: AdapterSlots | None,
) -> QuantizedWeights:
    """The rollout shard with the actor's linears as codes and scales; collective over each exchange group.

    Merged adapters are in the codes. adapters, slots: those that generation applies next to the base, which does not
    change then. Everything is allocated, and holds nothing before the first `gather`.
    """
    wanted = grid.place(rank.groups.rank, VOCAB_PADDING)
    shards = EightBitShards.of(actor, rank, spec.lora, spec.settings.quantization_block_size, wanted)

    def exchange(held: FlatParameters, moved: Mapping[str, LogicalTensor], memory_pool: str) -> ComposedPart:
        part = AllGatherPPModel(
            held,
            moved,
            Transport(rank.groups.exchange_group),
            bucket_bytes=spec.settings.update_weights_bucket_megabytes << 20,
            memory_pool=memory_pool,
        )
        return ComposedPart(part, spec.lora.base_stays, spec.lora.base_on_host)

    return QuantizedWeights(
        shards.own,
        exchange(FlatParameters((shards.own.codes.data,), shards.codes), shards.tensors.codes, CODES_POOL),
        exchange(FlatParameters((shards.own.scales.data,), shards.scales), shards.tensors.scales, SCALES_POOL),
        [exchange(FlatParameters(shards.trained.buffers, shards.kept), shards.tensors.kept, FOREIGN_POOL), *adapters],
        shards.merged,
        Transport(rank.groups.exchange_group),
        slots,
    )


def read_as_elements(received: Mapping[str, Tensor], tensors: EightBitTensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Received bytes, by name, as generation reads them: e4m3 codes, float32 scales, the rest in `dtype`."""
    dtypes = dict.fromkeys(tensors.codes, E4M3) | dict.fromkeys(tensors.scales, SCALE)
    return {name: data.view(dtypes.get(name, dtype)).squeeze(-1) for name, data in received.items()}


def quantized_base(base: Mapping[str, Tensor], names: Collection[str], block: int) -> dict[str, Tensor]:
    """A frozen base as generation reads it in FP8, by name. base: this rank's shards. names: what becomes codes."""
    read = {name: tensor for name, tensor in base.items() if name not in names}
    for name in names:
        matrix = base[name].flatten(0, -2)
        codes = torch.empty_like(matrix, dtype=CODE)
        scales = torch.empty([size // block for size in matrix.shape], dtype=SCALE, device=matrix.device)
        quantize(matrix, block, codes, scales)
        stack = base[name].shape[:-2]
        read[name] = codes.view(E4M3).view(base[name].shape)
        read[name + SCALES] = scales.view(*stack, -1, scales.shape[-1])
    return read
