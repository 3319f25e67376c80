"""A rank's parameters as the hybrid engine and checkpoints see them: flat buffers with named slots, no model class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import Member, aligned
from megatron_rl.hybrid_engine.stable_memory import MemoryBuffer
from megatron_rl.model.decoder import Chunk
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.mpu import TrainGroups
from megatron_rl.parallel.sharding import Place, shard_of
from megatron_rl.roles.model_source import named_parameters


class FrozenBuffer:
    """Parameters without gradients in one tensor, as DDP lays those with gradients.

    param_data: all of them. param_index_map: parameter -> (first element, one after its last, 0). memory: under them,
    if it can be released; else None.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], memory_pool: str | None = None) -> None:
        """Move the parameters, of one dtype, which are not read yet: their values are lost.

        memory_pool: the tag of memory that can be released, and stays at its address; None: it stays allocated.
        """
        self.param_index_map: dict[torch.nn.Parameter, tuple[int, int, int]] = {}
        stop = 0
        for parameter in parameters:
            start = aligned(stop)
            stop = start + parameter.numel()
            self.param_index_map[parameter] = (start, stop, 0)
        like = next(iter(self.param_index_map))
        self.memory: MemoryBuffer | None = None
        if memory_pool is None:
            self.param_data = torch.zeros(stop, dtype=like.dtype, device=like.device)
        else:
            self.memory = MemoryBuffer(stop, like.dtype, like.device, memory_pool)
            self.param_data = self.memory.data.zero_()
        for parameter, (start, end, _) in self.param_index_map.items():
            parameter.data = self.param_data[start:end].view(parameter.shape)


@dataclass(frozen=True)
class WeightView:
    """Some of a rank's parameters: by global name, their specs, and the flat buffers in which they lie.

    A trained role has two: its base, the model that the folder names, and what it trains; without adapters they are
    one.
    buffers: each has `param_data` and `param_index_map`. specs: of the parameters of all ranks.
    """

    buffers: Sequence[Any]
    parameters: Mapping[str, torch.nn.Parameter]
    specs: Mapping[str, ParamSpec]

    @classmethod
    def of(cls, models: list[Chunk], specs: Mapping[str, ParamSpec], buffers: Sequence[Any]) -> WeightView:
        """The parameters of the models that have a spec, and those of the buffers that hold some."""
        own = {name: parameter for name, parameter in named_parameters(models).items() if name in specs}
        holding = [each for each in buffers if any(parameter in each.param_index_map for parameter in own.values())]
        return cls(holding, own, specs)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of a tensor, and its first element there."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def flat_parameters(
    view: WeightView, groups: TrainGroups, held: Place, wanted: Place | None, node: int
) -> FlatParameters:
    """The buffers of a view, with each parameter's slot under its logical name.

    held, wanted: where this rank's shards are in training and in generation; None: it does not generate. node: the
    number of its node. Raises RuntimeError when the buffers have different dtypes, or a parameter is not where
    buffer and layout say.
    """
    buffers = view.buffers
    dtypes = {buffer.param_data.dtype for buffer in buffers}
    if len(dtypes) != 1:
        raise RuntimeError(f"parameters of one dtype expected, there are buffers of {sorted(map(str, dtypes))}")
    slots = []
    for name, parameter in view.parameters.items():
        number = next(i for i, buffer in enumerate(buffers) if parameter in buffer.param_index_map)
        start, stop, _ = buffers[number].param_index_map[parameter]
        tensor = view.specs[name].tensor
        shard = shard_of(tensor, held)
        lies_there = place_of(parameter) == place_of(buffers[number].param_data[start:stop])
        if not lies_there or parameter.shape != shard.shape:
            raise RuntimeError(f"{name} {tuple(parameter.shape)} is not in its buffer as {shard.shape}")
        slots.append(Slot(tensor.name, number, start, shard))
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
