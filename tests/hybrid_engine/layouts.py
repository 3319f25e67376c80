"""Members of exchange groups made from model shapes and grids, as workers make them from Megatron's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_rl.hybrid_engine.layout import FOREIGN, Slot
from megatron_rl.hybrid_engine.plan import ALIGNMENT, ExchangePlan, Member, make_plan
from megatron_rl.model.families import FAMILIES, HEAD, ModelShape, ParamSpec, param_map, tensors_of
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import LogicalTensor, box_index, shard_of
from megatron_rl.parallel.stages import StagePlan
from megatron_rl.planning.weights import LAYER, is_tied


def stage_params(specs: dict[str, ParamSpec], stages: StagePlan, pp_rank: int) -> list[list[str]]:
    """Return the parameter names of each chunk of a stage, in the order of Megatron's buffers: last to first.

    A tied head is a parameter of its own where the last stage is not the first.
    """
    chunks = stages.layers(pp_rank)
    names: list[list[str]] = [[] for _ in chunks]
    is_last = pp_rank == stages.pp_size - 1
    for name in specs:
        layer = LAYER.match(name)
        if layer:
            for chunk, layers in enumerate(chunks):
                if int(layer[1]) in layers:
                    names[chunk].append(name)
        elif name.startswith("embedding"):
            names[0] += [name] if pp_rank == 0 else []
        elif is_last and not (name == HEAD and is_tied(specs) and stages.pp_size == 1):
            names[-1].append(name)
    return [chunk[::-1] for chunk in names]


def members_of(
    group: list[int],
    rollout: RolloutGrid,
    specs: dict[str, ParamSpec],
    stages: StagePlan,
    *,
    per_node: int = 8,
    nodes: Sequence[int] = (),
    train_multiple: int = 64,
) -> list[Member]:
    """One member per rank of `group`; each chunk is a buffer, and the experts of all chunks another.

    nodes: the node of rank 0, 1, ..., repeated when there are more ranks; without it nodes have `per_node` ranks each.
    """
    nodes = nodes or [rank // per_node for rank in range(rollout.train.world_size)]
    members = []
    for rank in group:
        place, slots, ends = rollout.train.place(rank, train_multiple), [], {}
        for chunk, names in enumerate(stage_params(specs, stages, rollout.train.pp_rank(rank))):
            for name in names:
                tensor = specs[name].tensor
                shard = shard_of(tensor, place)
                buffer = stages.vpp_size if tensor.is_expert else chunk
                offset = -(-ends.get(buffer, 0) // ALIGNMENT) * ALIGNMENT
                slots.append(Slot(tensor.name, buffer, offset, shard))
                ends[buffer] = offset + shard.numel
        slots.sort(key=lambda slot: (slot.buffer, slot.offset))
        used = {number: i for i, number in enumerate(sorted({slot.buffer for slot in slots}))}
        held = tuple(replace(slot, buffer=used[slot.buffer]) for slot in slots)
        node, wanted = nodes[rank % len(nodes)], rollout.place(rank, vocab_multiple=64)
        members.append(Member(rank, node, rollout.train.tp_rank(rank), held, wanted))
    return members


def transfer_ends(
    train: TrainGrid,
    specs: dict[str, ParamSpec],
    stages: StagePlan,
    rollout_tp: int,
    num_replicas: int,
    *,
    train_nodes: Sequence[int] = (0,),
    rollout_nodes: Sequence[int] = (0,),
    train_multiple: int = 64,
) -> tuple[list[Member], list[Member]]:
    """All ranks of a training pool, and those of a rollout pool of `num_replicas` TP groups.

    train_nodes, rollout_nodes: the node of rank 0, 1, ..., repeated when there are more ranks.
    """
    colocated = RolloutGrid(train, 1)
    everyone = list(range(train.world_size))
    senders = [
        replace(member, wanted=None)
        for member in members_of(everyone, colocated, specs, stages, nodes=train_nodes, train_multiple=train_multiple)
    ]
    grid = RolloutGrid(TrainGrid(rollout_tp * num_replicas, rollout_tp, 1), rollout_tp)
    receivers = [
        Member(rank, rollout_nodes[rank % len(rollout_nodes)], grid.tp_rank(rank), wanted=grid.place(rank, 64))
        for rank in range(grid.train.world_size)
    ]
    return senders, receivers


def numbered_model(tensors: dict[str, LogicalTensor]) -> dict[tuple[str, int], torch.Tensor]:
    """(tensor, segment) -> its elements, numbered over the whole model from 1 on."""
    model, start = {}, 1
    for name, tensor in tensors.items():
        for number, segment in enumerate(tensor.segments):
            count = torch.Size(segment.shape).numel()
            model[name, number] = torch.arange(start, start + count).view(segment.shape)
            start += count
    return model


def write_slot(data: torch.Tensor, slot: Slot, model: dict[tuple[str, int], torch.Tensor]) -> None:
    """Put the numbers of a shard where it lies."""
    view = data[slot.offset : slot.stop].view(slot.shard.shape)
    for part in slot.shard.parts:
        view[part.index] = model[slot.name, part.segment][box_index(part.box)]


def training_buffers(
    member: Member, model: dict[tuple[str, int], torch.Tensor], dtype: torch.dtype = torch.int64
) -> dict[int, torch.Tensor]:
    """A member's buffers as training fills them; what no slot covers is 0."""
    sizes: dict[int, int] = {}
    for slot in member.held:
        sizes[slot.buffer] = max(sizes.get(slot.buffer, 0), slot.stop)
    buffers = {number: torch.zeros(size, dtype=dtype) for number, size in sizes.items()}
    for slot in member.held:
        write_slot(buffers[slot.buffer], slot, model)
    return buffers


def expected_foreign(plan: ExchangePlan, member: int, model: dict[tuple[str, int], torch.Tensor]) -> torch.Tensor:
    """What the foreign buffer must hold, written from the model and not from other members."""
    mine = plan.plans[member]
    data = torch.zeros(mine.foreign_numel, dtype=torch.int64)
    for slot in mine.slots.values():
        if slot.buffer == FOREIGN:
            write_slot(data, slot, model)
    return data


def plan_for(
    shape: ModelShape, architecture: str, rollout: RolloutGrid, stages: StagePlan, *, share: bool = True, **options
) -> tuple[ExchangePlan, dict[str, LogicalTensor]]:
    """The plan of the first exchange group."""
    specs = param_map(FAMILIES[architecture], shape)
    members = members_of(rollout.train.exchange_group(0), rollout, specs, stages, **options)
    tensors = tensors_of(specs)
    return make_plan(tensors, members, share_memory=[share] * len(members)), tensors
