"""The actor's parameters as the hybrid engine sees them: one flat buffer, named slots, no model class."""

from __future__ import annotations

from megatron_rl.hybrid_engine.allgather_pp import FlatParameters
from megatron_rl.hybrid_engine.plan import Slot, StageLayout
from megatron_rl.model.families import ParamSpec
from megatron_rl.workers.model_source import named_parameters
from megatron_rl.workers.training import TrainableModel


def flat_parameters(trainable: TrainableModel, specs: dict[str, ParamSpec]) -> FlatParameters:
    """DDP's own `param_data`, with each parameter's slot under its logical name.

    Raises RuntimeError when there are several model chunks, DDP keeps more than one buffer, or a parameter does not lie
    where DDP says it does.
    """
    if len(trainable.chunks) != 1:
        raise RuntimeError(f"one model chunk expected, there are {len(trainable.chunks)} (virtual pipeline)")
    buffers = trainable.param_buffers
    if len(buffers) != 1:
        raise RuntimeError(f"one flat parameter buffer expected, DDP made {len(buffers)} (mixed parameter dtypes?)")
    buffer = buffers[0]
    slots = []
    for name, parameter in named_parameters(trainable.models).items():
        start, stop, _ = buffer.param_index_map[parameter]
        if parameter.data_ptr() != buffer.param_data[start:stop].data_ptr():
            raise RuntimeError(f"{name} does not lie in DDP's parameter buffer")
        slots.append(Slot(specs[name].tensor.name, start, tuple(parameter.shape)))
    return FlatParameters(buffer.param_data, StageLayout(tuple(sorted(slots, key=lambda slot: slot.offset))))
