"""One rank of the transition benchmark: a synthetic model in flat training memory, and the groups of its layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.hybrid_engine.layout import Slot
from megatron_rl.hybrid_engine.plan import ALIGNMENT, Member
from megatron_rl.model.families import FAMILIES, ModelShape, param_map
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.sharding import LogicalTensor, Place, Segment, box_index, shard_of

VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class Layout:
    """A training layout and the rollout TP and EP sizes it changes to; all on `world_size` ranks.

    ep_size: above 1, its experts have no tensor parallelism. rollout_ep_size: above 1, the model has experts.
    """

    name: str
    world_size: int
    tp_size: int
    pp_size: int
    rollout_tp_size: int
    ep_size: int = 1
    rollout_ep_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Sum over all processes."""
        return self.world_size

    @property
    def grid(self) -> RolloutGrid:
        etp_size = 1 if self.ep_size > 1 else None
        train = TrainGrid(self.world_size, self.tp_size, self.pp_size, self.ep_size, etp_size)
        return RolloutGrid(train, self.rollout_tp_size, self.rollout_ep_size)


def synthetic_model(num_tensors: int, num_bytes: int) -> dict[str, LogicalTensor]:
    """`num_tensors` float32 tensors of `num_bytes` in all: cut by rows, by columns, [gate; up] by rows, in turn."""
    side = max(16, int((num_bytes / 4 / num_tensors) ** 0.5) // 16 * 16)
    tensors = {}
    for number in range(num_tensors):
        name, kind = f"layer.{number}.weight", number % 3
        if kind == 2:
            half = (side // 2, side)
            segments = tuple(Segment(part, half, side // 2) for part in ("gate", "up"))
        else:
            segments = (Segment("all", (side, side), side),)
        tensors[name] = LogicalTensor(name, segments, tp_dim=1 if kind == 1 else 0)
    return tensors


def qwen2_model(megabytes: int) -> dict[str, LogicalTensor]:
    """A Qwen2 of about that size in float32, with all its tensors, small ones too.

    As many key/value heads as query heads: megatron-core's resharding cannot express stacked parts of unequal size.
    """
    hidden, ffn, vocab = 512, 1408, 8192
    per_layer = 4 * hidden * hidden + 3 * hidden * ffn
    num_layers = max(2, round((megabytes * 2**18 - 2 * vocab * hidden) / per_layer / 2) * 2)
    shape = ModelShape(num_layers, hidden, 8, 8, hidden // 8, ffn, vocab, tied=False)
    return _in_order(param_map(FAMILIES["Qwen2ForCausalLM"], shape))


def qwen3_moe_model(megabytes: int) -> dict[str, LogicalTensor]:
    """A Qwen3-MoE of about that size in float32: 16 experts a layer, which have nine tenths of its bytes."""
    hidden, ffn, vocab, num_experts = 512, 384, 2048, 16
    per_layer = 4 * hidden * hidden + 3 * hidden * ffn * num_experts
    num_layers = max(2, round((megabytes * 2**18 - 2 * vocab * hidden) / per_layer / 2) * 2)
    sizes = (num_layers, hidden, 8, 8, hidden // 8, ffn, vocab)
    shape = ModelShape(*sizes, tied=False, num_experts=num_experts, experts_per_token=2, qk_norm=True)
    return _in_order(param_map(FAMILIES["Qwen3MoeForCausalLM"], shape))


def _in_order(specs: Mapping[str, Any]) -> dict[str, LogicalTensor]:
    """Its tensors in the order of the layers: embedding first, final norm and head last."""
    tensors = {spec.tensor.name: spec.tensor for spec in specs.values()}
    last = {name: tensors.pop(name) for name in ("model.norm.weight", "lm_head.weight")}
    return tensors | last


class Wire:
    """torch.distributed with a count of the bytes of tensors received."""

    def __init__(self) -> None:
        self.bytes_received = 0

    def broadcast(self, tensor: torch.Tensor, src: int, group: dist.ProcessGroup) -> None:
        if dist.get_rank() != src:
            self.count(tensor)
        dist.broadcast(tensor, src, group=group)

    def all_gather(self, shards: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        for peer, shard in enumerate(shards):
            if peer != group.rank():
                self.count(shard)
        dist.all_gather(shards, mine, group=group)

    def count(self, tensor: torch.Tensor) -> None:
        self.bytes_received += tensor.numel() * tensor.element_size()


class ModelJob:
    """What a rank knows of the model, however its layouts lie on ranks. wanted: its place in rollout, if it has one."""

    def __init__(self, layout: Layout, tensors: dict[str, LogicalTensor]) -> None:
        self.layout = layout
        self.tensors = tensors
        self.rank = dist.get_rank()
        self.grid = layout.grid
        self.wanted: Place | None = None
        names = list(tensors)
        self.stage_of = {name: i * layout.pp_size // len(names) for i, name in enumerate(names)}
        self.slots: dict[str, Slot] = {}
        self.flat = torch.zeros(0)

    def hold(self) -> None:
        """Fill this rank's training memory."""
        train = self.grid.train
        self.place = train.place(self.rank, VOCAB_MULTIPLE)
        self.pp_rank = train.pp_rank(self.rank)
        slots, end = [], 0
        for name, tensor in self.tensors.items():
            if self.stage_of[name] == self.pp_rank:
                slots.append(Slot(name, 0, -(-end // ALIGNMENT) * ALIGNMENT, shard_of(tensor, self.place)))
                end = slots[-1].stop
        self.slots = {slot.name: slot for slot in slots}
        self.flat = torch.zeros(end)
        for slot in slots:
            for part in slot.shard.parts:
                self.held(slot.name)[part.index] = self.content(slot.name, part.segment)[box_index(part.box)]

    def held(self, name: str) -> torch.Tensor:
        """This rank's training shard, a view of the flat buffer."""
        slot = self.slots[name]
        return self.flat[slot.offset : slot.stop].view(slot.shard.shape)

    def content(self, name: str, segment: int) -> torch.Tensor:
        """The whole segment, the same on every rank: drawn from a seed of its own."""
        number = list(self.tensors).index(name)
        generator = torch.Generator().manual_seed(10 * number + segment)
        return torch.rand(self.tensors[name].segments[segment].shape, generator=generator)

    def empty_rollout_shards(self) -> dict[str, torch.Tensor]:
        """Memory for this rank's rollout shards."""
        return {name: torch.zeros(shard_of(tensor, self.wanted).shape) for name, tensor in self.tensors.items()}

    def load(self, shards: dict[str, torch.Tensor], name: str, whole: list[torch.Tensor]) -> None:
        """Copy this rank's rollout shard out of whole segments."""
        for part in shard_of(self.tensors[name], self.wanted).parts:
            shards[name][part.index].copy_(whole[part.segment][box_index(part.box)])

    def num_shards(self, name: str) -> int:
        """Number of different training shards of a tensor."""
        tensor, train = self.tensors[name], self.grid.train
        if tensor.is_expert:
            return train.expert_tp_size * train.ep_size
        return 1 if tensor.tp_dim is None else train.tp_size

    def merge(self, name: str, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole segments from all different training shards, in the order of their ranks in a stage."""
        tensor = self.tensors[name]
        if len(shards) == 1:
            return shards
        parts = [shard_of(tensor, self.grid.train.place(rank, VOCAB_MULTIPLE)).parts for rank in range(len(shards))]
        if self.grid.train.ep_size > 1 and tensor.is_expert:
            return [
                torch.cat([shard[own[number].index] for shard, own in zip(shards, parts, strict=True)])
                for number in range(len(tensor.segments))
            ]
        return [
            torch.cat([shard[own[number].index] for shard, own in zip(shards, parts, strict=True)], tensor.tp_dim)
            for number in range(len(tensor.segments))
        ]

    def is_right(self, shards: dict[str, torch.Tensor]) -> bool:
        """Return True if these are this rank's rollout shards of the whole model; a rank that only trains has none."""
        return self.wanted is None or all(
            torch.equal(shards[name][part.index], self.content(name, part.segment)[box_index(part.box)])
            for name, tensor in self.tensors.items()
            for part in shard_of(tensor, self.wanted).parts
        )


class Job(ModelJob):
    """This rank's memory and groups where all ranks train and generate. Every rank must construct it."""

    def __init__(self, layout: Layout, tensors: dict[str, LogicalTensor]) -> None:
        super().__init__(layout, tensors)
        train = self.grid.train
        self.tp_group, _ = dist.new_subgroups_by_enumeration(train.tp_groups())
        self.pp_group, _ = dist.new_subgroups_by_enumeration(train.pp_groups())
        experts = [
            [rank for rank in group if train.pp_rank(rank) == stage]
            for group in train.exchange_groups()
            for stage in range(train.pp_size)
        ]
        self.expert_group, _ = dist.new_subgroups_by_enumeration(experts)
        self.exchange_group, _ = dist.new_subgroups_by_enumeration(train.exchange_groups())
        self.rollout_group, _ = dist.new_subgroups_by_enumeration(self.grid.tp_groups())
        self.wanted = self.grid.place(self.rank, VOCAB_MULTIPLE)
        self.hold()

    def group_of(self, name: str) -> dist.ProcessGroup:
        """The ranks that hold the different training shards of a tensor that is cut."""
        return self.expert_group if self.tensors[name].is_expert else self.tp_group

    @cached_property
    def member(self) -> Member:
        return Member(self.rank, 0, self.grid.train.tp_rank(self.rank), tuple(self.slots.values()), self.wanted)
