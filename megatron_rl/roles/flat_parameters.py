"""The actor's parameters for the hybrid engine: flat buffers with named slots, without a model class."""

from __future__ import annotations

import torch

from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import Member
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.sharding import Place, shard_of
from megatron_rl.roles.model_source import named_parameters
from megatron_rl.roles.training import TrainableModel


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of a tensor, and its first element there."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def flat_parameters(
    trainable: TrainableModel, specs: dict[str, ParamSpec], held: Place, wanted: Place | None, node: int
) -> FlatParameters:
    """DDP's own `param_data`, with each parameter's slot under its logical name.

    held, wanted: where this rank's shards lie in training and in generation; None: it does not generate. node: the
    number of its node. Raises RuntimeError when DDP's buffers have different dtypes, or a parameter does not lie where
    DDP and the layout say.
    """
    buffers = trainable.param_buffers
    dtypes = {buffer.param_data.dtype for buffer in buffers}
    if len(dtypes) != 1:
        raise RuntimeError(f"parameters of one dtype expected, DDP has buffers of {sorted(map(str, dtypes))}")
    slots = []
    for name, parameter in named_parameters(trainable.models).items():
        number = next(i for i, buffer in enumerate(buffers) if parameter in buffer.param_index_map)
        start, stop, _ = buffers[number].param_index_map[parameter]
        shard = shard_of(specs[name].tensor, held)
        lies_there = place_of(parameter) == place_of(buffers[number].param_data[start:stop])
        if not lies_there or parameter.shape != shard.shape:
            raise RuntimeError(f"{name} {tuple(parameter.shape)} does not lie in DDP's buffer as {shard.shape}")
        slots.append(Slot(specs[name].tensor.name, number, start, shard))
    groups = trainable.groups
    return FlatParameters(
        tuple(buffer.param_data for buffer in buffers),
        Member(
            rank=groups.rank,
            node=node,
            tp_rank=groups.tp_rank,
            held=tuple(sorted(slots, key=lambda slot: (slot.buffer, slot.offset))),
            wanted=wanted,
        ),
    )
