"""A rollout's FP8 weights on the actor's memory: three views, of codes, of scales, and of what stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_rl.config.roles import RoleSpec
from megatron_rl.hybrid_engine.allgather_pp import FOREIGN_POOL, AllGatherPPModel, FlatParameters
from megatron_rl.hybrid_engine.composed_weights import ComposedPart
from megatron_rl.hybrid_engine.eight_bit_members import EightBitTensors
from megatron_rl.hybrid_engine.quantized_weights import OwnCodes, QuantizedWeights, trained_shards
from megatron_rl.hybrid_engine.transport import Transport
from megatron_rl.model.families import VOCAB_PADDING, eight_bit_names, tensors_of
from megatron_rl.parallel.rank_grid import RolloutGrid
from megatron_rl.parallel.sharding import LogicalTensor
from megatron_rl.roles.flat_parameters import flat_parameters
from megatron_rl.roles.merged_shards import MergedShards, merged_parameters
from megatron_rl.roles.rank import Rank

if TYPE_CHECKING:
    from megatron_rl.roles.actor import Actor
    from megatron_rl.roles.model_source import ModelSource

CODES_POOL, SCALES_POOL = "megatron_rl received FP8 weights", "megatron_rl received FP8 scales"
"""Tags of received FP8 weights and scales in vLLM's CUDA allocator."""


def quantized_weights(
    actor: Actor, spec: RoleSpec, rank: Rank, source: ModelSource, grid: RolloutGrid, adapters: Sequence[ComposedPart]
) -> QuantizedWeights:
    """The rollout shard with the actor's linears as codes and scales; collective over each exchange group.

    Merged adapters are in the codes. adapters: those that generation applies next to the base, which does not change
    then. Everything is allocated, and holds nothing before the first `gather`.
    """
    specs, block = actor.base.specs, spec.settings.quantization_block_size
    wanted = grid.place(rank.groups.rank, VOCAB_PADDING)
    tensors = EightBitTensors.of(tensors_of(specs), eight_bit_names(specs), block)
    merged = [MergedShards(actor, without=tensors.codes)] if spec.lora.is_merged else []
    places = source.place, wanted, rank.node
    trained = merged[0].flat(*places) if merged else flat_parameters(actor.base, rank.groups, *places)
    codes, scales, kept = (members[0] for members in tensors.members([trained.member]))
    own = OwnCodes(
        _shards_now(actor, spec, trained, tensors), codes, scales, block, rank.device.torch_device, spec.lora.base_stays
    )
    transport = Transport(rank.groups.exchange_group)

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
        own,
        exchange(FlatParameters((own.codes.data,), codes), tensors.codes, CODES_POOL),
        exchange(FlatParameters((own.scales.data,), scales), tensors.scales, SCALES_POOL),
        [exchange(FlatParameters(trained.buffers, kept), tensors.kept, FOREIGN_POOL), *adapters],
        merged,
        transport,
    )


def _shards_now(
    actor: Actor, spec: RoleSpec, trained: FlatParameters, tensors: EightBitTensors
) -> Callable[[str], Tensor]:
    """Name of a tensor with codes -> this rank's training shard, with adapters merged in where they are merged."""
    shards = trained_shards(trained.buffers, trained.member, set(tensors.codes))
    if not spec.lora.is_merged:
        return shards.__getitem__
    merged = merged_parameters(actor)
    adapted = {actor.base.specs[name].tensor.name: name for name in actor.base.parameters if name in merged.pairs}
    return lambda name: merged.write(adapted[name]) if name in adapted else shards[name]
