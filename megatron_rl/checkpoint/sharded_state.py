"""A rank's weights and optimizer state as megatron-core's sharded tensors.

Every tensor here is a view, of parameters or of the optimizer's flat state: saving gathers nothing, loading writes in
place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_rl.checkpoint.blocks import Block, blocks_of
from megatron_rl.checkpoint.saved_tensors import checkpoint_key
from megatron_rl.model.families import ParamSpec
from megatron_rl.parallel.sharding import Place, box_shape, is_first_copy, shard_of


@dataclass(frozen=True)
class FlatRun:
    """A run of one parameter's flattened shard: elements [start, start + len(data)).

    name: global Megatron name. kind: WEIGHT, or what the optimizer calls the state. data: [n], any dtype.
    """

    name: str
    kind: str
    start: int
    data: torch.Tensor


def written_at(place: Place, specs: dict[str, ParamSpec]) -> set[str]:
    """Parameters of which a rank at `place` writes its runs; data-parallel ranks own different ones and all do.

    The first TP rank writes tensors that all TP ranks hold; the embedding's stage writes a tied embedding and head.
    """
    first: dict[str, str] = {}
    for name, spec in specs.items():
        first.setdefault(spec.tensor.name, name)
    return {name for name in first.values() if is_first_copy(specs[name].tensor, place)}


def sharded_state(runs: Iterable[FlatRun], specs: dict[str, ParamSpec], place: Place) -> dict[str, ShardedTensor]:
    """The argument of `dist_checkpointing.save` or `load`; both work on the runs' own memory."""
    state: dict[str, ShardedTensor] = {}
    for run in runs:
        spec = specs[run.name]
        for block in blocks_of(shard_of(spec.tensor, place), run.start, run.start + run.data.numel()):
            state[f"{run.name}/{run.kind}/{len(state)}"] = _sharded_tensor(run, spec, block)
    return state


def _sharded_tensor(run: FlatRun, spec: ParamSpec, block: Block) -> ShardedTensor:
    return ShardedTensor(
        key=checkpoint_key(spec, block.segment, run.kind),
        data=block.view(run.data, run.start),
        dtype=run.data.dtype,
        local_shape=box_shape(block.box),
        global_shape=spec.hf_shape(block.segment),
        global_offset=tuple(low for low, _ in spec.in_hf(block.segment, block.box)),
        # Runs end anywhere, so the blocks of a tensor make no grid.
        axis_fragmentations=None,
    )
